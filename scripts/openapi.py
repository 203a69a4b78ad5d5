"""Writes the API's document to docs/openapi.json; a test holds the two together, so that every change shows.

Run: .venv/bin/python scripts/openapi.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from app.api import create_app
from app.settings import Settings

PATH = Path(__file__).resolve().parents[1] / "docs" / "openapi.json"


def document() -> str:
    """The same text whatever the settings of this machine are."""
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(Settings(_env_file=None, data_dir=Path(folder), log_level="error"))  # type: ignore[call-arg]
        return json.dumps(app.openapi(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    PATH.write_text(document())
    print(PATH)
