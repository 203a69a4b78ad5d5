"""One line of a log: escape sequences taken out, prefixes understood, offsets kept."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]{0,24}[ -/]{0,2}[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)?|[@-Z\\^_])")
RANK_MARK = re.compile(r"\[(?:rank|default|Rank )(\d{1,7})\]:?")
_PREFIX = re.compile(
    r"\s{0,8}(?:"
    r"\[rank(\d{1,7})\]:?"  # PyTorch's own
    r"|\[default(\d{1,7})\]:"  # torchelastic --tee
    r"|\[1,(\d{1,7})\]<std(?:err|out)>:?"  # mpirun --tag-output
    r"|(\d{1,7}):(?=\s|$)"  # srun --label
    r"|[Rr]ank[ =:]?(\d{1,7})\s?[:|\]]"
    r") ?"
)
_HOST = re.compile(r"\s{0,4}(?!File |Traceback)[A-Za-z][\w.\-]{0,60}(?:/\d{1,4}|:)\s(?=\s{0,4}\S)")
_EXCEPTION_NAME = re.compile(r"\s{0,8}[\w.]{0,80}(?:Error|Exception|Warning|error|Killed|memory)\s?:")
TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?")
MAX_MARKS = 32


@dataclass(frozen=True, slots=True)
class Line:
    """``text`` is clean; ``offsets`` maps its characters to columns of the raw line (None = shifted by ``column``)."""

    number: int
    column: int
    text: str
    raw: str
    offsets: tuple[int, ...] | None

    def span(self, start: int, stop: int) -> tuple[int, str]:
        """(column, verbatim text) of a part of the clean text."""
        if self.offsets is None:
            return self.column + start, self.text[start:stop]
        first = self.offsets[start] if start < len(self.offsets) else len(self.raw)
        last = self.offsets[stop - 1] + 1 if 0 < stop <= len(self.offsets) else len(self.raw)
        return self.column + first, self.raw[first : max(first, last)]


def read_line(number: int, column: int, data: bytes) -> Line:
    """Decode (bytes that are not UTF-8 become U+FFFD) and take escape sequences out."""
    raw = data.decode("utf-8", "replace")
    if "\x1b" not in raw:
        return Line(number, column, raw, raw, None)
    parts: list[str] = []
    offsets: list[int] = []
    position = 0
    for match in _ESCAPE.finditer(raw):
        parts.append(raw[position : match.start()])
        offsets.extend(range(position, match.start()))
        position = match.end()
    parts.append(raw[position:])
    offsets.extend(range(position, len(raw)))
    return Line(number, column, "".join(parts), raw, tuple(offsets))


def prefix_of(text: str) -> tuple[int | None, int]:
    """(rank that the prefix names, length of the prefix). Understood: ``[rank5]:``, ``0: ``, ``host: ``,
    ``name/0 [rank54]:``, ``[default3]:``, ``[1,3]<stderr>:``; up to three of them."""
    position = 0
    rank: int | None = None
    for _ in range(3):
        match = _PREFIX.match(text, position)
        if match:
            digits = next((group for group in match.groups() if group), None)
            rank = int(digits) if digits else rank
            position = match.end()
            continue
        host = None if _EXCEPTION_NAME.match(text, position) else _HOST.match(text, position)
        if host is None or (host.group().rstrip().endswith(":") and not _PREFIX.match(text, host.end()) and position):
            break
        position = host.end()
    return rank, position


def rank_prefix(text: str) -> int:
    """Length of the prefix up to the last part of it that names a rank: "  key: value" is no host's name here."""
    position = 0
    for _ in range(2):
        match = _PREFIX.match(text, position)
        if match is None:
            host = _HOST.match(text, position)
            match = _PREFIX.match(text, host.end()) if host else None
        if match is None:
            break
        position = match.end()
    return position


def segments(text: str) -> list[tuple[int, int, int | None]]:
    """Parts of a line that belong to one rank each: (start, stop, rank). Two ranks may share a line."""
    rank, _ = prefix_of(text)
    marks = []
    for match in RANK_MARK.finditer(text):
        marks.append((match.start(), int(match[1])))
        if len(marks) == MAX_MARKS:
            break
    if not marks:
        return [(0, len(text), rank)]
    bounds = [] if marks[0][0] == 0 else [(0, marks[0][1] if not text[: marks[0][0]].strip() else rank)]
    bounds += marks
    return [
        (start, bounds[i + 1][0] if i + 1 < len(bounds) else len(text), owner)
        for i, (start, owner) in enumerate(bounds)
    ]


def time_of(text: str) -> str:
    """The time stamp near the start of a line, as it sorts; "" if there is none."""
    match = TIME.search(text, 0, 160)
    return match.group().replace("T", " ").replace(",", ".") if match else ""
