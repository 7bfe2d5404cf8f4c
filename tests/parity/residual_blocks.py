"""A small model on both sides, three residual blocks that are given a mask, in whose port faults are planted."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from parity.pair import Pair, Side

WIDTH, HIDDEN, DEPTH = 6, 10, 3


class TorchBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + y * keep[..., None].to(y.dtype)


class TorchModel(torch.nn.Module):
    """Three residual blocks, and beside them a layer of which only the first position is used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(9, WIDTH)
        self.side = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList(TorchBlock() for _ in range(DEPTH))
        self.head = torch.nn.Linear(WIDTH, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.side(x)[:, :1]
        for block in self.blocks:
            x = block(x, ids != 0)
        return self.head(x)


class Block(nnx.Module):
    eps = 1e-5

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, keep: jax.Array) -> jax.Array:
        return x + self.inner(x) * keep[..., None]

    def inner(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(self.norm(x)), approximate=False))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(9, WIDTH, rngs=rngs)
        self.side = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        x = x + self.side(x)[:, :1]
        for block in self.blocks:
            x = block(x, ids != 0)
        return self.head(x)


IDS = np.array([[1, 4, 2, 7, 0], [8, 3, 0, 0, 0]])


def reclass(module: nnx.Module, **methods: Callable[..., Any]) -> None:
    """Gives one module other methods; the others of its class keep theirs."""
    module.__class__ = type(type(module).__name__, (type(module),), methods)


def pair(*faults: Callable[[Model], None], **changes: Any) -> Pair:
    def build() -> Model:
        model = Model(nnx.Rngs(0))
        for fault in faults:
            fault(model)
        return model

    side = Side(build=build)
    return Pair(reference=TorchModel, port=side, inputs={"ids": IDS}, weights=WEIGHTS, **changes)


torch.manual_seed(5)
WEIGHTS: Mapping[str, np.ndarray] = {
    name: p.detach().numpy() + 0.05 * np.random.default_rng(1).normal(size=p.shape).astype(np.float32)
    for name, p in TorchModel().named_parameters()
}


def norm_eps(i: int) -> Callable[[Model], None]:
    return lambda model: setattr(model.blocks[i].norm, "epsilon", 1e-6)
