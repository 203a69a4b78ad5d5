"""Hydra-style override strings, as Bridge's scripts take them on the command line.

The grammar is the part of hydra-core 1.3's override grammar that Bridge's ``parse_hydra_overrides`` can apply
(megatron-bridge 0.6.2, training/utils/omegaconf_utils.py:142-170): one value a key, quotes, lists and mappings. Sweeps,
config groups and interpolations inside a text are refused by name. Read by hand, without evaluating anything.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from estimator.job.operations import Lookup, Operation, Unreadable

_HEAD = re.compile(r"\s*(?P<mark>\+\+|\+|~)?(?P<key>[A-Za-z_][\w\-]*(?:\.[\w\-]+)*)\s*(?P<eq>=)?", re.ASCII)
_INT = re.compile(r"[+-]?(?:0|[1-9](?:_?[0-9])*)")
_DIGITS = r"[0-9](?:_?[0-9])*"
_FLOAT = re.compile(rf"[+-]?(?:(?:{_DIGITS})?\.{_DIGITS}|{_DIGITS}\.|{_DIGITS}(?=[eE]))(?:[eE][+-]?{_DIGITS})?")
_SPECIAL = re.compile(r"[+-]?(?:inf|nan)", re.IGNORECASE)
_CAST = re.compile(r"\s*(?P<name>int|float|str|bool)\((?P<value>.*)\)\s*", re.DOTALL)
_PLAIN = re.compile(r"(?:[\w/\-+.$%*@?|: \t]|\\[\\()\[\]{}:=, \t]|\\|[^\x00-\x7f])*+")
_INTERPOLATION = re.compile(r"\s*\$\{(?P<path>\w+(?:\.\w+)*)\}\s*", re.ASCII)
_MAX_DEPTH = 20
_MAX_DIGITS = 25


def read_hydra(text: str, where: str) -> Operation:
    """One ``key=value``, ``+key=value``, ``++key=value`` or ``~key`` string. Raises Unreadable."""
    head = _HEAD.match(text)
    if head is None:
        raise Unreadable(f"is not of the form section.field=value: {text[:80]!r}", "train.micro_batch_size=1")
    mark, rest = head["mark"] or "", text[head.end() :]
    if head["eq"] is None:
        if rest[:1] in ("@", "/", ":"):
            raise Unreadable("config groups and packages (@, /, :) do not exist in Bridge's configuration")
        if mark != "~" or rest.strip():
            raise Unreadable(f"has no '=' after {head['key']!r}", f"{head['key']}=VALUE")
        return Operation("delete", tuple(head["key"].split(".")), None, where, "hydra", text.strip())
    reference = _INTERPOLATION.fullmatch(rest)
    value = functools.partial(_look_up, tuple(reference["path"].split("."))) if reference else read_value(rest)
    kind = {"": "set", "+": "add", "++": "force", "~": "delete"}[mark]
    return Operation(kind, tuple(head["key"].split(".")), value, where, "hydra", text.strip())  # type: ignore[arg-type]


def _look_up(path: tuple[str, ...], lookup: Lookup) -> Any:
    try:
        return lookup(path)
    except KeyError:
        raise Unreadable(f"refers to {'.'.join(path)[:80]!r}, which does not exist") from None


def read_value(text: str) -> Any:
    """A Hydra value: null, bool, int, float, text, list or mapping. An empty text is the empty string."""
    cast = _CAST.fullmatch(text)
    if cast:
        return _cast(cast["name"], read_value(cast["value"]))
    reader = _Reader(text)
    value = reader.element(0, "")
    reader.skip()
    if reader.position < len(text):
        rest = text[reader.position :]
        if rest.startswith(","):
            raise Unreadable(
                "is a sweep over several values; give one value, or a list in [ ]", f"[{text.strip()[:60]}]"
            )
        raise Unreadable(f"has something after its value: {rest[:40]!r}")
    return value


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def skip(self) -> None:
        while self.position < len(self.text) and self.text[self.position] in " \t":
            self.position += 1

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def element(self, depth: int, stops: str) -> Any:
        if depth > _MAX_DEPTH:
            raise Unreadable(f"is nested deeper than {_MAX_DEPTH} levels")
        self.skip()
        char = self.peek()
        if char == "[":
            return self.items(depth)
        if char == "{":
            return self.mapping(depth)
        if char in ("'", '"'):
            return self.quoted(char)
        return self.primitive(stops)

    def items(self, depth: int) -> list[Any]:
        self.position += 1
        found: list[Any] = []
        while not self.closed("]", bool(found)):
            found.append(self.element(depth + 1, ",]"))
        return found

    def mapping(self, depth: int) -> dict[str, Any]:
        self.position += 1
        found: dict[str, Any] = {}
        while not self.closed("}", bool(found)):
            key = self.quoted(self.peek()) if self.peek() in ("'", '"') else self.primitive(":,}")
            self.skip()
            if self.peek() != ":":
                raise Unreadable("has a mapping without ':' after a key")
            self.position += 1
            found[str(key)] = self.element(depth + 1, ",}")
        return found

    def closed(self, end: str, comma_before_next: bool) -> bool:
        """Whether the list or mapping ends here; otherwise the reader stands at its next element."""
        what = "list" if end == "]" else "mapping"
        self.skip()
        if self.peek() == end:
            self.position += 1
            return True
        if comma_before_next:
            if self.peek() != ",":
                raise Unreadable(f"has an unclosed {what}")
            self.position += 1
            self.skip()
        if not self.peek():
            raise Unreadable(f"has an unclosed {what}")
        return False

    def quoted(self, quote: str) -> str:
        """Backslashes count only in front of the quote (or of the closing one): each pair is one, a last odd one
        escapes it. Elsewhere they stand for themselves."""
        self.position += 1
        parts: list[str] = []
        while True:
            char = self.peek()
            if not char:
                raise Unreadable(f"has an unclosed quote {quote}")
            if char == "\\":
                run = len(self.text) - self.position - len(self.text[self.position :].lstrip("\\"))
                self.position += run
                if self.peek() != quote:
                    parts.append("\\" * run)
                    continue
                parts.append("\\" * (run // 2))
                if run % 2:
                    parts.append(quote)
                    self.position += 1
                continue
            self.position += 1
            if char == quote:
                return "".join(parts)
            parts.append(char)

    def primitive(self, stops: str) -> Any:
        start = self.position
        while self.position < len(self.text):
            char = self.text[self.position]
            if char == "\\":
                self.position += 2
                continue
            if char == "," or (char in stops and char != ""):
                break
            self.position += 1
        raw = _stripped(self.text[start : min(self.position, len(self.text))])
        if stops and not raw:
            raise Unreadable("has a list or mapping with nothing where an element belongs")
        if "${" in raw:
            raise Unreadable("uses an interpolation ${...} inside a value; write the value itself")
        if not _PLAIN.fullmatch(raw):
            raise Unreadable(f"has a character that needs quotes: {raw[:60]!r}", f'"{raw[:60]}"')
        return _typed(re.sub(r"\\([\\()\[\]{}:=, \t])", r"\1", raw) if "\\" in raw else raw)


def _stripped(text: str) -> str:
    """Without blanks at its ends, except one that a backslash escapes."""
    raw = text.lstrip(" \t")
    short = raw.rstrip(" \t")
    num_backslashes = len(short) - len(short.rstrip("\\"))
    return raw[: len(short) + num_backslashes % 2]


def _typed(raw: str) -> Any:
    low = raw.lower()
    if low == "null":
        return None
    if low in ("true", "false"):
        return low == "true"
    if _INT.fullmatch(raw):
        if len(raw) > _MAX_DIGITS:
            raise Unreadable(f"has a number of {len(raw)} digits")
        return int(raw)
    if len(raw) <= 400 and (_FLOAT.fullmatch(raw) or _SPECIAL.fullmatch(raw)):
        return float(raw)
    return raw


def _cast(name: str, value: Any) -> Any:
    try:
        if name == "str":
            return (
                {True: "true", False: "false", None: "null"}.get(value, str(value))
                if not _is_number(value)
                else str(value)
            )
        if name == "bool":
            return value.lower() == "true" if isinstance(value, str) else bool(value)
        return int(value) if name == "int" else float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise Unreadable(f"cannot be cast to {name}: {str(error)[:80]}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
