"""The command line. Everything slow is imported inside the command that needs it."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading


def main() -> None:
    """Run the command; exit 2 for bad input, 3 for a job that is not modelled, 1 for a fault of this program."""
    # A command lives for a second: collecting garbage would cost a tenth of it, and taking the interpreter apart at the
    # end another. serve switches the collector on again.
    gc.disable()
    if not {"recommend", "estimate"}.isdisjoint(sys.argv[1:2]):
        threading.Thread(target=_load_simulator, daemon=True).start()
    code = _run()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _load_simulator() -> None:
    """The compiled allocator simulator takes half a second to load: meanwhile the job is read and the search begins."""
    with contextlib.suppress(Exception):  # whoever needs it next meets the same error where it can be told
        from estimator.allocator import warm

        warm()


def _run() -> int:
    from app.cli.commands import application

    try:
        application()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        if os.environ.get("OOMBUDSMAN_LOG_LEVEL", "").lower() == "debug":
            import traceback

            traceback.print_exc()
        sys.stderr.write(f"error: something went wrong here ({type(error).__name__}: {str(error)[:500]})\n")
        sys.stderr.write("This is a fault of oombudsman. OOMBUDSMAN_LOG_LEVEL=debug shows where.\n")
        return 1
    return 0
