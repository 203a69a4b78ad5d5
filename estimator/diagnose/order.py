"""Which failure of many is the one that counts."""

from __future__ import annotations

from collections.abc import Sequence

from estimator.diagnose.evidence import Failure

_MEMORY = ("gpu", "gpu_driver", "corrupt", "host")
_WEAK_HOST = frozenset({"sigkill"})


def first_failure(failures: Sequence[Failure], noise: Sequence[Failure], root_rank: object) -> Failure | None:
    """The first in time on the rank that failed first.

    Reports about memory, and Megatron FSDP's own refusals, come before other exceptions. Among them: those of the rank
    that torchelastic names as root cause, if it has any; then, where every report carries a time stamp, the earliest;
    else the first in the text. A bare SIGKILL counts only if nothing more telling is there (a job's launcher kills the
    other ranks after one has run out of memory), and a message with numbers before one without. Without any of these:
    the first other exception, then the first report of noise.
    """
    telling = [f for f in failures if f.kind.place in (*_MEMORY, "configuration")]
    if not telling:
        others = [f for f in failures if f.kind.place == "other"]
        return others[0] if others else (noise[0] if noise else None)
    strong = [f for f in telling if f.kind.kind_id not in _WEAK_HOST] or telling
    on_root = [f for f in strong if f.rank is not None and f.rank == root_rank]
    candidates = on_root or strong
    if len(candidates) > 1 and all(f.time for f in candidates):
        candidates = sorted(candidates, key=lambda f: (f.time, f.span.line, f.span.column))
    first = candidates[0]
    if first.facts or first.kind.place in ("configuration", "corrupt"):
        return first
    same = [f for f in candidates if f.rank == first.rank and f.facts and f.kind.place == first.kind.place]
    near = [f for f in same if f.span.line - first.span.line < 200]
    return near[0] if near else first
