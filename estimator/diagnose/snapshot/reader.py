"""Reads a pickle that holds plain containers only. Nothing in it is imported, called or executed.

The unpickler is the standard library's, with the three doors to code shut: a pickle can reach a callable only by naming
it (GLOBAL, STACK_GLOBAL, INST, EXT: ``find_class``), by a persistent id or by an out-of-band buffer. With none of them
nothing on its stack can be called, so REDUCE, NEWOBJ, OBJ and BUILD fail too. What is left are dict, list, tuple, set,
str, bytes, int, float, bool and None. Sizes are bounded here by the bytes that are read, and by the memory limit of the
process that this runs in (:mod:`estimator.diagnose.snapshot.child`): never call it in a server's own process.
"""

from __future__ import annotations

import pickle
import zlib
from typing import Any, BinaryIO, NoReturn

MAX_BYTES = 600 << 20
"""Of a snapshot after decompression."""
MAX_RATIO = 200
"""Decompressed over compressed size that a snapshot may have; a bomb has more."""
GZIP = b"\x1f\x8b"


class SnapshotRefused(ValueError):
    """The file is no memory snapshot that this reader takes; the message says why."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise SnapshotRefused(
            f"the file refers to {str(module)[:80]}.{str(name)[:80]}; a memory snapshot holds plain containers only"
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise SnapshotRefused("the file refers to an object outside of it; a memory snapshot does not")


class Limited:
    """A file that refuses to give more than ``limit`` bytes; gzip is unpacked on the way."""

    def __init__(self, file: BinaryIO, limit: int = MAX_BYTES) -> None:
        self._file = file
        self._left = limit
        self._limit = limit
        head = file.read(2)
        self._buffer = head
        self._position = 0
        self._packed_rest = b""
        self._unpacker = zlib.decompressobj(31) if head == GZIP else None
        self._packed = 2
        self._unpacked = 0
        if self._unpacker is not None:
            self._packed_rest = head
            self._buffer = b""

    def _more(self, size: int) -> bytes:
        if self._unpacker is None:
            return self._file.read(size)
        while not self._unpacker.eof:
            raw = self._packed_rest or self._file.read(1 << 16)
            if not raw:
                return b""
            fresh = 0 if self._packed_rest else len(raw)
            self._packed += fresh
            data = self._unpacker.decompress(raw, max(size, 1 << 16))
            self._packed_rest = self._unpacker.unconsumed_tail
            self._unpacked += len(data)
            if self._unpacked > max(1 << 20, MAX_RATIO * self._packed):
                raise SnapshotRefused("the file unpacks to far more than a snapshot would: refused")
            if data:
                return data
        return b""

    def _fill(self, size: int) -> None:
        """Have ``size`` bytes ready, or all that are left in the file."""
        parts = [self._buffer[self._position :]]
        ready = len(parts[0])
        while ready < size and (data := self._more(size - ready)):
            parts.append(data)
            ready += len(data)
        self._buffer, self._position = b"".join(parts), 0

    def _take(self, size: int) -> bytes:
        if len(self._buffer) - self._position < size:
            self._fill(size)
        out = self._buffer[self._position : self._position + size]
        self._position += len(out)
        self._left -= len(out)
        if self._left < 0:
            raise SnapshotRefused(f"the snapshot is larger than {self._limit >> 20} MiB")
        return out

    def peek(self, size: int) -> bytes:
        """Bytes to come, without taking them: what lets the unpickler read in large pieces."""
        size = min(max(size, 1), 1 << 17)
        if len(self._buffer) - self._position < size:
            self._fill(1 << 18)
        return self._buffer[self._position : self._position + size]

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > self._left + 1:
            raise SnapshotRefused(f"the file asks for a piece larger than {self._limit >> 20} MiB, or than itself")
        return self._take(size)

    def readline(self) -> bytes:
        line = bytearray()
        while len(line) < 1 << 16:
            char = self._take(1)
            line += char
            if not char or char == b"\n":
                return bytes(line)
        raise SnapshotRefused("the file has a line that no snapshot has")


def load_plain(file: BinaryIO, limit: int = MAX_BYTES) -> Any:
    """The object in the file. Raises SnapshotRefused for everything that is not a pickle of plain containers."""
    source = Limited(file, limit)
    try:
        return _PlainUnpickler(source).load()
    except SnapshotRefused:
        raise
    except MemoryError:
        raise SnapshotRefused("the file needs more memory than a snapshot may") from None
    except (pickle.UnpicklingError, EOFError, zlib.error) as error:
        raise SnapshotRefused(f"the file is not a whole pickle: {str(error)[:120]}") from None
    except Exception as error:  # the unpickler raises whatever a hostile opcode provokes
        raise SnapshotRefused(f"the file is not a pickle of plain containers ({type(error).__name__})") from None
