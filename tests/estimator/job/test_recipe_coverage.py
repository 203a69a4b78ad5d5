"""No recipe stops being answered unnoticed."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ROW = re.compile(r"^\| ([^|]+) \| (\d+) \| (\d+) \|$", re.MULTILINE)


def test_at_least_the_recipes_of_the_committed_table_are_answered() -> None:
    """Regenerate it with scripts/recipe_coverage.py when more are."""
    script = runpy.run_path(str(ROOT / "scripts" / "recipe_coverage.py"))
    committed = {name: (int(n), int(m)) for name, n, m in ROW.findall((ROOT / "docs/recipe-coverage.md").read_text())}
    now = {name: (int(n), int(m)) for name, n, m in ROW.findall(script["coverage"]())}
    assert now.keys() == committed.keys()
    assert len(now) == 2
    for name, (recipes, answered) in now.items():
        assert recipes == committed[name][0]
        assert answered >= committed[name][1]
