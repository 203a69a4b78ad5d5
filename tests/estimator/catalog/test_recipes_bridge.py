"""The catalogue holds what the real recipe functions return; needs the models' ``config.json`` files."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

import pytest

from estimator.catalog import fields, list_recipes

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
FOLDER = os.environ.get("OOMBUDSMAN_HF_CONFIGS")

pytestmark = [
    pytest.mark.bridge,
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="OOMBUDSMAN_HF_CONFIGS does not name a folder of ORG/NAME/config.json files"),
]


def test_the_data_is_what_the_script_generates() -> None:
    """Every recipe, every section, every field."""
    sys.path.insert(0, str(SCRIPTS))
    import bridge_stubs
    import regenerate_catalog

    bridge_stubs.prepare(Path(str(FOLDER)))
    with contextlib.redirect_stderr(io.StringIO()):
        index, documents, _ = regenerate_catalog.build_recipes("")
    stored = {(r.name, r.module): r for r in list_recipes()}
    assert {(row["name"], row["module"]) for row in index} == stored.keys()
    for row, document in zip(index, documents, strict=True):
        recipe = stored[row["name"], row["module"]]
        assert recipe.document() == fields.expand(document), row["name"]
        assert list(recipe.aliases) == row["aliases"]
        assert recipe.summary == row["summary"]
