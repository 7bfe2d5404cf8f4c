"""The port's own training step against itself: run over several devices, in micro-batches, or however else it is run.

The trajectory has proven one way of running it equal to the reference's; each of `TrainingModes` is held against that.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from parity import training
from parity.capture_flax import FlaxRunner
from parity.compare import Comparison
from parity.pair import Inputs, Training, TrainingModes
from parity.rungs import NotComparedError, Section, section
from parity.rungs.rows import common_rows, tiled
from parity.runs import Runs
from parity.tolerances import MODES_RULE, TRAJECTORY_ELEMENT, TRAJECTORY_LOSS, trained_apart
from parity.trajectory import ELEMENT, LARGE, apart, first_gradients, relative

TITLE = "training, "
"""What the title of each section begins with; the name of the mode follows."""

STEPS, STEPS_OF_LARGE = 2, 1
"""The second step starts from what the first has left on the devices: parameters, moments, the number of the step."""

Masks = Callable[[int, Any, Inputs], Any]
"""(number of the step, from 1; state; inputs) -> what the step is given as masks."""


@dataclasses.dataclass(frozen=True)
class _Steps:
    losses: tuple[float, ...]
    parameters: tuple[Mapping[str, np.ndarray], ...]
    """After each step; the first are those before any."""


def climb(runs: Runs) -> tuple[list[Section], list[str]]:
    """A section for each mode, and notes; nothing if the port's side brings no modes of a training step."""
    own = runs.pair.port.training
    if own is None or own.modes is None:
        return [], []
    runner = runs.port_runner("float64")
    large = sum(array.size for array in runs.port_weights.values()) > LARGE
    count = STEPS_OF_LARGE if large else STEPS
    given: list[Any] = []

    def masks(number: int, state: Any, inputs: Inputs) -> Any:
        if len(given) < number:
            given.append(_masks(runs, runner, modes, number, state, inputs))
        return given[number - 1]

    try:
        with runner.numerics():
            modes = own.modes()
        batches = [_batch(runs, number, rows=modes.rows) for number in range(1, count + 1)]
        expected = _steps(runs, runner, modes.plain, masks, batches)
    except NotComparedError as reason:
        return [], [f"training steps in other modes not compared: {reason}"]
    zero = _zero(runs)
    found = []
    for name, mode in modes.others.items():
        compared = _compared(_steps(runs, runner, mode, masks, batches), expected, zero)
        found.append(section(TITLE + name, "float64", MODES_RULE, compared))
    return found, list(modes.notes)


def _masks(runs: Runs, runner: FlaxRunner, modes: TrainingModes, number: int, state: Any, inputs: Inputs) -> Any:
    if modes.drawn is not None:
        return modes.drawn(state, runner.inputs(inputs))
    drawn = runs.draw_masks("port", runs.seed + number, inputs=inputs)
    with runner.numerics():
        return {site: jnp.asarray(mask) for site, mask in drawn.items()}


def _batch(runs: Runs, number: int, *, rows: int) -> Inputs:
    inputs = training.batch_of(runs, number)
    own = common_rows(inputs)
    if own is None or own >= rows:
        return inputs
    return {name: array[:rows] for name, array in tiled(inputs, -(-rows // own)).items()}


def _zero(runs: Runs) -> frozenset[str]:
    """The port's parameters whose gradient is rounding noise, which Adam turns into steps as large as any."""
    zero = runs.zero_gradients(0)
    if runs.golden is not None:
        return zero
    inputs = training.batch_of(runs, 1)
    return zero | first_gradients(runs, inputs, runs.draw_masks("reference", runs.seed + 1, inputs=inputs))[0]


def _steps(runs: Runs, runner: FlaxRunner, steps: Training, masks: Masks, batches: Sequence[Inputs]) -> _Steps:
    with runner.numerics():
        model = runner.merged(runner.cast(runs.port_weights))
        model.train()
        state = steps.start(model)
        del model
        losses, parameters = [], [_host(steps.parameters(state))]
        for number, inputs in enumerate(batches, start=1):
            state, loss = steps.step(state, runner.inputs(inputs), masks(number, state, inputs))
            losses.append(float(loss))
            parameters.append(_host(steps.parameters(state)))
    return _Steps(tuple(losses), tuple(parameters))


def _host(parameters: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Copies: what is on the devices may be given up to the next step."""
    return {name: np.array(array, dtype=np.float64) for name, array in parameters.items()}


def _compared(got: _Steps, expected: _Steps, zero: frozenset[str]) -> Iterator[Comparison]:
    for number, (loss, plain) in enumerate(zip(got.losses, expected.losses, strict=True), start=1):
        detail = f"expected {plain:.15g}, found {loss:.15g}"
        yield Comparison(
            tensor=f"loss of step {number}", error=relative(loss, plain), bound=TRAJECTORY_LOSS, detail=detail
        )
    yield from _start(got.parameters[0], expected.parameters[0])
    way = 0.0
    for number, (before, after) in enumerate(zip(expected.parameters, expected.parameters[1:], strict=False), start=1):
        way += max(apart(after[name], before[name])[1] for name in after)
        ours, detail = got.parameters[number], f"after step {number}"
        for name in sorted((after.keys() | ours.keys()) - zero):
            mean, largest = _apart(ours, after, name)
            size = float(np.abs(after[name]).max(initial=0.0)) if name in after else 0.0
            element = trained_apart(way, number, size, per_unit=TRAJECTORY_ELEMENT)
            yield Comparison(tensor=name, error=mean, bound=trained_apart(way, number, size), detail=detail)
            yield Comparison(tensor=name + ELEMENT, error=largest, bound=element, detail=detail)


def _start(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> Iterator[Comparison]:
    """The states begin with the same bits: what is placed on devices is copied."""
    different = [n for n in sorted(expected.keys() | got.keys()) if _apart(got, expected, n)[1] != 0.0]
    yield Comparison(tensor="parameters before any step", error=len(different), bound=0.0, detail=", ".join(different))


def _apart(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], name: str) -> tuple[float, float]:
    both = name in got and name in expected
    return apart(got[name], expected[name]) if both else (float("inf"), float("inf"))
