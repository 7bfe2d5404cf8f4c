"""`assert_parity(pair)`: one line in a test, which fails with a report that can be read."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity import Pair, Rule, assert_parity
from parity.weights.mapping import WeightMapping
from parity.weights.rules import Transpose

RUNGS = ("weights", "forward", "gradients", "schedule")


class Reference(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.second = torch.nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


class Port(nnx.Module):
    activation: Callable[[jax.Array], jax.Array] = staticmethod(jnp.tanh)

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(5, 7, rngs=rngs)
        self.second = nnx.Linear(7, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        out: jax.Array = self.second(self.activation(self.first(x)))
        return out


class WithAnotherActivation(Port):
    activation = staticmethod(lambda x: jnp.tanh(x) + 1e-9 * x)


@pytest.fixture
def pair() -> Pair:
    mapping = WeightMapping([Rule("{m}.weight", "{m}.kernel", (Transpose(),)), Rule("{m}.bias", "{m}.bias")])
    inputs = {"x": np.random.default_rng(0).normal(size=(4, 5))}
    return Pair(name="toy", reference=Reference, port=lambda: Port(nnx.Rngs(0)), inputs=inputs, mapping=mapping)


def test_an_equal_pair_passes_and_the_report_comes_back(pair: Pair) -> None:
    report = assert_parity(pair, rungs=RUNGS, require=("gradients",))
    assert report.passed
    assert report.rung("gradients").passed


def test_a_difference_raises_with_the_report(pair: Pair) -> None:
    broken = dataclasses.replace(pair, port=lambda: WithAnotherActivation(nnx.Rngs(0)))
    with pytest.raises(AssertionError) as caught:
        assert_parity(broken, rungs=RUNGS)
    message = str(caught.value)
    assert message.startswith("toy: NOT EQUAL")
    assert "between first, the last that is equal, and second" in " ".join(message.split())
    assert "6 forward, float64 modules and results: second" in message, "what failed"
    assert "\x1b" not in message, "no colours"


def test_a_required_rung_that_was_skipped_fails(pair: Pair) -> None:
    assert_parity(pair, rungs=RUNGS)
    with pytest.raises(AssertionError, match=r"required, but schedule was not compared: \S+"):
        assert_parity(pair, rungs=RUNGS, require=("schedule",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"require": ("gradient",)}, "require: expected rungs among .*got gradient$"),
        ({"rungs": ("forward",), "require": ("gradients",)}, "got gradients left out"),
        ({"rungs": ("forwards",)}, "expected rungs among"),
    ],
)
def test_a_rung_that_does_not_exist_is_an_error(pair: Pair, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assert_parity(pair, **arguments)


def test_without_outputs_nothing_is_proven(pair: Pair) -> None:
    with pytest.raises(AssertionError, match="toy: NOT PROVEN EQUAL"):
        assert_parity(pair, rungs=("weights",))
