"""Pieces of a job inside a text: where each kind begins, which lines belong to it, where it ends.

A collector takes the following lines, without their prefix, until it says that it has enough. Sizes are bounded; what
is collected is only text, read later by :mod:`estimator.diagnose.job`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from estimator.catalog import fields as catalog
from estimator.diagnose.evidence import Fragment

MAX_LINES = 4_000
MAX_CHARS = 300_000
MAX_FRAGMENTS = 24

_ARGUMENT = re.compile(r"\s{0,4}[a-z_0-9]{2,80} \.{0,60} ?\S?")
_SUMMARY_HEAD = re.compile(r"\s{0,4}\[[a-z_]{2,20}\](?: Non-default values .{0,80})?:")
_TOP_KEY = re.compile(r"([a-z_]{2,40}):(?: .{0,200})?$")
_COMMAND = re.compile(
    r"(?:\btorchrun\b|\bsrun\b|torch\.distributed\.(?:run|launch)|\bdeepspeed\b|\baccelerate launch\b"
    r"|--recipe\b|run_recipe\.py)"
)
_PYTHON = re.compile(r"\s{0,8}(?:cfg|config)\.[a-z_]{2,40}(?:\.[a-z_A-Z]{2,60}){1,3}(?:\[[^\]\n]{1,60}\])? ?= ?[^=]")


_COMMAND_WORDS = ("torchrun", "srun", "torch.distributed", "deepspeed", "accelerate", "--recipe", "run_recipe")


@dataclass(slots=True)
class Collector:
    """``takes`` says whether a line (without its prefix) belongs; ``closes`` whether it is the last one."""

    kind: str
    line: int
    takes: Callable[[str], bool]
    closes: Callable[[str], bool]
    drop_head: bool = False
    parts: list[str] = field(default_factory=list)
    chars: int = 0
    depth: int = 0

    def feed(self, text: str) -> bool:
        """Take a line; False when the piece is complete."""
        if not self.takes(text) or len(self.parts) >= MAX_LINES or self.chars > MAX_CHARS:
            return False
        self.parts.append(text)
        self.chars += len(text) + 1
        if self.kind in BRACED:
            self.depth += text.count("{") - text.count("}")
            return self.depth > 0
        return not self.closes(text)

    def fragment(self) -> Fragment:
        return Fragment(self.kind, self.line, "\n".join(self.parts))


BRACED = frozenset({"json"})


def _never(_: str) -> bool:
    return False


def _always(_: str) -> bool:
    return True


def _is_argument(text: str) -> bool:
    return bool(_ARGUMENT.match(text)) or "end of arguments" in text or "arguments ---" in text


def _is_yaml(text: str) -> bool:
    """Indented, a list item, a blank or comment line, or one of ConfigContainer's own keys."""
    if not text.strip() or text[0] in " -#" or text.startswith("..."):
        return True
    match = _TOP_KEY.match(text)
    return bool(match) and (match is not None) and (match[1] in catalog.sections() or match[1].startswith("_"))


def _is_foreign_yaml(text: str) -> bool:
    return not text.strip() or text[0] in " -#" or bool(re.match(r"[a-z_A-Z]{2,60}:", text))


def _is_summary(text: str) -> bool:
    stripped = text.strip()
    return not stripped or stripped[0] in "[=-CO" or bool(re.match(r"\s{1,8}[a-z_0-9A-Z]{1,80}: ", text))


def _continues(text: str) -> bool:
    return not text.rstrip().endswith("\\")


NEEDLES: tuple[str, ...] = (
    " .....",
    "_target_:",
    "Configuration Summary",
    '"architectures"',
    '"num_hidden_layers"',
    '"zero_optimization"',
    "zero_stage",
    "distributed_type",
    "torchrun",
    "srun ",
    "torch.distributed.run",
    "torch.distributed.launch",
    "deepspeed ",
    "accelerate launch",
    "--recipe",
    "run_recipe.py",
    "cfg.",
    "config.ddp",
    "config.model",
    "config.train",
)


def start_of(text: str, number: int) -> Collector | None:
    """A collector if a piece begins with this line (prefix already taken off)."""
    if " ....." in text and _ARGUMENT.match(text):
        return Collector("megatron_arguments", number, _is_argument, lambda t: "end of arguments" in t)
    if "_target_:" in text and _is_yaml(text):
        return Collector("bridge_yaml", number, _is_yaml, _never)
    if "Configuration Summary" in text:
        return Collector("bridge_summary", number, _is_summary, _never)
    if ("zero_stage" in text or "distributed_type" in text) and re.match(r"\s{0,8}[a-z_]{2,40}: ", text):
        return Collector("accelerate", number, _is_foreign_yaml, _never)
    if (
        any(word in text for word in _COMMAND_WORDS)
        and _COMMAND.search(text)
        and not text.lstrip().startswith(("File ", "#"))
    ):
        return Collector("command", number, _always, _continues)
    if "." in text and "=" in text and _PYTHON.match(text):
        return Collector("python", number, lambda t: bool(_PYTHON.match(t)), _never)
    return None


def whole_document(head: str) -> str | None:
    """Kind of a text that is one document from its first line on: "bridge_yaml", "json", "accelerate"; else None."""
    for line in head.splitlines()[:20]:
        stripped = line.strip()
        if not stripped or stripped.startswith("#") or stripped == "---":
            continue
        if stripped.startswith("{"):
            return "json"
        match = _TOP_KEY.match(line)
        if match and (match[1] in catalog.sections() or match[1] == "_target_"):
            return "bridge_yaml"
        if match and match[1] in ("compute_environment", "distributed_type", "fsdp_config", "deepspeed_config"):
            return "accelerate"
        return None
    return None


def document_collector(kind: str) -> Collector:
    takes = {"bridge_yaml": _is_yaml, "json": _always, "accelerate": _is_foreign_yaml}[kind]
    return Collector(kind, 1, takes, _never)
