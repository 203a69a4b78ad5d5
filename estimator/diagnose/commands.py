"""Command lines in a log: how many GPUs they start, which recipe, which overrides and Megatron-LM arguments."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from estimator.catalog import fields as catalog
from estimator.diagnose.translation import MISSING, literal

MAX_CHARS = 20_000
MAX_TOKENS = 1_000

_OVERRIDE = re.compile(r"(?:\+\+|\+|~)?([a-z_]{2,40})\.[A-Za-z_][\w.]{0,120}=", re.ASCII)
_ENVIRONMENT = re.compile(r"([A-Z][A-Z0-9_]{2,60})=(.{0,400})", re.DOTALL)
_NODES = ("nnodes", "num-nodes", "num_nodes", "nodes", "num_machines")
_PER_NODE = ("nproc_per_node", "nproc-per-node", "ntasks-per-node", "gpus-per-node", "num_gpus", "gpus_per_node")
_TOTAL = ("num_processes", "ntasks", "num-gpus")
_SHORT = {"N": "nnodes", "n": "ntasks"}


@dataclass(slots=True)
class Command:
    """What one command line says."""

    num_nodes: int | None = None
    gpus_per_node: int | None = None
    num_gpus: int | None = None
    gpu: str | None = None
    recipe: str | None = None
    overrides: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int | None:
        """GPUs in all, if the line says so."""
        if self.num_gpus:
            return self.num_gpus
        if self.gpus_per_node:
            return self.gpus_per_node * (self.num_nodes or 1)
        return None


def read_command(text: str) -> Command:
    """Never raises; nothing is executed or expanded."""
    command = Command()
    words = _words(text[:MAX_CHARS].replace("\\\r\n", " ").replace("\\\n", " "))[:MAX_TOKENS]
    index = 0
    while index < len(words):
        word = words[index]
        following = words[index + 1] if index + 1 < len(words) else None
        index += 1
        if word.startswith("-") and not word[1:2].isdigit():
            index += _flag(command, word, following)
            continue
        if match := _OVERRIDE.match(word):
            if match[1] in catalog.sections():
                command.overrides.append(word)
        elif match := _ENVIRONMENT.match(word):
            command.environment[match[1]] = match[2]
    return command


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=False)
    except ValueError:
        return text.split()


def _flag(command: Command, word: str, following: str | None) -> int:
    """Take one flag; returns how many of the following words belong to it."""
    name, equals, value = word.lstrip("-").partition("=")
    used = 0
    if not equals:
        if following is not None and (not following.startswith("-") or following[1:2].isdigit()):
            value, used = following, 1
        else:
            value = "True"
    if not word.startswith("--"):
        if len(name) > 1 and name[0] in _SHORT and name[1:].isdigit():
            name, value, used = name[0], name[1:], 0
        name = _SHORT.get(name, name)
    number = int(value) if value.isascii() and value.isdigit() and len(value) < 8 and int(value) > 0 else None
    if name in _NODES:
        command.num_nodes = number or command.num_nodes
    elif name in _PER_NODE:
        command.gpus_per_node = number or command.gpus_per_node
    elif name in _TOTAL:
        command.num_gpus = number or command.num_gpus
    elif name in ("recipe", "recipe-name"):
        command.recipe = value
    elif name == "gpu":
        command.gpu = value
    else:
        _argument(command, name, value, used)
        if _OVERRIDE.match(value) or (used and value.endswith(".py")):
            return 0
    return used


def _argument(command: Command, name: str, value: str, used: int) -> None:
    """A Megatron-LM argument, by its attribute's name: --no-x-y is x_y = False."""
    plain = name.replace("-", "_")
    if not plain.isidentifier():
        return
    if plain.startswith("no_") and not used:
        command.arguments[plain[3:]] = False
        return
    read = literal(value)
    if read is not MISSING:
        command.arguments[plain] = read
