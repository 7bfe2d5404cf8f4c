"""Both sides trained side by side, in float64, on the same batches with the same dropout masks."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from parity import training
from parity.compare import norm
from parity.pair import Inputs, Masks, Precision, Side
from parity.rungs import NotComparedError
from parity.runs import Runs, zero_among
from parity.tolerances import (
    GRADIENT_HALF_UNITS,
    HALF_UNITS,
    TRAJECTORY_DRAWS,
    TRAJECTORY_ELEMENT,
    TRAJECTORY_LOSS,
    TRAJECTORY_RATIO,
    trained_apart,
)
from parity.trace import LOSS
from parity.training import Trained
from parity.weights.variation import Noise, moved_by_a_rounding

Tensors = Mapping[str, np.ndarray]

ELEMENT = " (its largest difference)"

LARGE = 1 << 24
"""Parameters from which on memory matters: then no other run is kept beside the two trainings."""


class Trainer(Protocol):
    """One side in training."""

    def step(self, inputs: Inputs, masks: Masks) -> float:
        """Takes a step; the loss before it."""

    def parameters(self) -> dict[str, np.ndarray]:
        """The trained ones by the side's own names, as they are until the next step."""


@dataclasses.dataclass(kw_only=True)
class Trajectory:
    """What was seen after each step; lists have one entry a step."""

    losses: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """Of the reference and of the port, before the step."""
    rates: list[float] = dataclasses.field(default_factory=list)
    """Learning rates of the reference; NaN where they are not known."""
    largest_changes: list[float] = dataclasses.field(default_factory=list)
    """Of any parameter of the reference."""
    distances: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """Root mean square difference between the two, by the port's names."""
    elements: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """Largest difference of an element."""
    sizes: dict[str, float] = dataclasses.field(default_factory=dict)
    """Largest absolute value of each parameter."""
    unchanged: dict[str, list[int]] = dataclasses.field(default_factory=lambda: {"reference": [], "port": []})
    """Steps after which no parameter of that side had another value."""
    zero: frozenset[str] = frozenset()
    """Parameters whose true gradient is zero."""
    together: float = 0.0
    """Norm of all gradients of the reference together, at the first step."""
    further: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """How far two trainings of the reference alone end up, where they were asked: see TRAJECTORY_DRAWS."""
    still: frozenset[str] = frozenset()
    """The port's parameters that are after the last step what they were before the first."""
    held: frozenset[str] = frozenset()
    """The reference's parameters that were held still: the port has only their sum with others."""

    @property
    def summed_rates(self) -> list[float]:
        """Sum of the learning rates up to each step, or of the largest changes where the rates are not known."""
        rates = np.array(self.rates)
        return [float(x) for x in np.cumsum(np.where(np.isnan(rates), self.largest_changes, rates))]

    @property
    def ways(self) -> list[float]:
        """How far parameters went up to each step: the larger of the sums of rates and of largest changes."""
        return [float(x) for x in np.maximum(self.summed_rates, np.cumsum(self.largest_changes))]

    def bounds(self, name: str) -> list[float]:
        """For the distance of a parameter after each step; of LOSS, for the relative difference before each."""
        if name == LOSS:
            own = [TRAJECTORY_LOSS] * len(self.losses)
        else:
            own = [trained_apart(way, i + 1, self.sizes[name]) for i, way in enumerate(self.ways)]
        return self._with_further(own, name)

    def element_bounds(self, name: str) -> list[float]:
        """For the element that differs most."""
        ways = enumerate(self.ways)
        own = [trained_apart(way, i + 1, self.sizes[name], per_unit=TRAJECTORY_ELEMENT) for i, way in ways]
        return self._with_further(own, name + ELEMENT)

    def _with_further(self, bounds: list[float], name: str) -> list[float]:
        further = self.further.get(name, [0.0] * len(bounds))
        return [max(bound, TRAJECTORY_RATIO * x) for bound, x in zip(bounds, further, strict=True)]

    def within(self) -> bool:
        """Whether every loss and every parameter whose gradient is not zero is within its bound."""
        judged = [(self.loss_errors, self.bounds(LOSS))]
        judged += [(d, self.bounds(n)) for n, d in self.distances.items() if n not in self.zero]
        judged += [(d, self.element_bounds(n)) for n, d in self.elements.items() if n not in self.zero]
        return all(x <= bound for found, bounds in judged for x, bound in zip(found, bounds, strict=True))

    @property
    def loss_errors(self) -> list[float]:
        """Relative difference of the losses."""
        return [relative(ours, theirs) for theirs, ours in self.losses]


def train_both(runs: Runs, *, num_steps: int) -> Trajectory:
    """Trains both for so many steps from the pair's weights.

    Raises NotComparedError if a side brings neither a training step of its own nor an optimizer.
    """
    names = training.trained(runs, max_elements=None)
    if sum(int(np.prod(shape)) for shape in names.shapes.values()) > LARGE:
        runs.release()
    reference, port = _reference(runs, names), _port(runs, names)
    found = Trajectory(held=runs.derived.held)
    before = {name: array.copy() for name, array in reference.parameters().items()}
    digests = {"reference": digest(before), "port": digest(port.parameters())}
    start = {name: digest({name: array}) for name, array in port.parameters().items()}
    for step in range(1, num_steps + 1):
        inputs = training.batch_of(runs, step)
        masks = runs.draw_masks("reference", runs.seed + step, inputs=inputs)
        if step == 1:
            found.zero, found.together = first_gradients(runs, inputs, masks)
        found.losses.append((reference.step(inputs, masks), _step(runs, port, inputs, masks)))
        found.rates.append(_rate(runs, reference, step))
        after, after_there = reference.parameters(), port.parameters()
        _measure(found, names, after, after_there)
        for side, parameters in (("reference", after), ("port", after_there)):
            if digests[side] == (new := digest(parameters)):
                found.unchanged[side].append(step)
            digests[side] = new
        largest = 0.0
        for name, array in after.items():
            largest = max(largest, apart(array, before[name])[1])
            np.copyto(before[name], array)
        found.largest_changes.append(largest)
        del after, after_there  # they may be views of what the next step changes
    ends = port.parameters().items()
    found.still = frozenset(name for name, array in ends if digest({name: array}) == start.get(name))
    return found


def _step(runs: Runs, port: Any, inputs: Inputs, masks: Masks) -> float:
    try:
        return float(port.step(inputs, masks))
    except ValueError:
        if runs.draw_masks("port", runs.seed, inputs=inputs).keys() == masks.keys():
            raise
        raise NotComparedError("the two do not drop out at the same places: see the rung of dropout") from None


def judge_again(runs: Runs, found: Trajectory) -> int:
    """Trains the reference beside itself, until that settles what is beyond a bound: from weights moved by a rounding,
    and with noise added to each gradient.

    Gives how many such trainings there were; if they settle nothing, the bounds stay what they were.
    """
    names = training.trained(runs, max_elements=None)
    # Where float64 ends inside, float32's roundings are what has to be told from a fault.
    precision: Precision = "float64" if runs.float64_ends(0) is None else "float32"
    weights = {name: array.astype(precision) for name, array in runs.weights.items()}
    for draw in range(TRAJECTORY_DRAWS):
        noise = Noise(GRADIENT_HALF_UNITS * HALF_UNITS[precision] * found.together, seed=draw)
        other = _reference(runs, names, weights=moved_by_a_rounding(weights, seed=draw), noise=noise)
        for name, distances in _beside_itself(runs, names, other, num_steps=len(found.losses)).items():
            before = found.further.get(name, [0.0] * len(distances))
            found.further[name] = [max(pair) for pair in zip(before, distances, strict=True)]
        if found.within():
            return draw + 1
    found.further.clear()
    return TRAJECTORY_DRAWS


def _beside_itself(runs: Runs, names: Trained, there: Trainer, *, num_steps: int) -> dict[str, list[float]]:
    """Distances between the reference's training and another of it, after each step, and of the losses."""
    here = _reference(runs, names)
    found: dict[str, list[float]] = {LOSS: []}
    for step in range(1, num_steps + 1):
        inputs = training.batch_of(runs, step)
        masks = runs.draw_masks("reference", runs.seed + step, inputs=inputs)
        found[LOSS].append(relative(there.step(inputs, masks), here.step(inputs, masks)))
        others = there.parameters()
        differences = {name: array - others[name] for name, array in here.parameters().items()}
        for name, difference in names.in_port_layout(differences, kind="value").items():
            found.setdefault(name, []).append(_mean(difference))
            found.setdefault(name + ELEMENT, []).append(float(np.abs(difference).max(initial=0.0)))
    return found


def digest(parameters: Tensors) -> str:
    """Of every bit of every parameter: a step that is dropped on the way leaves it as it was (P25)."""
    whole = hashlib.blake2b()
    for name in sorted(parameters):
        whole.update(name.encode())
        whole.update(np.ascontiguousarray(parameters[name]).data)
    return whole.hexdigest()


class Composed:
    """A side trained by what it brings: gradients of its loss, its clipping, its optimizer, its schedule."""

    def __init__(self, runs: Runs, side: Side, weights: Tensors, names: frozenset[str]):
        self.runs, self.side, self.names = runs, side, names
        self.weights = {name: array.astype(np.float64) for name, array in weights.items()}
        self.number = 0

    def step(self, inputs: Inputs, masks: Masks) -> float:
        """One forward and backward pass in training mode, then clipping, then the optimizer."""
        self.number += 1
        trace = self._trace(inputs, masks)
        gradients = {name: trace.gradients[name] for name in self.names}
        if self.side.clip is not None:
            gradients = self._clipped(gradients)
        rate = 1.0 if self.side.schedule is None else float(np.asarray(self._scheduled()))
        self._optimize(gradients, rate)
        moved = {name: array for name, array in trace.buffers.items() if name in self.weights}
        self.weights |= {name: array.astype(np.float64) for name, array in moved.items()}
        return float(trace.loss)

    def parameters(self) -> dict[str, np.ndarray]:
        """As they are now."""
        return {name: self.weights[name] for name in self.names}

    def _scheduled(self) -> Any:
        assert self.side.schedule is not None
        return self.side.schedule(self.number)

    def _trace(self, inputs: Inputs, masks: Masks) -> Any:
        raise NotImplementedError

    def _clipped(self, gradients: Tensors) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def _optimize(self, gradients: Tensors, rate: float) -> None:
        raise NotImplementedError


class ComposedReference(Composed):
    """The reference; parameters in `held` keep their values. `noise` makes what is added to each gradient."""

    def __init__(
        self, runs: Runs, weights: Tensors, names: frozenset[str], *, held: frozenset[str], noise: Noise | None
    ):
        from parity import training_torch

        super().__init__(runs, runs.pair.reference, weights, names)
        self.torch, self.held, self.noise = training_torch, held, noise
        moving = {name: self.weights[name] for name in names if name not in held}
        self.optimizer = training_torch.TorchOptimizer(self.side.optimizer, moving)

    def _trace(self, inputs: Inputs, masks: Masks) -> Any:
        trace = self.runs.run_reference(inputs, "float64", weights=self.weights, training=True, masks=masks or None)
        if self.noise is None:
            return trace
        noisy = {name: gradient + self.noise(gradient.shape) for name, gradient in trace.gradients.items()}
        return dataclasses.replace(trace, gradients=noisy)

    def _clipped(self, gradients: Tensors) -> dict[str, np.ndarray]:
        return self.torch.clipped(self.side, {n: g for n, g in gradients.items() if n not in self.held})

    def _optimize(self, gradients: Tensors, rate: float) -> None:
        self.optimizer.step({n: g for n, g in gradients.items() if n not in self.held}, rate=rate)
        self.weights |= self.optimizer.weights()


class ComposedPort(Composed):
    """The port."""

    def __init__(self, runs: Runs, names: frozenset[str]):
        from parity import training_flax

        super().__init__(runs, runs.pair.port, runs.port_weights, names)
        self.runner = runs.port_runner("float64")
        self.clipping = None if self.side.clip is None else training_flax.FlaxClipping(self.runner)
        self.optimizer = training_flax.OptaxOptimizer(self.runner, self.side.optimizer, self.parameters())

    def _trace(self, inputs: Inputs, masks: Masks) -> Any:
        return self.runs.run_port(
            inputs, "float64", weights=self.weights, tap=False, training=True, masks=masks or None
        )

    def _clipped(self, gradients: Tensors) -> dict[str, np.ndarray]:
        assert self.clipping is not None
        return self.clipping(gradients)

    def _scheduled(self) -> Any:
        with self.runner.numerics():
            return super()._scheduled()

    def _optimize(self, gradients: Tensors, rate: float) -> None:
        updates = self.optimizer.update(gradients, weights=self.parameters())
        self.weights |= {name: self.weights[name] + rate * update for name, update in updates.items()}


def _reference(runs: Runs, names: Trained, *, weights: Tensors | None = None, noise: Noise | None = None) -> Any:
    runs.live_reference()
    side, weights, held = runs.pair.reference, runs.weights if weights is None else weights, runs.derived.held
    if side.training is not None:
        from parity.training_torch import TorchTraining

        return TorchTraining(side, side.training, weights, held=held, noise=noise)
    if side.optimizer is None:
        raise NotComparedError("the reference's side brings neither a training step nor an optimizer")
    return ComposedReference(runs, weights, frozenset(names.shapes), held=held, noise=noise)


def _port(runs: Runs, names: Trained) -> Any:
    runner, side = runs.port_runner("float64"), runs.pair.port
    if side.training is not None:
        from parity.training_flax import FlaxTraining

        return FlaxTraining(runner, side.training, runs.port_weights)
    if side.optimizer is None:
        raise NotComparedError("the port's side brings neither a training step nor an optimizer")
    return ComposedPort(runs, frozenset(names.port_shapes))


def _rate(runs: Runs, reference: Any, step: int) -> float:
    schedule = runs.pair.reference.schedule
    own = 1.0 if schedule is None else float(np.asarray(schedule(step)))
    if isinstance(reference, ComposedReference):
        return own * reference.optimizer.own_rate
    return float("nan") if schedule is None else own


def first_gradients(runs: Runs, inputs: Inputs, masks: Masks) -> tuple[frozenset[str], float]:
    """Of the first step in training mode: the port's parameters whose gradient is rounding noise; the norm of all."""
    trace = runs.run_reference(inputs, "float64", training=True, masks=masks or None)
    gradients = runs.gradients_in_port_layout(trace)
    together = float(np.sqrt(sum(norm(gradient) ** 2 for gradient in gradients.values())))
    return zero_among(gradients, runs.summed_in_port_layout(trace)), together


def _measure(found: Trajectory, names: Trained, theirs: Tensors, ours: Tensors) -> None:
    """Distances of every parameter; a few at a time are brought into the port's layout."""
    for step in names.steps:
        for name, expected in step.apply({name: theirs[name] for name in step.sources}).items():
            mean, largest = apart(ours[name], expected) if name in ours else (float("inf"), float("inf"))
            found.distances.setdefault(name, []).append(mean)
            found.elements.setdefault(name, []).append(largest)
            found.sizes[name] = max(found.sizes.get(name, 0.0), float(np.abs(expected).max(initial=0.0)))
    for name in ours.keys() - names.port_shapes.keys():
        found.distances.setdefault(name, []).append(float("inf"))
        found.elements.setdefault(name, []).append(float("inf"))
        found.sizes[name] = 0.0


def apart(got: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Root mean square and largest difference; infinite for other shapes, and where one is not finite."""
    if got.shape != expected.shape:
        return float("inf"), float("inf")
    difference = got - expected
    largest = float(np.abs(difference).max(initial=0.0))
    return (_mean(difference), largest) if np.isfinite(largest) else (float("inf"), float("inf"))


def _mean(difference: np.ndarray) -> float:
    return norm(difference) / max(1, difference.size) ** 0.5


def relative(found: float, expected: float) -> float:
    """Of two numbers; infinite where one is not finite."""
    difference = abs(found - expected)
    if difference == 0.0:
        return 0.0
    error = difference / abs(expected) if expected else difference
    return error if np.isfinite(error) else float("inf")
