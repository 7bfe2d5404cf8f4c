"""Rung 13: both learning-rate tables, at the steps that the pair names: around the warm-up, and the last (P9).

Evidence: `steps`, and the rates of the `reference` and the `port` at them.
"""

from typing import Any

import numpy as np

from parity.compare import Comparison, relative_error
from parity.rungs import NotComparedError, Outcome, section
from parity.runs import Runs
from parity.tolerances import FLOAT32_SCHEDULE, FLOAT64_RELATIVE, SCHEDULE_RULE

DEFAULT_STEPS = (1, 2, 3, 5, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)


def climb(runs: Runs) -> Outcome:
    """Every step is one comparison. Raises NotComparedError if one side brings no schedule."""
    reference, port = _schedules(runs)
    steps = tuple(dict.fromkeys(runs.pair.schedule_steps or DEFAULT_STEPS))
    for step in steps:
        if step < 1:
            raise ValueError(f"expected schedule_steps to be counted from 1, got {step}")
    theirs = [np.asarray(reference(step)) for step in steps]
    with runs.port_runner("float64").numerics():
        ours = [np.asarray(port(step)) for step in steps]
    comparisons = [_compared(step, a, b) for step, a, b in zip(steps, theirs, ours, strict=True)]
    notes = []
    if not runs.pair.schedule_steps:
        notes.append("the pair names no schedule_steps: compared at a table of its own, not around the warm-up")
    if float(theirs[0]) == 0.0 and steps[0] == 1:
        notes.append("the learning rate of step 1 is 0: the first step is lost")
    evidence = {
        "steps": list(steps),
        "reference": np.array([float(rate) for rate in theirs]),
        "port": np.array([float(rate) for rate in ours]),
    }
    return Outcome(
        sections=(section("learning rates", "float64", SCHEDULE_RULE, comparisons),),
        notes=tuple(notes),
        evidence=evidence,
    )


def _schedules(runs: Runs) -> tuple[Any, Any]:
    pair = runs.pair
    reference = None if pair.reference is None else pair.reference.schedule
    port = None if pair.port is None else pair.port.schedule
    if reference is None or port is None:
        which = "neither side brings" if reference is port else "only one side brings"
        raise NotComparedError(f"{which} a schedule")
    return reference, port


def _compared(step: int, theirs: np.ndarray, ours: np.ndarray) -> Comparison:
    if theirs.shape != () or ours.shape != ():
        raise ValueError(f"expected a learning rate to be one number, got shapes {theirs.shape} and {ours.shape}")
    single = any(rate.dtype.itemsize < 8 for rate in (theirs, ours))
    return Comparison(
        tensor=f"step {step}",
        error=relative_error(ours.astype(np.float64), theirs.astype(np.float64)),
        bound=FLOAT32_SCHEDULE if single else FLOAT64_RELATIVE,
        detail=f"expected {float(theirs):.6g}, found {float(ours):.6g}",
    )
