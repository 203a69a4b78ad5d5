"""Tables of quantiles: probabilities that agree with counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.calibration.quantiles import LEVELS, QuantileTable, from_runs, student_quantiles, sum_of

T5 = from_runs([], 0.01, 5.0)


def test_without_runs_the_quantiles_are_students() -> None:
    assert T5.quantile(0.99) == pytest.approx(0.03365, abs=1e-4)  # tables of t: 3.365 at 5 degrees of freedom
    assert T5.quantile(0.5) == 0
    assert T5.below(T5.quantile(0.9)) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("dof", "level", "quantile"),
    [
        (3, 0.95, 2.3534),
        (5, 0.99, 3.3649),
        (5, 0.995, 4.0321),
        (10, 0.975, 2.2281),
        (30, 0.999, 3.3852),
        (1e5, 0.975, 1.96),
    ],
)
def test_students_quantiles_are_those_of_printed_tables(dof: float, level: float, quantile: float) -> None:
    assert np.interp(level, LEVELS, student_quantiles(dof)) == pytest.approx(quantile, rel=1e-3)


@given(st.floats(-0.2, 0.2), st.floats(0, 0.05))
def test_noise_agrees_with_simulation(limit: float, sigma: float) -> None:
    generator = np.random.default_rng(3)
    errors = np.interp(generator.random(20_000), LEVELS, T5.values)
    counted = np.mean(errors + sigma * generator.standard_normal(20_000) <= limit)
    assert T5.below_with_noise(limit, sigma) == pytest.approx(counted, abs=0.02)


@given(st.floats(-0.3, 0.3), st.floats(-0.3, 0.3), st.floats(0, 0.05))
def test_more_room_never_lowers_the_probability(a: float, b: float, sigma: float) -> None:
    low, high = sorted((a, b))
    assert 0 <= T5.below_with_noise(low, sigma) <= T5.below_with_noise(high, sigma) + 1e-9 <= 1 + 1e-9


def test_order_statistics_from_twenty_runs_on() -> None:
    errors = [k / 1000 for k in range(-20, 20)]
    table = from_runs(errors, 0.01, 5.0)
    assert table.quantile(0.9) == pytest.approx(errors[36])  # ceil(41 * 0.9) = 37th smallest
    assert table.quantile(0.999) >= max(errors)


def test_sums_of_independent_errors() -> None:
    both = sum_of(T5, T5)
    generator = np.random.default_rng(9)
    drawn = np.interp(generator.random((2, 200_000)), LEVELS, T5.values).sum(axis=0)
    for level in (0.01, 0.05, 0.5, 0.95, 0.99):
        assert both.quantile(level) == pytest.approx(np.quantile(drawn, level), abs=0.0015)


@pytest.mark.parametrize("values", [(0.0,), tuple(-v for v in T5.values), (-2.0, *T5.values[1:])])
def test_a_table_that_is_none_is_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="quantile"):
        QuantileTable(values)
