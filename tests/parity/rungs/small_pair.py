"""A pair of small models with everything that training needs: two layers, a batch norm between them, dropout."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

from parity.pair import Inputs, Pair, Side
from parity.runs import Runs

WIDTHS = (5, 7, 3)
RATE = 0.25


class Reference(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTHS[0], WIDTHS[1])
        self.norm = torch.nn.BatchNorm1d(WIDTHS[1])
        self.drop = torch.nn.Dropout(RATE)
        self.second = torch.nn.Linear(WIDTHS[1], WIDTHS[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.tanh(self.norm(self.first(x)))))


def linear(fan_in: int, out: int, *, rngs: nnx.Rngs, scale: float = 1.0) -> nnx.Linear:
    """Initialised as torch does: kernel and bias uniform within 1/√fan_in."""
    bound = scale / np.sqrt(fan_in)

    def uniform(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return nnx.Linear(fan_in, out, kernel_init=uniform, bias_init=uniform, rngs=rngs)


class Port(nnx.Module):
    momentum = 0.9
    rate = RATE

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = self.layer(WIDTHS[0], WIDTHS[1], rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTHS[1], momentum=self.momentum, epsilon=1e-5, rngs=rngs)
        self.drop = self.dropout(rngs)
        self.second = self.layer(WIDTHS[1], WIDTHS[2], rngs=rngs)

    def layer(self, fan_in: int, out: int, *, rngs: nnx.Rngs) -> nnx.Linear:
        return linear(fan_in, out, rngs=rngs)

    def dropout(self, rngs: nnx.Rngs) -> nnx.Dropout:
        return nnx.Dropout(self.rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.drop(jnp.tanh(self.norm(self.first(x)))))


def inputs(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((11, WIDTHS[0])), "y": rng.standard_normal((11, WIDTHS[2]))}


def call(module: Any, inputs: Mapping[str, Any]) -> Any:
    return module(inputs["x"])


def loss(output: Any, inputs: Inputs) -> Any:
    return ((output - inputs["y"]) ** 2).mean()


def pair(*, reference: Mapping[str, Any] | None = None, port: Mapping[str, Any] | None = None, **fields: Any) -> Pair:
    """The pair, with some fields of its sides replaced."""
    theirs = Side(build=Reference, call=call, loss=loss, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2))
    ours = Side(build=Port, call=call, loss=loss, optimizer=optax.adam(1e-2))
    return Pair(
        name="small",
        reference=dataclasses.replace(theirs, **(reference or {})),
        port=dataclasses.replace(ours, **(port or {})),
        **{"inputs": inputs, **fields},
    )


def runs(**fields: Any) -> Runs:
    return Runs(pair(**fields))
