"""What a person types in Slack, as a request to the service."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_INPUT_CHARACTERS = 3000
"""What one plain_text_input of Slack holds."""
_GPUS = re.compile(r"(\d{1,7})\s*[x*×]\s*([A-Za-z0-9][\w.\- ]{0,80})", re.IGNORECASE)
_MARKS = re.compile(r"^`{1,3}|`{1,3}$")


@dataclass(frozen=True, slots=True)
class Asked:
    """Everything that a modal holds, as text."""

    recipe: str = ""
    gpu: str = ""
    num_gpus: str = ""
    overrides: tuple[str, ...] = ()
    text: str = ""
    evidence_id: str = ""
    config: Mapping[str, Any] | None = None
    errors: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return bool(
            self.gpu and self.num_gpus.isdigit() and (self.recipe or self.config or self.text or self.evidence_id)
        )

    def body(self) -> dict[str, Any]:
        """The body of POST /recommend. Raises ValueError unless the number of GPUs is one."""
        job: dict[str, Any] = {"overrides": list(self.overrides)}
        if self.recipe:
            job["recipe"] = self.recipe
        if self.config:
            job["config"] = dict(self.config)
        evidence = {"log": self.text or None, "evidence_id": self.evidence_id or None}
        return {
            "job": job,
            "cluster": {"gpu": self.gpu, "num_gpus": int(self.num_gpus)},
            "evidence": {name: value for name, value in evidence.items() if value},
        }


def read_command(text: str) -> Asked:
    """``<recipe> <n>x<gpu> [override ...]`` in any order, as ``/oom`` takes it."""
    recipe, gpu, count, overrides = "", "", "", []
    for word in text.replace("“", '"').replace("”", '"').split():
        match = _GPUS.fullmatch(word)
        if match and not gpu:
            count, gpu = match[1], match[2]
        elif "=" in word:
            overrides.append(_MARKS.sub("", word))
        elif not recipe:
            recipe = _MARKS.sub("", word)
        else:
            overrides.append(word)
    return Asked(recipe=recipe, gpu=gpu, num_gpus=count, overrides=tuple(overrides))


def override_lines(text: str) -> tuple[str, ...]:
    """One override a line; Python lines stay together."""
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("```")]
    if any(line.lstrip().startswith(("cfg.", "import ", "from ", "del ")) for line in lines):
        return ("\n".join(lines),)
    return tuple(line.strip() for line in lines)


def filled(asked: Asked, answer: Mapping[str, Any]) -> Asked:
    """What the service read in a text, where nothing was typed."""
    job = answer.get("job") or {}
    cluster = answer.get("cluster") or answer.get("known_of_cluster") or {}
    return Asked(
        recipe=asked.recipe or str(job.get("recipe") or ""),
        gpu=asked.gpu or str(cluster.get("gpu") or ""),
        num_gpus=asked.num_gpus or str(cluster.get("num_gpus") or ""),
        overrides=asked.overrides or tuple(str(item) for item in job.get("overrides") or ()),
        text=asked.text,
        evidence_id=asked.evidence_id,
        config=asked.config or job.get("config"),
    )
