"""How much of the corpus is read exactly right, by group of texts: the numbers of docs/diagnosis.md.

``python tests/estimator/diagnose/shares.py`` prints the table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from corpus import texts

from estimator.diagnose import Evidence, diagnose, parse_text


@dataclass
class Share:
    texts: int = 0
    facts: int = 0
    right_facts: int = 0
    right_causes: int = 0


def right_facts(evidence: Evidence, expected: dict[str, Any]) -> int:
    first = evidence.first
    if first is None:
        return 0
    found = {fact.name: fact.value for fact in reversed(first.facts)}
    return sum(name in found and found[name] == value for name, value in expected.items())


GROUPS = {
    "allocator, 2.1 and later": r"(loss|attention|mlp|first_step|gather|build|load|save|evaluate|fragmented|other_process"
    r"|container|capped|graphs|cut|misspelt|wrapped)_",
    "allocator, older and other makers": r"(two|oldest|npu|hip|malloc_async|habana|level_zero|jax)_",
    "driver, libraries, NCCL, corrupt sizes": r"(nccl|cuda_error|triton|blas|nvshmem|allocator_assert|absurd|exabyte|clone)",
    "host": r"(kernel|cgroup|cpu_allocator|sigkill|slurm|ray|errno|dataloader)",
    "Megatron FSDP's own failures": r"fsdp_",
    "framing": r"framed_",
    "several failures, settings, no OOM": r"",
}


def shares(corpus: Iterable[Any]) -> dict[str, Share]:
    result = {name: Share() for name in GROUPS}
    for text in corpus:
        group = next(name for name, pattern in GROUPS.items() if re.match(pattern, text.name))
        share = result[group]
        evidence = parse_text(text.text)
        causes = diagnose(evidence).causes
        share.texts += 1
        share.facts += len(text.facts)
        share.right_facts += right_facts(evidence, text.facts)
        share.right_causes += bool(causes) and causes[0].cause == text.cause
    return result


def table(found: dict[str, Share]) -> str:
    lines = ["| texts | number | facts exactly right | first cause right |", "|---|---|---|---|"]
    for name, s in found.items():
        lines.append(f"| {name} | {s.texts} | {s.right_facts} of {s.facts} | {s.right_causes} of {s.texts} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(shares(texts())))
