"""Linen modules and pure functions as ports."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity.adapters import from_function, from_linen
from parity.capture_flax import FlaxRunner
from parity.pair import Pair, Side
from parity.rungs import forward, gradients
from parity.runs import Runs
from parity.weights.mapping import Rule
from parity.weights.rules import Transpose

X = {"x": np.random.default_rng(0).normal(size=(3, 5))}
EXAMPLE = (jnp.ones((3, 5)),)


class Block(torch.nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(inputs, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.drop(self.norm(self.dense(x))))


class Reference(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(5), Block(6)])
        self.head = torch.nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LinenBlock(nn.Module):
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.Dense(6)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=self.epsilon)(x)
        return nn.relu(nn.Dropout(0.5, deterministic=not train)(x))


class Linen(nn.Module):
    epsilon: float = 1e-5
    remat: bool = False

    def setup(self) -> None:
        block = nn.remat(LinenBlock, static_argnums=(2,)) if self.remat else LinenBlock
        self.layers = [block(), block(epsilon=self.epsilon)]
        self.head = nn.Dense(2)

    def __call__(self, x: Any, train: bool = False) -> Any:
        for layer in self.layers:
            x = layer(x, train)
        return self.head(x)


RULES = (
    Rule("blocks.{i}.dense.weight", "layers_{i}.Dense_0.kernel", (Transpose(),)),
    Rule("blocks.{i}.dense.bias", "layers_{i}.Dense_0.bias"),
    Rule("blocks.{i}.norm.weight", "layers_{i}.BatchNorm_0.scale"),
    Rule("blocks.{i}.norm.bias", "layers_{i}.BatchNorm_0.bias"),
    Rule("blocks.{i}.norm.running_{name}", "layers_{i}.BatchNorm_0.{name}"),
    Rule("head.weight", "head.kernel", (Transpose(),)),
    Rule("head.bias", "head.bias"),
)
MODULES = (
    ("blocks.{i}", "layers_{i}"),
    ("blocks.{i}.dense", "layers_{i}.Dense_0"),
    ("blocks.{i}.norm", "layers_{i}.BatchNorm_0"),
    ("blocks.{i}.drop", "layers_{i}.Dropout_0"),
)


def linen_pair(**changes: Any) -> Pair:
    build = lambda: from_linen(Linen(**changes), rngs=jax.random.key(0), args=EXAMPLE)  # noqa: E731
    return Pair(reference=Reference, port=build, inputs=X, mapping=RULES, modules=MODULES)


def climb(pair: Pair) -> tuple[Runs, list[str], bool]:
    runs = Runs(pair)
    sections = (*forward.climb(runs).sections, *gradients.climb(runs).sections)
    failed = [comparison.tensor for section in sections for comparison in section.failures]
    return runs, failed, all(section.passed for section in sections)


def test_a_linen_model_is_compared_module_by_module() -> None:
    runs, failed, passed = climb(linen_pair())
    assert passed, failed
    reference, port = runs.reference("float64"), runs.port("float64")
    every = {f"blocks.{i}{inner}" for i in range(2) for inner in ("", ".dense", ".norm", ".drop")} | {"head"}
    assert runs.comparable(reference, port) == every
    assert not port.not_captured
    assert not runs.uncompared
    handed = runs.handed()
    np.testing.assert_allclose(handed.outputs["head"], reference.outputs["head"], rtol=1e-12)


def test_a_fault_inside_a_linen_model_is_seen_where_it_is() -> None:
    runs, failed, passed = climb(linen_pair(epsilon=1e-6))
    assert not passed
    assert failed[0] == "blocks.1.norm"
    handed, reference = runs.handed(), runs.reference("float64")
    same = {n: bool(np.allclose(handed.outputs[n], a, rtol=1e-12, atol=1e-14)) for n, a in reference.outputs.items()}
    assert [name for name, equal in same.items() if not equal] == ["blocks.1.norm"]


def test_linen_modules_inside_a_transformation_are_named() -> None:
    runs, failed, passed = climb(linen_pair(remat=True))
    assert passed, failed
    lost = runs.port("float64").not_captured
    assert {"blocks.0.dense", "blocks.1.norm"} <= lost.keys()
    assert all("a transformation" in why for why in lost.values())
    assert "head" in runs.port("float64").outputs


def test_without_example_arguments_modules_without_parameters_are_named() -> None:
    variables = Linen().init(jax.random.key(0), *EXAMPLE)
    trace = FlaxRunner(Side(build=lambda: from_linen(Linen(), variables)), precision="float64").trace(X, weights={})
    assert trace.not_captured.keys() == {"layers_0.Dropout_0", "layers_1.Dropout_0"}
    assert all("give from_linen example arguments" in why for why in trace.not_captured.values())
    assert "layers_0.Dense_0" in trace.outputs


def test_variables_are_of_the_kind_that_flax_gives_them_and_are_updated() -> None:
    module = from_linen(Linen(), rngs=jax.random.key(0), args=EXAMPLE)
    kinds = {".".join(map(str, path)): type(v) for path, v in nnx.to_flat_state(nnx.state(module))}
    assert kinds["layers_0.Dense_0.kernel"] is nnx.Param
    assert kinds["layers_0.BatchNorm_0.mean"] is nnx.BatchStat
    assert type(module.layers_0.Dense_0).__name__ == "Dense"
    x = jnp.asarray(X["x"], jnp.float32)
    module(x)
    assert not module.layers_0.BatchNorm_0.mean.get_value().any()
    module(x, train=True, rngs={"dropout": jax.random.key(1)})
    assert module.layers_0.BatchNorm_0.mean.get_value().all()


def test_linen_gives_what_it_gives_by_itself() -> None:
    variables = Linen().init(jax.random.key(0), *EXAMPLE)
    x = jnp.asarray(X["x"], jnp.float32)
    np.testing.assert_array_equal(from_linen(Linen(), variables)(x), Linen().apply(variables, x))


def apply(params: Any, x: Any) -> Any:
    for weight, bias in params["layers"]:
        x = jnp.tanh(x @ weight + bias)
    return {"out": x @ params["head"]}


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 6), torch.nn.Linear(6, 7)])
        self.head = torch.nn.Linear(7, 2, bias=False)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"out": self.head(x)}


def test_a_function_with_a_tree_of_parameters_is_compared() -> None:
    params = {"layers": [(jnp.ones((5, 6)), jnp.ones(6)), (jnp.ones((6, 7)), jnp.ones(7))], "head": jnp.ones((7, 2))}
    rules = (
        Rule("layers.{i}.weight", "layers.{i}.0", (Transpose(),)),
        Rule("layers.{i}.bias", "layers.{i}.1"),
        Rule("head.weight", "head", (Transpose(),)),
    )

    def pair(function: Any) -> Pair:
        return Pair(reference=Plain, port=lambda: from_function(function, params), inputs=X, mapping=rules)

    runs, failed, passed = climb(pair(apply))
    assert passed, failed
    assert runs.port("float64").gradients.keys() == {"layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1", "head"}
    assert runs.port("float64").not_captured.keys() == {"layers", "layers.0", "layers.1"}
    _, failed, passed = climb(pair(lambda params, x: apply(params, x * (1 + 1e-9))))
    assert not passed
    assert "output" in failed


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: from_linen(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), r"expected a flax\.linen\.Module, got Linear"),
        (lambda: from_linen(Linen()), "expected variables, or rngs and args to draw them with, got neither"),
        (
            lambda: from_linen(Linen(), {"params": {"a": jnp.ones(2)}, "cache": {"a": jnp.ones(2)}}),
            "expected one variable 'a', got one in cache besides",
        ),
        (lambda: from_function(apply, {"nothing": ()}), "expected a tree of parameters, got one without arrays"),
    ],
)
def test_what_cannot_be_adapted_is_an_error(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
