"""A text in blocks, and which of its lines deserve a look.

A log of 100 MB has a million lines, of which a few hundred matter. Lines are joined to blocks of about a MiB; every
needle (a text without which no line can matter) is found by its rarest four bytes: all windows of four bytes of a block
are looked up in one table with numpy. Lines with a hit are then read one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 20
MAX_PIECE_BYTES = 32 << 10
"""Of a longer line, pieces of this size are read on their own."""
DECISIVE_PER_BLOCK = 1_000
"""Lines of a block that are read because they may report a failure; of more, the first and the last half."""
FIRST_PER_BLOCK, LAST_PER_BLOCK = 100, 200
"""Lines of a block that are read because they may tell something about the job."""
BEFORE_FAILURE = 150
"""So many lines before a decisive one are all looked at: its traceback."""

_HASH_BITS = 20
_HASH_FACTOR = np.uint32(2654435761)
_COMMON = tuple(
    b"memory|error|Error|iteration|NCCL|rank|torch|CUDA|cuda|process|model|loss|step|time|train|size|parallel|tensor"
    b"|: |INFO|allocat|config|data|failed|gradient".split(b"|")
)
"""Words of ordinary log lines: windows inside them are a bad choice to look for."""
_LETTERS = ("etaoinsr ", "hldcumfgp", "wybvk_.,:", "jxqz-/=()[]")
_RARE = {letter: weight for weight, letters in enumerate(_LETTERS) for letter in letters}


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines. ``data`` ends in a newline; ``first_line`` is the 1-based number of its first line."""

    data: bytes
    first_line: int


def blocks(lines: Iterable[bytes | str]) -> Iterator[Block]:
    """Join lines (with or without their newline; an item may hold several lines) to blocks of about a MiB."""
    parts: list[bytes] = []
    size = 0
    number = 1
    wide = False
    for count, item in enumerate(lines):
        raw = item.encode("utf-8", "replace") if isinstance(item, str) else bytes(item)
        if count == 0:
            wide = raw[:2] in (b"\xff\xfe", b"\xfe\xff")
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if wide:
            raw = raw.replace(b"\x00", b"").removeprefix(b"\xff\xfe").removeprefix(b"\xfe\xff")
        if not raw.endswith(b"\n"):
            raw += b"\n"
        parts.append(raw)
        size += len(raw)
        if size >= BLOCK_BYTES:
            data = b"".join(parts)
            for piece in _cut(data):
                yield Block(piece, number)
                number += piece.count(b"\n")
            parts, size = [], 0
    if parts:
        for piece in _cut(b"".join(parts)):
            yield Block(piece, number)
            number += piece.count(b"\n")


def _cut(data: bytes) -> Iterator[bytes]:
    """Large items to blocks, at newlines; a single line stays whole."""
    start = 0
    while len(data) - start > 2 * BLOCK_BYTES:
        stop = data.find(b"\n", start + BLOCK_BYTES)
        if stop < 0 or stop + 1 >= len(data):
            break
        yield data[start : stop + 1]
        start = stop + 1
    if start < len(data):
        yield data[start:] if start else data


def _rarest(needle: bytes) -> bytes:
    """The four bytes of a needle that texts have least often, by the letters in them."""
    windows = [needle[i : i + 4] for i in range(len(needle) - 3)]
    return max(windows, key=lambda w: sum(_RARE.get(chr(c), 4) for c in w) - 20 * any(w in c for c in _COMMON))


class Finder:
    """Finds the lines of a block that may matter."""

    def __init__(self, decisive: Sequence[bytes], informative: Sequence[bytes]) -> None:
        self.table: NDArray[np.uint8] = np.zeros(1 << _HASH_BITS, np.uint8)
        for needles, grade in ((informative, 1), (decisive, 2)):
            for needle in needles:
                if len(needle) < 4:
                    raise ValueError(f"needle {needle!r} is too short")
                window = int.from_bytes(_rarest(needle), "little")
                slot = ((window * int(_HASH_FACTOR)) & 0xFFFFFFFF) >> (32 - _HASH_BITS)
                self.table[slot] = max(int(self.table[slot]), grade)

    def lines(self, data: bytes, most: int = DECISIVE_PER_BLOCK) -> tuple[NDArray[np.int64], NDArray[np.int64], bool]:
        """(end of each line, indices of the lines to read, whether some were left out)."""
        array = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(array == 10)
        hits, grades = self._hits(data)
        index = np.searchsorted(ends, hits)
        decisive = np.unique(index[grades == 2])
        informative = np.unique(index[grades == 1])
        cut = len(decisive) > most
        if cut:
            half = most // 2
            decisive = np.concatenate((decisive[:half], decisive[-half:]))
        if len(informative) > FIRST_PER_BLOCK + LAST_PER_BLOCK:
            informative = self._thinned(informative, decisive)
        return ends, np.union1d(decisive, informative), cut

    @staticmethod
    def _thinned(informative: NDArray[np.int64], decisive: NDArray[np.int64]) -> NDArray[np.int64]:
        kept = np.zeros(len(informative), bool)
        kept[:FIRST_PER_BLOCK] = True
        kept[-LAST_PER_BLOCK:] = True
        if len(decisive):
            following = np.searchsorted(decisive, informative)
            distance = decisive[np.minimum(following, len(decisive) - 1)] - informative
            near = (distance >= 0) & (distance <= BEFORE_FAILURE)
            kept[np.flatnonzero(near)[:2000]] = True
        return informative[kept]

    def _hits(self, data: bytes) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        found: list[NDArray[np.int64]] = []
        grades: list[NDArray[np.uint8]] = []
        for shift in range(min(4, max(0, len(data) - 3))):
            count = (len(data) - shift) // 4
            windows = np.frombuffer(data, "<u4", count, shift)
            grade = self.table[(windows * _HASH_FACTOR) >> np.uint32(32 - _HASH_BITS)]
            at = np.flatnonzero(grade)
            found.append(at.astype(np.int64) * 4 + shift)
            grades.append(grade[at])
        if not found:
            return np.zeros(0, np.int64), np.zeros(0, np.uint8)
        return np.concatenate(found), np.concatenate(grades)


def pieces(data: bytes, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(column in bytes, text) of one line: parts between carriage returns, long ones cut at blanks where possible."""
    position = start
    while position < stop:
        end = data.find(b"\r", position, stop)
        end = stop if end < 0 else end
        while end - position > MAX_PIECE_BYTES:
            cut = data.rfind(b" ", position + MAX_PIECE_BYTES // 2, position + MAX_PIECE_BYTES)
            cut = position + MAX_PIECE_BYTES if cut <= position else cut
            yield position - start, data[position:cut]
            position = cut
        if end > position:
            yield position - start, data[position:end]
        position = end + 1
