"""Rung 11: the same gradients through both clips: far above the limit, just above, at it, below, and zeros (P8).

Evidence, at the scale that differs most: `gradients`, and what the `reference` and the `port` made of them, by the
port's names; `norm` before, and `max_norm`, the norm that the reference leaves of a very large gradient.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from parity import training
from parity.compare import Comparison
from parity.rungs import NotComparedError, Outcome, section
from parity.rungs.forward import compare_all
from parity.runs import Runs
from parity.tolerances import FLOAT64_RULE
from parity.training import Trained, global_norm

Tensors = Mapping[str, np.ndarray]

LARGE = 1e9
"""Norm of the gradient that the limit is read off."""

SCALES = (1e4, 10.0, 1.5, 1.0 + 1e-3, 1.0 + 1e-7, 1.0, 1.0 - 1e-7, 0.5, 1e-4, 0.0)
"""Norms of the gradients, in units of the limit."""


def climb(runs: Runs) -> Outcome:
    """Every tensor at every scale. Raises NotComparedError if one side brings no clipping."""
    runs.expect_both("clip", "clipping")
    from parity.training_flax import FlaxClipping

    port = FlaxClipping(runs.port_runner("float64"))
    names, apart = _norm_preserving(runs)
    unit, notes = _random_gradients(names, seed=runs.seed), list(names.note)
    if apart:
        notes.append(f"not clipped with the others, their norm differs between the layouts: {', '.join(apart)}")
    max_norm = global_norm(_reference(runs, {name: LARGE * array for name, array in unit.items()}))
    comparisons: list[Comparison] = []
    evidence: dict[str, object] = {}
    worst = -1.0
    for scale in SCALES:
        given = {name: scale * max_norm * array for name, array in unit.items()}
        expected = names.in_port_layout(_reference(runs, given), kind="gradient")
        ported = names.in_port_layout(given, kind="gradient")
        got = port(ported)
        found = list(_at_scale(got, expected, scale))
        comparisons += found
        error = max(comparison.error for comparison in found)
        if error > worst:
            worst = error
            evidence = {
                "gradients": ported,
                "norm": global_norm(ported),
                "max_norm": max_norm,
                "reference": expected,
                "port": got,
            }
    notes.append(f"the reference clips to a global norm of {max_norm:.6g}")
    return Outcome(
        sections=(section("clipped gradients", "float64", FLOAT64_RULE, comparisons),),
        notes=tuple(notes),
        evidence=evidence,
    )


def _at_scale(got: Tensors, expected: Tensors, scale: float) -> Iterator[Comparison]:
    for comparison in compare_all(got, expected):
        name = f"{comparison.tensor} at {scale:.8g} times the limit"
        detail = comparison.detail
        if not detail and not comparison.passed:
            left, wanted = global_norm(got), global_norm(expected)
            detail = f"global norm afterwards: expected {wanted:.12g}, found {left:.12g}"
        yield Comparison(tensor=name, error=comparison.error, bound=comparison.bound, detail=detail)


def _random_gradients(names: Trained, *, seed: int) -> dict[str, np.ndarray]:
    """Of global norm 1, each tensor of another size, so that clipping each by itself shows."""
    rng = np.random.default_rng((seed, 11))
    drawn = names.drawn(lambda shape: np.asarray(10 ** rng.uniform(-2, 0) * rng.standard_normal(shape)))
    whole = global_norm(drawn)
    return {name: array / whole for name, array in drawn.items()}


def _norm_preserving(runs: Runs) -> tuple[Trained, list[str]]:
    """Parameters whose gradient has the same norm in both layouts, and the names of the others.

    Two biases in torch that are one in Flax count twice in one global norm, once in the other.
    """
    every = training.trained(runs)
    ones = {name: np.ones(shape) for name, shape in every.shapes.items()}
    kept = []
    for step in every.steps:
        ported = step.apply(ones, kind="gradient")
        there = global_norm([ported[name] for name in step.targets])
        if np.isclose(there, global_norm([ones[name] for name in step.sources]), rtol=1e-12):
            kept.append(step)
    if not kept:
        raise NotComparedError("no parameter's gradient has the same norm in both layouts")
    names = every.only(kept)
    return names, [name for name in every.shapes if name not in names.shapes]


def _reference(runs: Runs, gradients: Tensors) -> dict[str, np.ndarray]:
    from parity import training_torch

    return training_torch.clipped(runs.pair.reference, gradients)
