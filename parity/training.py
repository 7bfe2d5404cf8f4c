"""What the rungs of training share: which parameters take part, made-up gradients for them, the batch of each step."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from parity.pair import Inputs
from parity.rungs import NotComparedError
from parity.runs import Runs
from parity.weights.mapping import Step
from parity.weights.rules import Kind

MAX_ELEMENTS = 1 << 20
"""Parameters of more elements than this in all are compared in part: clipping and optimizers treat elements alike, and
float64 gradients, weights and moments of a model of hundreds of millions would not fit beside the rest."""

Tensors = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """Trained parameters of the reference that have a place in the port, and the way there."""

    steps: tuple[Step, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """By the reference's names."""
    port_shapes: Mapping[str, tuple[int, ...]]
    left_out: int
    """How many others there are, of a model too large to take them all."""

    def merges(self, step: Step) -> bool:
        """Whether tensors become fewer elements: two biases that are only ever added, of which the port has the sum."""
        return _elements(self.shapes, step.sources) > _elements(self.port_shapes, step.targets)

    def in_port_layout(self, tensors: Tensors, *, kind: Kind) -> dict[str, np.ndarray]:
        """Arrays of the reference under the port's names."""
        arrays: dict[str, np.ndarray] = {}
        for step in self.steps:
            arrays |= step.apply(tensors, kind=kind)
        return arrays

    def drawn(self, draw: Callable[[tuple[int, ...]], np.ndarray]) -> dict[str, np.ndarray]:
        """Made-up gradients: `draw(shape)` of every tensor. Biases that are only ever added have the same."""
        arrays: dict[str, np.ndarray] = {}
        for step in self.steps:
            if self.merges(step):
                shared = {shape: draw(shape) for shape in dict.fromkeys(self.shapes[name] for name in step.sources)}
                arrays |= {name: shared[self.shapes[name]] for name in step.sources}
            else:
                arrays |= {name: draw(self.shapes[name]) for name in step.sources}
        return arrays

    def only(self, steps: Sequence[Step]) -> "Trained":
        """The same of some of the steps."""
        shapes = {name: self.shapes[name] for step in steps for name in step.sources}
        port_shapes = {name: self.port_shapes[name] for step in steps for name in step.targets}
        return dataclasses.replace(self, steps=tuple(steps), shapes=shapes, port_shapes=port_shapes)

    @property
    def note(self) -> tuple[str, ...]:
        """Says so, if some were left out."""
        if not self.left_out:
            return ()
        share = f"on {len(self.shapes)} of {len(self.shapes) + self.left_out} parameters"
        return (f"{share}: the smaller ones, of at most {MAX_ELEMENTS:,} elements in all",)


def trained(runs: Runs, *, max_elements: int | None = MAX_ELEMENTS) -> Trained:
    """The smaller tensors first, but at least one of each rank: decay is often a matter of rank. None: all of them.

    Raises NotComparedError if nothing is trained.
    """
    names = runs.reference_runner.trained()
    used = [name for name in runs.weights if name in names and runs.derived.travels(name)]
    shapes = {name: runs.weights[name].shape for name in used}
    plan = runs.mapping.plan(used)
    if not plan:
        raise NotComparedError("no parameter is trained")
    chosen: list[Step] = []
    ranks, elements = set[int](), 0
    for step in sorted(plan, key=lambda step: _elements(shapes, step.sources)):
        rank, size = len(shapes[step.sources[0]]), _elements(shapes, step.sources)
        if max_elements is None or elements + size <= max_elements or rank not in ranks:
            chosen.append(step)
            ranks.add(rank)
            elements += size
    chosen.sort(key=plan.index)
    whole = Trained(
        steps=(),
        shapes=shapes,
        port_shapes={name: runs.port_weights[name].shape for step in chosen for name in step.targets},
        left_out=len(shapes) - sum(len(step.sources) for step in chosen),
    )
    return whole.only(chosen)


def batch_of(runs: Runs, step: int) -> Inputs:
    """What both train on in this step, the first being step 1: a new batch, or the pair's own by turns."""
    if runs.golden is None and callable(runs.pair.inputs):
        return runs.pair.batches(seed=runs.seed + step)[0]
    return runs.batches[(step - 1) % len(runs.batches)]


def global_norm(tensors: Tensors | Sequence[np.ndarray]) -> float:
    """Of all of them together, in float64."""
    arrays = tensors.values() if isinstance(tensors, Mapping) else tensors
    return float(np.sqrt(sum(float(np.vdot(array, array)) for array in arrays)))


def _elements(shapes: Mapping[str, tuple[int, ...]], names: Sequence[str]) -> int:
    return sum(int(np.prod(shapes[name])) for name in names)
