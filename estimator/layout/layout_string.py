"""Pipeline layouts written out: ``Et*3|(tt|)*29,m|L``, or a list of stages.

Letters: E embedding, t decoder layer, m MTP layer, L loss. Bars separate virtual stages in the order in which a
microbatch passes them. Source: megatron-core 0.19.2, transformer/pipeline_parallel_layer_layout.py:16-130 and 282-330.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_REPEATED_GROUP = re.compile(r"\(([^)]+)\)\*(\d+)")
_REPEATED_LETTER = re.compile(r"(.)\*(\d+)")
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def parse_layout(layout: str | Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Letters of each virtual stage in model order, as in ("Ett", "tt", "ttL").

    A text is unrolled; a list holds Megatron's layer names. Raises ValueError for anything else.
    """
    if isinstance(layout, str):
        text = layout.replace(",", "")
        for pattern in (_REPEATED_GROUP, _REPEATED_LETTER):
            text = pattern.sub(lambda found: found.group(1) * int(found.group(2)), text)
        stages = tuple(text.split("|"))
    else:
        stages = tuple("".join(_letter(name) for name in stage) for stage in layout)
    unknown = sorted(set("".join(stages)) - set("EtmL"))
    if unknown:
        raise ValueError(f"pipeline_model_parallel_layout has unknown layers: {', '.join(unknown)}")
    return stages


def _letter(name: str) -> str:
    key = name.strip().lower().rpartition(".")[2]
    if key not in _LETTERS:
        raise ValueError(f"pipeline_model_parallel_layout has an unknown layer type {name!r}")
    return _LETTERS[key]
