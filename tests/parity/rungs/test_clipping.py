"""Clipping by global norm: equal where it is, and each known way of clipping otherwise is seen."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from parity.rungs import NotComparedError, clipping
from tests.parity.rungs import small_pair

MAX_NORM = 0.7
Tensors = Mapping[str, Any]


def reference(gradients: Tensors) -> dict[str, torch.Tensor]:
    norm = torch.sqrt(sum((g**2).sum() for g in gradients.values()))
    scale = torch.clamp(MAX_NORM / norm, max=1.0)
    return {name: g * scale for name, g in gradients.items()}


def with_torchs_epsilon(gradients: Tensors) -> dict[str, torch.Tensor]:
    """What torch.nn.utils.clip_grad_norm_ does (P8)."""
    parameters = {name: torch.nn.Parameter(torch.zeros_like(g)) for name, g in gradients.items()}
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].clone()
    torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM)
    return {name: parameter.grad for name, parameter in parameters.items()}


def optax_clip(transformation: optax.GradientTransformation) -> Callable[[Tensors], Any]:
    return lambda gradients: transformation.update(gradients, transformation.init(gradients))[0]


GLOBAL = optax_clip(optax.clip_by_global_norm(MAX_NORM))


def climb(theirs: Any, ours: Any) -> Any:
    return clipping.climb(small_pair.runs(reference={"clip": theirs}, port={"clip": ours}))


def test_equal_clipping_passes_at_every_scale() -> None:
    outcome = climb(reference, GLOBAL)
    (section,) = outcome.sections
    assert section.passed
    assert len(section.comparisons) == 6 * len(clipping.SCALES)
    assert f"a global norm of {MAX_NORM}" in outcome.notes[-1]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (with_torchs_epsilon, GLOBAL),
        (reference, optax_clip(optax.clip(MAX_NORM))),
        (reference, optax_clip(optax.clip_by_block_rms(MAX_NORM))),
        (reference, optax_clip(optax.clip_by_global_norm(MAX_NORM * (1 + 1e-9)))),
        (reference, lambda gradients: gradients),
        (reference, lambda gradients: {n: g * MAX_NORM / optax.tree.norm(gradients) for n, g in gradients.items()}),
        (
            reference,
            lambda gradients: {n: g * jnp.minimum(1.0, MAX_NORM / jnp.linalg.norm(g)) for n, g in gradients.items()},
        ),
        (reference, lambda gradients: {n: g for n, g in GLOBAL(gradients).items() if n != "second.bias"}),
    ],
    ids=["1e-6", "by value", "root mean square", "1e-9", "none", "always", "per tensor", "a tensor lost"],
)
def test_other_ways_of_clipping_are_seen(theirs: Any, ours: Any) -> None:
    outcome = climb(theirs, ours)
    assert not outcome.sections[0].passed
    evidence = outcome.evidence
    assert evidence["gradients"].keys() == evidence["reference"].keys() >= evidence["port"].keys()
    assert evidence["max_norm"] == pytest.approx(MAX_NORM, rel=1e-5)
    assert all(isinstance(array, np.ndarray) for array in evidence["port"].values())


def test_the_difference_is_told_in_words() -> None:
    failure = next(c for c in climb(with_torchs_epsilon, GLOBAL).sections[0].failures if "at 1 times" in c.tensor)
    assert failure.tensor.endswith(" at 1 times the limit")
    assert "global norm afterwards: expected 0.699999000001, found 0.7" in failure.detail


def test_a_clip_that_decides_in_python_is_not_compiled() -> None:
    def ours(gradients: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        return GLOBAL(gradients) if optax.tree.norm(gradients) > MAX_NORM else gradients

    assert climb(reference, ours).sections[0].passed


def test_nothing_to_compare() -> None:
    with pytest.raises(NotComparedError, match="port brings no clipping"):
        climb(reference, None)
