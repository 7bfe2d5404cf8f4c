"""Learning-rate tables: equal where they are, and every way of being off by one is seen."""

from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest

from parity.rungs import NotComparedError, schedule
from tests.parity.rungs import small_pair
from torch_reference.training import noam_lr
from train.schedule import noam_schedule

WARMUP, LAST = 40, 900
STEPS = (1, 2, WARMUP - 1, WARMUP, WARMUP + 1, LAST)
NOAM = noam_schedule(d_model=30, warmup_steps=WARMUP)


def reference(step: int) -> float:
    return noam_lr(step, d_model=30, warmup_steps=WARMUP)


def climb(theirs: Callable[[int], Any] | None, ours: Callable[[int], Any] | None, steps: Any = STEPS) -> Any:
    return schedule.climb(
        small_pair.runs(reference={"schedule": theirs}, port={"schedule": ours}, schedule_steps=steps)
    )


def test_equal_tables_pass_in_float64() -> None:
    (section,) = climb(reference, lambda step: NOAM(step - 1)).sections
    assert section.passed
    assert [c.tensor for c in section.comparisons] == [f"step {n}" for n in STEPS]
    assert all(c.bound < 1e-11 for c in section.comparisons), "float64, although the schedule is jax's"


@pytest.mark.parametrize(
    ("wrong", "steps"),
    [
        (NOAM, {1, 2, WARMUP - 1, WARMUP, WARMUP + 1, LAST}),
        (lambda step: NOAM(max(step - 2, 0)), {2, WARMUP - 1, WARMUP, WARMUP + 1, LAST}),
        (lambda step: 0.0 if step == 1 else NOAM(step - 2), {1, 2, WARMUP - 1, WARMUP, WARMUP + 1, LAST}),
        (lambda step: float("nan") if step == LAST else NOAM(step - 1), {LAST}),
        (lambda step: noam_schedule(d_model=30, warmup_steps=WARMUP + 1)(step - 1), {1, 2, WARMUP - 1, WARMUP}),
    ],
)
def test_off_by_one(wrong: Callable[[int], Any], steps: set[int]) -> None:
    outcome = climb(reference, wrong)
    failed = {c.tensor for c in outcome.sections[0].failures}
    # Beyond the warm-up, Noam's rate does not depend on its length.
    assert failed >= {f"step {n}" for n in steps}
    assert "expected" in outcome.sections[0].failures[0].detail
    assert outcome.evidence["steps"] == list(STEPS)
    np.testing.assert_allclose(outcome.evidence["reference"], [reference(n) for n in STEPS], rtol=1e-15)


def test_cosine_over_steps_and_over_one_less() -> None:
    def cosine(steps: int) -> Callable[[int], float]:
        return lambda step: 0.5 * (1.0 + np.cos(np.pi * min((step - 1) / steps, 1.0)))

    ours = optax.cosine_decay_schedule(1.0, LAST)
    assert climb(cosine(LAST), lambda step: ours(step - 1)).sections[0].passed
    assert not climb(cosine(LAST - 1), lambda step: ours(step - 1)).sections[0].passed


def test_a_rate_in_float32_has_the_bound_of_float32() -> None:
    (section,) = climb(reference, lambda step: np.float32(reference(step))).sections
    assert section.passed
    assert all(1e-7 < c.bound < 1e-5 for c in section.comparisons)
    assert not climb(reference, lambda step: np.float32(reference(step) * (1 + 3e-6))).sections[0].passed


def test_a_table_of_its_own_where_the_pair_names_no_steps() -> None:
    outcome = climb(reference, lambda step: NOAM(step - 1), steps=())
    assert outcome.sections[0].passed
    assert len(outcome.sections[0].comparisons) == len(schedule.DEFAULT_STEPS)
    assert "names no schedule_steps" in outcome.notes[0]


def test_a_first_step_of_rate_zero_is_noted_on_both_sides() -> None:
    outcome = climb(lambda step: float(step - 1), lambda step: float(step - 1))
    assert outcome.sections[0].passed
    assert any("first step is lost" in note for note in outcome.notes)


@pytest.mark.parametrize(("theirs", "ours"), [(None, None), (reference, None), (None, reference)])
def test_nothing_to_compare(theirs: Any, ours: Any) -> None:
    with pytest.raises(NotComparedError, match="schedule"):
        climb(theirs, ours)


def test_steps_from_zero_and_rates_that_are_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="counted from 1, got 0"):
        climb(reference, reference, steps=(0, 1))
    with pytest.raises(ValueError, match="one number"):
        climb(reference, lambda step: np.ones(2))
