"""Where float32 enters a float64 run, on either side: found by the operations, not by the looks of values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.nn import functional

from parity.capture_flax import FlaxRunner
from parity.capture_torch import TorchRunner
from parity.pair import Side
from parity.trace import Trace

X = {"x": np.random.default_rng(0).normal(size=(3, 4, 5))}


def torch_trace(module: torch.nn.Module) -> Trace:
    runner = TorchRunner(Side(build=lambda: module))
    return runner.trace(X, weights=runner.weights(), precision="float64")


def flax_trace(build: Any) -> Trace:
    return FlaxRunner(Side(build=lambda: build(nnx.Rngs(0))), precision="float64").trace(X, weights={})


class Casting(torch.nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.before = torch.nn.Linear(5, 6)
        self.inner = torch.nn.Sequential(torch.nn.Linear(6, 6), Cast(how))
        self.after = torch.nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        return self.after(self.inner(self.before(x)))


class Cast(torch.nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = torch.sin(torch.arange(6.0))

    def forward(self, x: Any) -> Any:
        if self.how == "softmax":
            return functional.softmax(x, -1, dtype=torch.float32).to(x.dtype)
        if self.how == "table":
            return x + self.table
        if self.how == "computed":
            return x + torch.sin(torch.arange(6, dtype=torch.float32))
        if self.how == "mask":
            mask = torch.zeros(6).masked_fill_(torch.arange(6) > 3, torch.finfo(torch.float32).min)
            return x + mask.clamp(min=-1e9) + 0.25 * torch.ones(6)
        return x


@pytest.mark.parametrize("how", ["softmax", "table", "computed"])
def test_torch_float32_inside_a_float64_run_is_named(how: str) -> None:
    trace = torch_trace(Casting(how))
    assert list(trace.narrow) == ["inner.1", "inner", "after", "output", "loss"]
    place = trace.narrow["inner.1"]
    assert place.startswith("inner.1 at test_capture_precision.py:")
    assert set(trace.narrow.values()) == {place}


@pytest.mark.parametrize("how", ["mask", "nothing"])
def test_torch_masks_and_weights_in_float32_lose_nothing(how: str) -> None:
    assert torch_trace(Casting(how)).narrow == {}
    runner = TorchRunner(Side(build=lambda precision: Embedding32()))
    assert runner.trace({"ids": np.arange(6).reshape(2, 3)}, weights=runner.weights(), precision="float64").narrow == {}


class Embedding32(torch.nn.Module):
    """Told the precision, keeps its weights in float32: they are what both sides are given, to the last bit."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(7, 5)

    def forward(self, ids: Any) -> Any:
        return torch.tanh(self.table(ids).double())


class FlaxCasting(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, how: str):
        self.before = nnx.Linear(5, 6, rngs=rngs)
        self.inner = nnx.Sequential(nnx.Linear(6, 6, rngs=rngs), FlaxCast(how))
        self.after = nnx.Linear(6, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.after(self.inner(self.before(x)))


class FlaxCast(nnx.Module):
    def __init__(self, how: str):
        self.how = how

    def __call__(self, x: Any) -> Any:
        return FLAX_CASTS[self.how](x)


def attended(x: Any) -> Any:
    heads = x[:, :, None]
    return jax.nn.dot_product_attention(heads, heads, heads)[:, :, 0]


def masked(x: Any) -> Any:
    keep = jnp.arange(6) < 4
    return x + (1.0 - keep.astype(jnp.float32)) * -1e9 + jnp.where(keep, jnp.float32(0.1), 0)


FLAX_CASTS: dict[str, Any] = {
    "softmax": nnx.remat(lambda x: jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)),
    "table": lambda x: x + jnp.asarray(np.sin(np.arange(6.0)).astype(np.float32)),
    "computed": lambda x: x + jnp.sin(jnp.arange(6, dtype=jnp.float32)),
    "scan": lambda x: jax.lax.scan(lambda c, a: (c + a.astype(jnp.float32).astype(c.dtype), None), x, x[None])[0],
    "attention": attended,
    "mask": masked,
    "nothing": jnp.tanh,
}


@pytest.mark.parametrize("how", ["softmax", "table", "computed", "scan", "attention"])
def test_flax_float32_inside_a_float64_run_is_named(how: str) -> None:
    trace = flax_trace(lambda rngs: FlaxCasting(rngs, how))
    assert list(trace.narrow) == ["inner.layers.1", "inner", "after", "output", "loss"]
    place = trace.narrow["inner.layers.1"]
    assert place.startswith("inner.layers.1")
    assert " at test_capture_precision.py:" in place
    assert set(trace.narrow.values()) == {place}


@pytest.mark.parametrize("how", ["mask", "nothing"])
def test_flax_masks_and_whole_numbers_in_float32_lose_nothing(how: str) -> None:
    assert flax_trace(lambda rngs: FlaxCasting(rngs, how)).narrow == {}


def test_float32_runs_are_not_watched_for_it() -> None:
    runner = TorchRunner(Side(build=lambda: Casting("softmax")))
    assert runner.trace(X, weights=runner.weights(), precision="float32").narrow == {}
