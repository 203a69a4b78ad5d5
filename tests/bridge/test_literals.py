"""Values as Hydra reads them: what is written on the command line comes back as it was."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from estimator.render.values import has_interpolation, hydra_literal

pytestmark = pytest.mark.bridge

TEXT = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)
LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | TEXT
    | st.sampled_from(["true", "1e3", "a\\", '\\"', "'"])
)


@given(LEAF | st.lists(LEAF, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), LEAF, max_size=2))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_hydra_reads_what_was_written(bridge: Any, value: Any) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if not has_interpolation(value):
        assert OverridesParser.create().parse_override(f"a.b={hydra_literal(value)}").value() == value


@pytest.mark.parametrize(
    ("value", "literal"), [("expandable_segments:True", '"expandable_segments:True"'), ("a/b-c.d", "a/b-c.d")]
)
def test_only_what_needs_it_is_quoted(value: str, literal: str) -> None:
    assert hydra_literal(value) == literal
