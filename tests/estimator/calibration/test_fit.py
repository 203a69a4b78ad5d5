"""What a calibration learns, what it refuses to learn, and how far its intervals hold."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from estimator.calibration import priors
from estimator.calibration.apply import Calibration, from_document
from estimator.calibration.fit import fit
from estimator.calibration.observations import Observation
from tests.estimator.calibration.generated import GIB, STRATEGIES, draw


def calibrated(rows: list[Observation]) -> dict[str, Any]:
    return fit(rows, "stack", "hopper", "1", "2026-12-01T00:00:00+00:00")


def used(rows: list[Observation]) -> Calibration:
    return from_document(json.loads(json.dumps(calibrated(rows))))


def test_a_true_correction_is_found_and_applied() -> None:
    found = calibrated(draw(500, truth={"gathered_parameters": 0.04, "activations_mlp": -0.02}))
    values = {row["name"]: row for row in found["coefficients"]}
    for name, true in (("gathered_parameters", 0.04), ("activations_mlp", -0.02), ("parameters", 0.0)):
        assert values[name]["value"] == pytest.approx(true, abs=4 * values[name]["sigma"] + 0.001), name
    assert found["applied_part"] == 1.0
    everything = found["held_out"]["all"]
    assert everything["after"]["median"] < 0.5 * everything["before"]["median"]
    assert found["structural"] == []


def test_without_an_error_no_strategy_gets_worse() -> None:
    for seed in range(4):
        held_out = calibrated(draw(300, seed=seed))["held_out"]
        assert set(held_out) == {"all", *STRATEGIES}
        for name, figures in held_out.items():
            limit = figures["before"]["median"] + figures["bootstrap_error_of_median"]
            assert figures["after"]["median"] <= limit + 1e-6, name


@pytest.mark.parametrize("num", [0, 1, 5, 500])
def test_few_runs_give_a_wide_interval_and_no_correction(num: int) -> None:
    calibration = used(draw(num, num_models=20 if num == 500 else 1, truth={"gathered_parameters": 0.04}))
    low, high = calibration.peak_errors("optim").interval(0.95)
    assert low < 0 < high
    if num < 500:
        assert not calibration.coefficients
        assert high - low > 0.02
    assert 0.01 < high - low < 0.06


def test_more_runs_narrow_the_interval() -> None:
    widths = [np.diff(used(draw(num)).peak_errors("optim").interval(0.95))[0] for num in (0, 30, 1000)]
    assert widths[0] > 1.5 * widths[1]
    assert widths[2] == pytest.approx(2 * 2.571 * 0.003, rel=0.15)  # Student's t with 5 degrees of freedom


def test_intervals_cover_what_was_held_out_and_are_sharp() -> None:
    coverage = calibrated(draw(2000, truth={"activations_mlp": 0.02}))["coverage"]
    assert coverage["0.95"]["covered"] == pytest.approx(0.95, abs=0.02)
    assert coverage["0.99"]["covered"] == pytest.approx(0.99, abs=0.01)
    assert coverage["0.95"]["median_width"] < 0.03
    assert coverage["0.99"]["median_width"] < 0.03


def test_intervals_cover_new_runs() -> None:
    """Of jobs and models that the calibration never saw."""
    calibration = used(draw(2000))
    for level in (0.95, 0.99):
        inside = []
        for row in draw(3000, seed=77, num_models=50):
            corrected = row.predicted_peak + calibration.correction_bytes(row.components)
            low, high = calibration.peak_errors(row.strategy).interval(level)
            inside.append(low <= row.measured_peak / corrected - 1 <= high)
        assert np.mean(inside) == pytest.approx(level, abs=0.012)


def test_a_strategy_that_is_worse_gets_a_wider_interval() -> None:
    rows = draw(400, strategies=("ddp",))
    rows += [replace(r, run_id=f"o{r.run_id}", fingerprint=f"o{r.fingerprint}") for r in
             draw(100, seed=5, noise=0.03, strategies=("optim",))]  # fmt: skip
    calibration = used(rows)
    widths = {name: np.diff(calibration.peak_errors(name).interval(0.95))[0] for name in ("ddp", "optim")}
    assert widths["optim"] > 4 * widths["ddp"]


def test_runs_that_measure_another_job_are_listed_and_left_out() -> None:
    good = draw(300)
    bad = [
        replace(good[0], run_id="shared", device_used=good[0].measured_peak + 30 * GIB, measured_peak=90 * GIB),
        replace(
            good[1],
            run_id="wrong-world",
            fingerprint="x",
            method="real",
            measured_persistent=2 * (good[1].predicted_persistent or 0),
            measured_peak=int(1.7 * good[1].predicted_peak),
        ),
    ]
    bad[0] = replace(bad[0], measured_reserved=92 * GIB, device_used=140 * GIB)
    found = calibrated([*good, *bad])
    reasons = {row["run_id"]: row["reason"] for row in found["outliers"]}
    assert set(reasons) == {"shared", "wrong-world"}
    assert "another process" in reasons["shared"]
    assert "world size" in reasons["wrong-world"]
    clean = calibrated(good)
    assert found["coefficients"] == clean["coefficients"]
    assert found["errors"]["peak"] == clean["errors"]["peak"]
    assert found["provenance"]["num_runs"] == 302
    assert found["provenance"]["num_fitted"] == 300


def test_a_repeat_that_disagrees_is_left_out() -> None:
    first = draw(1)[0]
    rows = [replace(first, run_id=f"r{k}") for k in range(4)]
    rows.append(replace(first, run_id="odd", measured_peak=int(1.1 * first.measured_peak)))
    (outlier,) = calibrated(rows)["outliers"]
    assert outlier["run_id"] == "odd"
    assert "repeats" in outlier["reason"]


def test_one_run_of_a_wrong_world_size_alone_teaches_nothing() -> None:
    row = draw(1)[0]
    wrong = replace(
        row,
        method="real",
        measured_peak=2 * row.predicted_peak,
        measured_persistent=2 * (row.predicted_persistent or 0),
    )
    found = calibrated([wrong])
    assert [o["run_id"] for o in found["outliers"]] == [row.run_id]
    assert found["errors"] == calibrated([])["errors"]


def test_a_simulated_run_is_left_out_only_if_another_world_size_explains_it() -> None:
    rows = draw(300, strategies=("distopt",))
    first, second = rows[0], rows[1]
    quarter = first.components["parameters"] + first.components["optimizer_states"] * 4
    rows += [
        replace(first, run_id="wrong-world", fingerprint="x", measured_persistent=quarter),
        replace(second, run_id="fault", fingerprint="y", measured_persistent=int(0.8 * second.components["parameters"]),
                measured_peak=int(0.8 * second.predicted_peak)),
    ]  # fmt: skip
    found = calibrated(rows)
    assert [row["run_id"] for row in found["outliers"]] == ["wrong-world"]
    assert found["held_out"]["all"]["before"]["worst"] == pytest.approx(0.2, abs=0.001)


def test_a_model_that_is_wrong_for_many_is_not_hidden_as_outliers() -> None:
    rows = [
        replace(row, method="real", measured_persistent=int(1.3 * (row.predicted_persistent or 0)))
        if row.strategy == "optim" and i % 3 == 0
        else replace(row, method="real")
        for i, row in enumerate(draw(300))
    ]
    found = calibrated(rows)
    assert found["outliers"] == []
    assert any("optim" in line and "suspected" in line for line in found["structural"])


def test_a_fault_of_the_model_is_reported_and_not_corrected_away() -> None:
    found = calibrated(draw(600, truth={"gathered_parameters": 0.3}))
    (row,) = [row for row in found["coefficients"] if row["name"] == "gathered_parameters"]
    assert abs(row["value"]) <= priors.MAX_CORRECTION + 1e-9
    assert any("gathered_parameters" in line for line in found["structural"])


def test_repeats_count_as_one_run() -> None:
    rows = draw(60)
    repeated = rows + [replace(rows[0], run_id=f"again-{k}") for k in range(500)]
    a, b = calibrated(rows), calibrated(repeated)
    for one, other in zip(a["coefficients"], b["coefficients"], strict=True):
        assert one["value"] == pytest.approx(other["value"], abs=2e-4)


def test_equal_runs_give_the_same_id_whatever_their_order() -> None:
    rows = draw(100)
    first = fit(rows, "stack", "hopper", "1", "2026-12-01T00:00:00+00:00")
    second = fit(rows[::-1], "stack", "hopper", "1", "2027-01-01T00:00:00+00:00")
    assert first["calibration_id"] == second["calibration_id"]
    assert calibrated(rows[1:])["calibration_id"] != first["calibration_id"]


def test_runs_seen_before_say_nothing_about_errors() -> None:
    seen = [replace(row, seen=True, measured_peak=row.predicted_peak) for row in draw(100)]
    assert calibrated(seen)["errors"] == calibrated([])["errors"]


def test_survival_of_bisected_runs_narrows_only_its_own_setting() -> None:
    rows = [
        replace(row, measured_survival=int(1.01 * row.measured_peak), predicted_survival=int(1.01 * row.predicted_peak))
        for row in draw(400, noise=0.001)
    ]
    calibration = used(rows)
    widths = {
        setting: np.diff(calibration.survival_errors("ddp", setting).interval(0.99))[0]
        for setting in ("default", "expandable_segments")
    }
    assert widths["default"] < 0.02 < widths["expandable_segments"] + 0.02


def test_overheads_stay_priors_until_they_are_measured() -> None:
    assert {row["source"] for row in calibrated(draw(50))["overhead"].values()} == {"prior"}
    rows = [replace(row, device_used=(row.measured_reserved or 0) + 600 * priors.MIB) for row in draw(50)]
    found = calibrated(rows)["overhead"]
    assert found["context"]["mean_bytes"] == pytest.approx(600 * priors.MIB, rel=0.05)
    assert found["context"]["source"] == "measured"
    assert found["communicator"]["source"] == "prior"
    real = [
        replace(row, run_id=f"real-{row.run_id}", method="real", num_communicators=2,
                device_used=(row.measured_reserved or 0) + 900 * priors.MIB)
        for row in rows[:20]
    ]  # fmt: skip
    found = calibrated([*rows, *real])["overhead"]
    assert found["communicator"]["mean_bytes"] == pytest.approx(150 * priors.MIB, rel=0.1)
