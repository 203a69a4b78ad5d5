"""What the README shows is what the program prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli.commands import application
from app.settings import get_settings

README = Path(__file__).resolve().parents[2] / "README.md"
SHOWN = re.compile(r"^\$ oombudsman (recommend .+)\n((?:(?!\$ |```).*\n)+)", re.MULTILINE)


def shown() -> list[tuple[str, list[str]]]:
    """Commands of the README that are followed by their output, with its lines."""
    return [(command, lines.splitlines()) for command, lines in SHOWN.findall(README.read_text())]


def test_the_readme_shows_three_answers() -> None:
    assert len(shown()) == 3


@pytest.mark.parametrize(("command", "lines"), shown(), ids=lambda value: value if isinstance(value, str) else "")
def test_the_readme_shows_real_output(command: str, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    get_settings.cache_clear()
    result = CliRunner().invoke(application, shlex.split(command))
    assert result.exit_code == 0, result.output
    printed = [line.rstrip() for line in result.output.splitlines()]
    position = 0
    for line in lines:
        if line in ("…", ""):
            continue
        assert line in printed[position:], f"the program does not print (any more, or not there): {line!r}"
        position = printed.index(line, position) + 1
