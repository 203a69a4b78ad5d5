"""Logs and snapshots that were uploaded: files under a quota in one folder, named by an unguessable id, that expire.

The folder is ``evidence`` in the data directory, or OOMBUDSMAN_EVIDENCE_DIR, which replicas have to share.
What an upload is, and until when it is kept, is written in its file name, so that there is no second place to be out of
step with the files.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from app.settings import Settings

SNAPSHOT, TEXT = "snapshot", "text"
_NAME = re.compile(r"(ev_[A-Za-z0-9_-]{22})\.(\d{1,12})\.(snapshot|text)")
_PICKLE, _GZIP = b"\x80", b"\x1f\x8b"


class EvidenceRefused(Exception):
    """An upload that cannot be kept. ``slug``: the kind of problem."""

    def __init__(self, slug: str, message: str, suggestion: str | None = None) -> None:
        self.slug, self.suggestion = slug, suggestion
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Stored:
    """One upload."""

    evidence_id: str
    kind: str
    path: Path
    size_bytes: int
    expires_at: int
    """Seconds since 1970."""


def kind_of(head: bytes) -> str:
    """A pickle (plain or in gzip) is a memory snapshot; everything else is read as text."""
    return SNAPSHOT if head.startswith((_PICKLE, _GZIP)) else TEXT


async def keep(settings: Settings, chunks: AsyncIterator[bytes]) -> Stored:
    """Write an upload to disk as it comes. When this returns, it is on disk under its id.

    Raises EvidenceRefused when it is empty, too large, or the folder's quota is used up; nothing is left behind then.
    """
    folder = _folder(settings)
    used = sum(stored.size_bytes for stored in sweep(settings))
    evidence_id = "ev_" + secrets.token_urlsafe(16)
    partial = folder / f"{evidence_id}.part"
    size, head = 0, b""
    try:
        with partial.open("xb") as file:
            async for chunk in chunks:
                size += len(chunk)
                if size > settings.max_evidence_body_bytes:
                    limit = settings.max_evidence_body_bytes
                    raise EvidenceRefused("body-too-large", f"the upload has more than {limit} bytes")
                if used + size > settings.evidence_quota_bytes:
                    raise EvidenceRefused(
                        "storage-full",
                        f"uploads fill their quota of {settings.evidence_quota_bytes} bytes",
                        "try again when older ones have expired, or send the end of the log only",
                    )
                if len(head) < 2:
                    head += chunk[:2]
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if not size:
            raise EvidenceRefused("invalid-request", "the upload is empty", "send the log or snapshot as the body")
        expires_at = int(time.time()) + settings.evidence_ttl_seconds
        path = folder / f"{evidence_id}.{expires_at}.{kind_of(head)}"
        partial.rename(path)
    except OSError as error:
        raise EvidenceRefused("storage-full", f"the upload could not be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return Stored(evidence_id, kind_of(head), path, size, expires_at)


def find(settings: Settings, evidence_id: str) -> Stored | None:
    """The upload of this id, if it has not expired."""
    return next((stored for stored in sweep(settings) if stored.evidence_id == evidence_id), None)


def sweep(settings: Settings) -> list[Stored]:
    """The uploads that are kept; expired ones, and parts of uploads that were broken off, are deleted on the way."""
    kept = []
    now = time.time()
    for path in _folder(settings).iterdir():
        match = _NAME.fullmatch(path.name)
        try:
            status = path.stat()
            stale = path.suffix == ".part" and now - status.st_mtime > settings.evidence_ttl_seconds
            if stale or (match and int(match[2]) <= now):
                path.unlink()
            elif match:
                kept.append(Stored(match[1], match[3], path, status.st_size, int(match[2])))
        except FileNotFoundError:  # another replica was quicker
            continue
    return kept


def _folder(settings: Settings) -> Path:
    folder = settings.evidence_dir or settings.data_dir / "evidence"
    folder = folder.expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
