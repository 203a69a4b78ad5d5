"""The command line. Everything slow is imported inside the command that needs it."""

from __future__ import annotations

import gc
import os
import sys


def main() -> None:
    """Run the command; exit 2 for bad input, 3 for a job that is not modelled, 1 for a fault of this program."""
    # A command lives for a second: collecting would cost a tenth of it. serve switches it on again.
    gc.disable()
    from app.cli.commands import application

    try:
        application()
    except Exception as error:
        if os.environ.get("OOMBUDSMAN_LOG_LEVEL", "").lower() == "debug":
            raise
        sys.stderr.write(f"error: something went wrong here ({type(error).__name__}: {str(error)[:500]})\n")
        sys.stderr.write("This is a fault of oombudsman. OOMBUDSMAN_LOG_LEVEL=debug shows where.\n")
        sys.exit(1)
