"""Rung 12: the same gradients, step after step, through both optimizers: updates and moments (P10).

Gradients are drawn over ten orders of magnitude, so that an eps, wherever it stands, matters to some elements; one
step's are all zero. Both are told the reference's weights before each step, so that only the optimizers differ.

Evidence, of the parameter that differs most: its `gradients` in each step, its `weights` before the first, and its
updates in each step by the `reference` and the `port`, in the port's layout; `parameter`, its name.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from parity import training
from parity.compare import Comparison, norm, relative_error
from parity.rungs import Outcome, Section, section
from parity.rungs.forward import compare_all
from parity.runs import Runs
from parity.tolerances import FLOAT64_RULE, UPDATE_RULE, updated
from parity.training import Trained

NUM_STEPS = 6
ZERO_STEP = 4
"""Whose gradients are zero, counted from 1: moments decay, and a step is taken all the same."""

SMALLEST = 1e-10
"""Of the gradients' scales; the largest is 1."""

Tensors = Mapping[str, np.ndarray]


def climb(runs: Runs) -> Outcome:
    """Updates of every parameter in every step, then the moments. Raises NotComparedError if one side brings none."""
    runs.expect_both("optimizer", "optimizer")
    from parity.training_flax import OptaxOptimizer
    from parity.training_torch import TorchOptimizer

    names = training.trained(runs)
    weights = {name: runs.weights[name].astype(np.float64) for name in names.shapes}
    theirs = TorchOptimizer(runs.pair.reference.optimizer, weights)
    before = names.in_port_layout(weights, kind="value")
    ours = OptaxOptimizer(runs.port_runner("float64"), runs.pair.port.optimizer, before)
    record, still = _Record(before), runs.derived.held
    for step in range(1, NUM_STEPS + 1):
        gradients = _gradients(names, step=step, seed=runs.seed)
        ported = names.in_port_layout(gradients, kind="gradient")
        theirs.step({name: gradient for name, gradient in gradients.items() if name not in still})
        after = names.in_port_layout(theirs.weights(), kind="value")
        got = ours.update(ported, weights=before)
        record.add(step, ported, before, {name: after[name] - before[name] for name in after}, got)
        before = after
    moments, notes = _moments(names, theirs, ours)
    sections = [section("updates", "float64", UPDATE_RULE, record.comparisons)]
    return Outcome(
        sections=(*sections, *([moments] if moments is not None else [])),
        notes=(*names.note, *notes),
        evidence=record.evidence(),
    )


class _Record:
    """Comparisons of every step, and what the diagnosis needs of the worst parameter."""

    def __init__(self, weights: Tensors):
        self.weights = weights
        self.comparisons: list[Comparison] = []
        self.steps: list[tuple[Tensors, Tensors, Tensors]] = []

    def add(self, step: int, gradients: Tensors, weights: Tensors, expected: Tensors, got: Tensors) -> None:
        self.steps.append((gradients, expected, got))
        for name, update in expected.items():
            largest = max(norm(weights[name]), norm(weights[name] + update))
            self.comparisons.append(
                Comparison(
                    tensor=f"{name}, step {step}",
                    error=relative_error(got[name], update),
                    bound=updated(largest, norm(update)),
                    detail=_proportion(got[name], update),
                )
            )

    def evidence(self) -> dict[str, Any]:
        failures = [c for c in self.comparisons if not c.passed] or self.comparisons
        name = max(failures, key=lambda c: c.error).tensor.rpartition(",")[0]
        return {
            "parameter": name,
            "weights": self.weights[name],
            "gradients": [gradients[name] for gradients, _, _ in self.steps],
            "reference": [expected[name] for _, expected, _ in self.steps],
            "port": [got[name] for _, _, got in self.steps],
        }


def _proportion(got: np.ndarray, expected: np.ndarray) -> str:
    """How long the update is, which tells a wrong rate from a wrong direction."""
    if got.shape != expected.shape:
        return f"expected shape {expected.shape}, found {got.shape}"
    wanted, found = norm(expected), norm(got)
    cosine = float(np.vdot(expected, got)) / (wanted * found) if wanted * found > 0 else float("nan")
    return f"norm of the update: expected {wanted:.6g}, found {found:.6g}; cosine between them {cosine:.6f}"


def _gradients(names: Trained, *, step: int, seed: int) -> dict[str, np.ndarray]:
    """Each element of a size of its own, the same in every step."""
    sizes, signs = np.random.default_rng((seed, 12)), np.random.default_rng((seed, 12, step))

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        size = 10 ** sizes.uniform(np.log10(SMALLEST), 0.0, shape)
        return np.zeros(shape) if step == ZERO_STEP else np.asarray(size * signs.standard_normal(shape))

    return names.drawn(draw)


def _moments(names: Trained, theirs: Any, ours: Any) -> tuple[Section | None, list[str]]:
    from parity.training_torch import MOMENTS

    comparisons: list[Comparison] = []
    notes: list[str] = []
    for called, arrays in theirs.moments().items():
        got = ours.moments(called)
        if got is None:
            notes.append(f"{called} not compared: the port's optimizer keeps nothing of that kind, or several of them")
            continue
        expected, unknown = _moved(names, arrays, kind=MOMENTS[called])
        comparisons += _named(called, compare_all({n: got[n] for n in expected if n in got}, expected))
        notes += [f"{called} of {name} not compared: {why}" for name, why in unknown.items()]
    if not comparisons:
        return None, [*notes, "no moments that both keep"]
    return section("moments after the last step", "float64", FLOAT64_RULE, comparisons), notes


def _moved(names: Trained, arrays: Tensors, *, kind: Any) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    moved: dict[str, np.ndarray] = {}
    unknown: dict[str, str] = {}
    for step in names.steps:
        kept = [arrays[name] for name in step.sources if name in arrays]
        if not kept:
            unknown[", ".join(step.sources)] = "the optimizer keeps none"
            continue
        try:
            # A bias that is held still beside another has none; its gradient would be the other's.
            moved |= step.apply({name: arrays.get(name, kept[0]) for name in step.sources}, kind=kind)
        except ValueError as why:
            unknown[", ".join(step.sources)] = str(why)
    return moved, unknown


def _named(called: str, comparisons: Iterator[Comparison]) -> Iterator[Comparison]:
    import dataclasses

    for comparison in comparisons:
        yield dataclasses.replace(comparison, tensor=f"{called} of {comparison.tensor}")
