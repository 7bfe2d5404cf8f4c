"""What is recorded of a run, on either side alone: calls, methods, transformations, sums, casts, dropout masks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity.capture_flax import FlaxRunner
from parity.capture_torch import TorchRunner
from parity.pair import Side
from parity.trace import Trace, leaves, module_of

X = {"x": np.random.default_rng(0).normal(size=(3, 4, 5))}


def torch_trace(module: torch.nn.Module, inputs: Any = X, **options: Any) -> Trace:
    runner = TorchRunner(Side(build=lambda: module))
    rng = np.random.default_rng(1)
    weights = {name: 0.5 * rng.normal(size=array.shape) for name, array in runner.weights().items()}
    return runner.trace(inputs, weights=weights, precision="float64", **options)


def flax_trace(build: Any, inputs: Any = X, **options: Any) -> Trace:
    return FlaxRunner(Side(build=lambda: build(nnx.Rngs(0))), precision="float64").trace(inputs, weights={}, **options)


@dataclasses.dataclass
class Answer:
    hidden: Any
    scores: Any


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Table()
        self.shift = Shift()
        self.silent = Silent()
        self.unused = torch.nn.Linear(5, 2)

    def encode(self, x: Any, *, scale: Any) -> Any:
        return self.shift(x * scale)

    def forward(self, x: Any) -> Any:
        hidden = self.encode(x, scale=2.0)
        self.silent(shared=self.embed, x=hidden)
        return Answer(hidden=hidden, scores=(self.embed.scores(hidden), self.embed.scores(x=hidden)))


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(7, 5))

    def scores(self, x: Any) -> Any:
        return x @ self.weight.T

    def number_of_rows(self) -> int:
        return 7


class Shift(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x.add_(1.0)


class Silent(torch.nn.Module):
    def forward(self, x: Any, shared: Any) -> None:
        shared.number_of_rows()


def test_torch_calls_through_methods_in_place_and_without_a_result() -> None:
    module = Model()
    trace = torch_trace(module)
    assert list(trace.outputs) == ["shift", ":encode", "embed:scores", "embed:scores#2"]
    np.testing.assert_array_equal(trace.given["shift"], 2 * X["x"])
    np.testing.assert_array_equal(trace.outputs["shift"], 2 * X["x"] + 1)
    assert {"silent", "embed:scores", "embed:scores#2"} <= trace.given.keys()
    assert list(trace.results) == ["output[hidden]", "output[scores.0]", "output[scores.1]"]
    assert not (trace.gradients["unused.weight"] != 0).any()
    assert "encode" not in vars(module)
    assert "scores" not in vars(module.embed)


class FlaxTable(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.weight = nnx.Param(rngs.normal((7, 5)))

    def scores(self, x: Any) -> Any:
        return x @ self.weight.T


class FlaxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = FlaxTable(rngs)
        self.table = nnx.Embed(6, 5, rngs=rngs)

    def encode(self, x: Any, *, scale: Any) -> Any:
        return x * scale

    def __call__(self, x: Any) -> Any:
        hidden = self.encode(x, scale=2.0)
        scores = nnx.remat(lambda embed, x: embed.scores(x))(self.embed, hidden)
        return Answer(hidden=hidden, scores=(scores, self.embed.scores(x=hidden), self.table.attend(hidden)))


def test_flax_calls_through_methods() -> None:
    before = dict(vars(FlaxTable))
    trace = flax_trace(FlaxModel)
    assert list(trace.outputs) == [":encode", "embed:scores", "embed:scores#2", "table:attend"]
    np.testing.assert_array_equal(trace.given["embed:scores"], 2 * X["x"])
    np.testing.assert_array_equal(trace.given["embed:scores#2"], 2 * X["x"])
    assert list(trace.results) == ["output[hidden]", "output[scores.0]", "output[scores.1]", "output[scores.2]"]
    assert dict(vars(FlaxTable)) == before
    assert not trace.not_captured


def test_a_module_that_is_handed_around_is_no_value() -> None:
    @dataclasses.dataclass
    class Module:  # as either framework's are called
        weight: int

    assert leaves([Module(3), {"a": 1}, Answer(2, 5)], lambda x: isinstance(x, int)) == [
        ("[1.a]", 1),
        ("[2.hidden]", 2),
        ("[2.scores]", 5),
    ]


class Inner(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.lin = nnx.Linear(5, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.lin(x))


@nnx.split_rngs(splits=2)
@nnx.vmap(in_axes=0, out_axes=0)
def stack_of(rngs: nnx.Rngs) -> Inner:
    return Inner(rngs)


def scanned(axes: Any) -> Any:
    return nnx.scan(lambda layer, x: layer(x), in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)


def plain_scan(layers: Inner, x: Any) -> Any:
    graph, state = nnx.split(layers)
    return jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x, state)[0]


LAYERS = {"layers.0.lin", "layers.0", "layers.1.lin", "layers.1"}
ONE = {"one.lin", "one"}
WAYS: dict[str, tuple[Any, set[str], str]] = {
    "nnx.scan": (lambda m, x: scanned(0)(m.layers, x), LAYERS, ""),
    "nnx.vmap": (
        lambda m, x: nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(m.layers, x).sum(0),
        LAYERS,
        "",
    ),
    "nnx.remat twice": (
        lambda m, x: (f := nnx.remat(lambda layer, x: layer(x)))(m.one, f(m.one, x)),
        ONE | {"one.lin#2", "one#2"},
        "",
    ),
    "nnx.jit": (lambda m, x: nnx.jit(lambda layer, x: layer(x))(m.one, x), ONE, ""),
    "nnx.scan that keeps all but parameters": (
        lambda m, x: scanned(nnx.StateAxes({nnx.Param: 0, ...: None}))(m.layers, x),
        set(),
        "keeps its values",
    ),
    "nnx.scan that refuses all but parameters": (
        lambda m, x: scanned(nnx.StateAxes({nnx.Param: 0}))(m.layers, x),
        set(),
        "out of which its values do not come",
    ),
    "jax.lax.scan": (lambda m, x: plain_scan(m.layers, x), set(), "keeps its values"),
    "jax.vmap": (lambda m, x: jax.vmap(m.one)(x), set(), "a transformation of jax itself"),
    "jax.checkpoint": (lambda m, x: jax.checkpoint(m.one)(x), set(), "a transformation of jax itself"),
}


@pytest.mark.parametrize("way", WAYS)
def test_inside_transformations_what_can_be_is_recorded_and_the_rest_named(way: str) -> None:
    run, expected, reason = WAYS[way]

    class Outer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = stack_of(rngs)
            self.one = Inner(rngs)
            self.head = nnx.Linear(5, 2, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.head(run(self, x))

    trace = flax_trace(Outer)
    assert set(trace.outputs) == expected | {"head"}
    assert {array.shape for name, array in trace.outputs.items() if name != "head"} <= {(3, 4, 5)}
    inner = "layers" if "scan" in way else "one"
    assert set(trace.not_captured) == ({inner, f"{inner}.lin"} if reason else set())
    assert all(reason in why for why in trace.not_captured.values())
    assert trace.gradients["head.kernel"].any()


def test_a_model_that_cannot_be_watched_is_run_unwatched_and_says_so() -> None:
    class Stacking(nnx.Module):
        """Stacks its layers at each call: their structures must be equal, which the harness's paths are not."""

        def __init__(self, rngs: nnx.Rngs):
            self.layers = nnx.List([nnx.Linear(5, 5, rngs=rngs), nnx.Linear(5, 5, rngs=rngs)])

        def __call__(self, x: Any) -> Any:
            layers = jax.tree.map(lambda *arrays: jnp.stack(arrays), *self.layers)
            graph, state = nnx.split(layers)
            return jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x, state)[0]

    trace = flax_trace(Stacking)
    assert trace.results["output"].shape == (3, 4, 5)
    assert not trace.outputs
    assert trace.not_captured.keys() >= {"layers.0", "layers.1"}


def test_what_fails_unwatched_too_is_the_models_own_error() -> None:
    class Broken(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.lin = nnx.Linear(5, 2, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            raise ZeroDivisionError("the model's own")

    with pytest.raises(ZeroDivisionError, match="the model's own"):
        flax_trace(Broken)


def test_nothing_returned_is_an_error() -> None:
    class Empty(torch.nn.Module):
        def forward(self, x: Any) -> None:
            return None

    class FlaxEmpty(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.lin = nnx.Linear(5, 2, rngs=rngs)

        def __call__(self, x: Any) -> None:
            return None

    with pytest.raises(ValueError, match="expected the reference to return floating-point tensors, got NoneType"):
        torch_trace(Empty())
    with pytest.raises(ValueError, match="expected the port to return floating-point arrays, got NoneType"):
        flax_trace(FlaxEmpty)


class Zeros(torch.nn.Module):
    """A bias before each of several places that do not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(6, 2, batch_first=True)
        self.conv = torch.nn.Conv1d(6, 8, 3)
        self.each = torch.nn.GroupNorm(8, 8)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: Any) -> Any:
        x, _ = self.attention(x, x, x)
        x = self.norm(self.each(self.conv(x.mT)).mT)
        return (x - x.mean(1, keepdim=True)) ** 3


def test_sums_behind_the_gradients_of_biases_show_which_are_zero() -> None:
    x = {"x": np.random.default_rng(0).normal(size=(3, 7, 6))}
    trace = torch_trace(Zeros(), x)
    keys = slice(6, 12)
    assert np.abs(trace.gradients["attention.in_proj_bias"][keys]).max() < 1e-13
    assert np.abs(trace.gradients["attention.in_proj_bias"][:6]).min() > 1e-6
    for name in ("attention.in_proj_bias", "conv.bias", "norm.bias", "each.bias", "attention.out_proj.bias"):
        assert trace.summed[name].shape == trace.gradients[name].shape
        assert (trace.summed[name] > 1e-4).all()
        assert (np.abs(trace.gradients[name]) <= trace.summed[name] * (1 + 1e-12)).all()
    for name in ("conv.bias", "norm.bias"):
        assert (np.abs(trace.gradients[name]) < 1e-13 * trace.summed[name].max()).all()


def test_the_encoders_fast_path_is_off_while_capturing_and_as_before_afterwards() -> None:
    layer = torch.nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    padding = np.array([[0, 0, 0, 1], [0, 0, 1, 1]], bool)
    inputs = {"x": np.random.default_rng(0).normal(size=(2, 4, 6)), "padding": padding}
    runner = TorchRunner(
        Side(
            build=lambda: torch.nn.TransformerEncoder(layer, 2),
            call=lambda module, given: module(given["x"], src_key_padding_mask=given["padding"]),
        )
    )
    weights = runner.weights()
    plain, fast = (runner.results(inputs, weights=weights, fast_path=on)["output"] for on in (False, True))
    tapped = runner.trace(inputs, weights=weights, precision="float64")
    assert "layers.0.linear1" in tapped.outputs
    np.testing.assert_allclose(tapped.results["output"], plain, rtol=1e-12)
    np.testing.assert_allclose(fast[~padding], plain[~padding], rtol=1e-10)
    assert np.abs(fast[padding] - plain[padding]).max() > 0.1
    assert torch.backends.mha.get_fastpath_enabled()


def test_handed_inputs_replace_the_models_own_by_position_where_shapes_are_equal() -> None:
    class Two(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(5, 6, rngs=rngs)
            self.second = Add(rngs)

        def __call__(self, x: Any) -> Any:
            x = self.first(x)
            x = nnx.remat(lambda layer, x: layer(x, y=2 * x))(self.second, x)
            return self.second(y=x, x=x, scale=0.5)

    class Add(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.lin = nnx.Linear(6, 6, rngs=rngs)

        def __call__(self, x: Any, y: Any, scale: float = 1.0) -> Any:
            return scale * self.lin(x) + y

    plain = flax_trace(Two)
    new = {n: [np.full((3, 4, 6), float(i)), np.full((3, 4, 6), 7.0)] for i, n in enumerate(("second", "second#2"))}
    handed = flax_trace(Two, handed=new | {"first": [np.zeros((3, 4, 9))], "nobody": [np.zeros(3)]})
    bias = handed.outputs["second.lin"][0, 0]
    np.testing.assert_allclose(handed.outputs["second"], np.broadcast_to(bias + 7, (3, 4, 6)))
    np.testing.assert_array_equal(handed.outputs["first"], plain.outputs["first"], "another shape is left as is")
    np.testing.assert_array_equal(handed.given["second[1]"], plain.given["second[1]"])
    np.testing.assert_array_equal(handed.given["second#2[0]"], handed.outputs["second"])
    np.testing.assert_array_equal(handed.given["second.lin#2"], 1.0)


def test_module_of() -> None:
    assert module_of("layers.0:attend#2[1]") == "layers.0"
    assert module_of(":encode") == ""
