"""One layer in both frameworks, a port that is off by a billionth, and the first rungs climbed for a pair."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from parity.pair import Pair
from parity.rungs import Outcome, forward, gradients
from parity.runs import Runs

X = {"x": np.random.default_rng(0).normal(size=(3, 4, 5))}


def climb(pair: Pair) -> tuple[Runs, Outcome, bool]:
    """Forward and gradients: what they found, and whether everything passed."""
    runs = Runs(pair)
    found = forward.climb(runs)
    passed = all(section.passed for section in (*found.sections, *gradients.climb(runs).sections))
    return runs, found, passed


def failures(outcome: Outcome) -> list[str]:
    return [comparison.tensor for section in outcome.sections for comparison in section.failures]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(5, 5)

    def forward(self, x: Any, mask: Any = None, *, scale: float = 1.0, flag: bool = True) -> Any:
        return torch.tanh(self.lin(x)) * scale if mask is None else torch.tanh(self.lin(x)).where(mask, 0.0)


class FlaxLayer(nnx.Module):
    factor = 1.0

    def __init__(self, rngs: nnx.Rngs):
        self.lin = nnx.Linear(5, 5, rngs=rngs)

    def __call__(self, x: Any, mask: Any = None, scale: float = 1.0) -> Any:
        if isinstance(scale, jax.Array):
            raise TypeError("a setting is no array")
        x = jnp.tanh(self.lin(x)) * self.factor
        return x * scale if mask is None else jnp.where(mask, x, 0.0)


class FlaxLayerOffByABillionth(FlaxLayer):
    factor = 1.0 + 1e-9
