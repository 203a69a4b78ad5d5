"""The interface: its document as committed, and schemathesis over all of it against the running service."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from app.api import create_app
from app.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
MAX_EXAMPLES = 45
"""Of one operation and phase: over 2,000 requests in all."""


def test_the_document_is_the_one_that_is_committed(tmp_path: Path) -> None:
    """Regenerate with scripts/openapi.py, and say in CHANGELOG what clients will notice."""
    import json

    document = create_app(Settings(data_dir=tmp_path, log_level="error")).openapi()
    committed = json.loads((ROOT / "docs" / "openapi.json").read_text())
    assert json.loads(json.dumps(document)) == committed


@pytest.mark.slow
def test_schemathesis_finds_no_undocumented_answer(tmp_path: Path) -> None:
    """All its checks but one: that a body which fits the schema is accepted. A recipe's name may not exist."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OOMBUDSMAN_DATA_DIR": str(tmp_path), "OOMBUDSMAN_LOG_LEVEL": "error"}
    service = subprocess.Popen([str(PROGRAMS / "oombudsman"), "serve", "--port", str(port)], env=environment)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(address + "/livez", timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        command = [
            str(PROGRAMS / "st"), "run", f"{address}/openapi.json", "--checks", "all",
            "--exclude-checks", "positive_data_acceptance", "--max-examples", str(MAX_EXAMPLES), "--seed", "1",
            "--workers", "1", "--request-timeout", "60", "--no-color",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    finally:
        service.terminate()
        service.wait(timeout=30)
    assert done.returncode == 0, done.stdout[-6000:]
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated is not None
    assert int(generated[1]) >= 2000
