"""Results as JSON lines that survive a kill: a record counts once its line, with its newline, is on disk."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any


class ResultFile:
    """Append-only JSON lines keyed by ``run_id``; later lines win. Held by one sweep at a time."""

    def __init__(self, path: Path, *, exclusive: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._stream = path.open("a+b")
        if exclusive:
            try:
                fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._stream.close()
                raise RuntimeError(f"{path} is being written by another sweep") from None
        else:
            fcntl.flock(self._stream, fcntl.LOCK_EX)
        self.records = self._read()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()

    def close(self) -> None:
        self._stream.close()

    def _read(self) -> dict[str, dict[str, Any]]:
        """Records on disk; a last line cut off by a kill is removed (it was never acknowledged)."""
        self._stream.seek(0)
        content = self._stream.read()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            self._stream.truncate(whole)
        return read_records(content[:whole].decode(), str(self.path))

    def append(self, record: dict[str, Any]) -> None:
        """Write a record and wait until it is on disk."""
        self._stream.seek(0, os.SEEK_END)
        self._stream.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self.records[str(record["run_id"])] = record


def read_records(text: str, name: str) -> dict[str, dict[str, Any]]:
    """Records by ``run_id``. Raises ``ValueError`` with the line number for a line that is not a record."""
    records: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}, line {number}: not JSON ({error.msg})") from None
        if not isinstance(record, dict) or "run_id" not in record:
            raise ValueError(f"{name}, line {number}: a record with run_id is expected")
        records[str(record["run_id"])] = record
    return records
