"""Rung 7: faults that show on hard inputs only."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity import ladder
from parity.pair import Pair, Side

WIDTH = 6


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class FlaxNorm(nnx.Module):
    def __init__(self, **options: Any):
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=nnx.Rngs(0), **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


class Pool(torch.nn.Module):
    """A mean over the real positions, zeros where there is none."""

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        weights = real[..., None].to(x.dtype)
        return (x * weights).sum(1) / weights.sum(1).clamp(min=1)


class FlaxPool(nnx.Module):
    def __init__(self, least: float = 1.0):
        self.least = least

    def __call__(self, x: jax.Array, real: jax.Array) -> jax.Array:
        weights = real[..., None].astype(x.dtype)
        return (x * weights).sum(1) / jnp.maximum(weights.sum(1), self.least)


def norm_pair(**options: Any) -> Pair:
    x = np.random.default_rng(0).standard_normal((4, WIDTH))
    return Pair(reference=Norm, port=lambda: FlaxNorm(**options), inputs={"x": x})


def check(pair: Pair) -> ladder.Report:
    return ladder.check(pair, rungs=("weights", "forward", "adversarial"), keep_going=True)


def test_the_fast_variance_passes_on_usual_numbers_and_fails_on_a_large_mean() -> None:
    """P1: E[x²] - E[x]² loses twice the digits that a large mean costs."""
    outcome = check(norm_pair(use_fast_variance=True))
    assert outcome.rung("forward").passed
    failed = {failure.tensor for failure in outcome.rung("adversarial").failures}
    assert "norm, mean 1e4" in failed
    assert not any("variance 1e6" in tensor for tensor in failed)
    assert check(norm_pair(use_fast_variance=False)).passed


def test_hard_inputs_of_a_pair_without_any_are_made_of_its_floating_point_inputs() -> None:
    titles = {s.title for s in check(norm_pair(use_fast_variance=False)).rung("adversarial").outcome.sections}
    assert {"exact zeros", "large mean", "small variance", "modules by themselves"} <= titles


@pytest.mark.parametrize(("least", "passes"), [(1.0, True), (0.0, False)])
def test_a_row_without_any_real_position(least: float, passes: bool) -> None:
    """P17: zeros on one side, NaN on the other; every row of the usual batch has something real."""
    x = np.random.default_rng(0).standard_normal((2, 3, WIDTH))
    real = np.array([[True, True, False], [True, True, True]])
    nothing = np.array([[False, False, False], [True, False, False]])

    def call(module: Any, inputs: Any) -> Any:
        return module(inputs["x"], inputs["real"])

    pair = Pair(
        reference=Side(build=Pool, call=call),
        port=Side(build=lambda: FlaxPool(least), call=call),
        inputs={"x": x, "real": real},
        adversarial=lambda seed: {"nothing real": {"x": x, "real": nothing}},
    )
    outcome = ladder.check(pair, rungs=("forward", "adversarial"), keep_going=True)
    assert outcome.rung("forward").passed
    assert outcome.rung("adversarial").passed == passes
    if not passes:
        assert "output" in {failure.tensor for failure in outcome.rung("adversarial").failures}
