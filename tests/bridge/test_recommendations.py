"""A sample of what the service recommends, applied by the real Megatron-Bridge (``emitted.py`` says how)."""

from __future__ import annotations

from typing import Any

import pytest
from emitted import faults_of, sample

pytestmark = pytest.mark.bridge

NUM_OVERRIDES = 200


def test_every_override_of_a_sample_of_answers_does_what_was_estimated(bridge: Any) -> None:
    faults, overrides, recipes = [], 0, set()
    for case, answer in sample(bridge, NUM_OVERRIDES):
        recipes.add(case.recipe)
        overrides += len(answer["recommendations"])
        faults += faults_of(bridge, case, answer)
    assert faults == []
    assert overrides >= NUM_OVERRIDES
    assert len(recipes) >= 10
