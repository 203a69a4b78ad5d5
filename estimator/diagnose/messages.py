"""A failure message that is being read: it may be wrapped over several lines, or cut off."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field

from estimator.diagnose.evidence import Span
from estimator.diagnose.kinds import Kind
from estimator.diagnose.lines import Line

MAX_CONTINUATION = 9
MAX_CHARS = 8_000
COMPLETE = re.compile(
    r"but\s{1,8}unallocated|reserved\s{1,8}in\s{1,8}total|\bcached\)|PYTORCH_CUDA_ALLOC_CONF|max_split_size_mb"
    r"|memory fraction\)|more than 1\s?EB"
)
"""What ends a message of the allocator: after it nothing more is said about memory."""


@dataclass(slots=True)
class Message:
    """Text so far, and where each part of it stands in the log."""

    kind: Kind
    rank: int | None
    frames: tuple[str, ...]
    iteration: int | None
    phase: str | None
    time: str
    text: str = ""
    num_lines: int = 0
    starts: list[int] = field(default_factory=list)
    parts: list[tuple[Line, int]] = field(default_factory=list)
    blanks: int = 0

    def add(self, line: Line, start: int, stop: int) -> None:
        """Take a part of a line; parts are joined by newlines."""
        if self.text:
            self.text += "\n"
        self.starts.append(len(self.text))
        self.parts.append((line, start))
        self.text += line.text[start:stop][: max(0, MAX_CHARS - len(self.text))]
        self.num_lines += 1

    def blank(self) -> bool:
        """A blank line; True when the message ends with it (the asynchronous allocator's has blank lines)."""
        self.blanks += 1
        return self.blanks > 1 or self.kind.kind_id != "cuda_malloc_async"

    def span(self, start: int, stop: int) -> Span:
        """The place of a part of the text. A part that goes over a line break is verbatim line by line."""
        first = bisect_right(self.starts, start) - 1
        last = max(first, bisect_right(self.starts, max(start, stop - 1)) - 1)
        texts = []
        column = 0
        for index in range(first, last + 1):
            line, offset = self.parts[index]
            begin = max(start, self.starts[index]) - self.starts[index] + offset
            next_start = self.starts[index + 1] - 1 if index + 1 < len(self.starts) else len(self.text)
            end = min(stop, next_start) - self.starts[index] + offset
            where, text = line.span(begin, end)
            if index == first:
                column = where
            texts.append(text)
        return Span(self.parts[first][0].number, column, "\n".join(texts))
