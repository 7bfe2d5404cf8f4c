"""Training mode: dropout masks handed in and drawn, and what a training run leaves behind."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from torch.nn import functional

from parity.capture_flax import FlaxRunner
from parity.capture_torch import TorchRunner
from parity.pair import Pair, Side
from parity.rungs import NotComparedError
from parity.runs import Runs

RNG = np.random.default_rng(0)
X = {"x": RNG.normal(size=(40, 5)) * (RNG.random((40, 5)) < 0.5)}


class Reference(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.25)
        self.inner = torch.nn.ModuleDict({"lin": torch.nn.Linear(5, 6), "drop": torch.nn.Dropout(0.5, inplace=True)})
        self.never = torch.nn.Dropout(0.0)
        self.norm = torch.nn.BatchNorm1d(6)

    def forward(self, x: Any) -> Any:
        hidden = self.inner["drop"](self.inner["lin"](self.drop(x)))
        return self.norm(self.drop(self.never(hidden)))


class Inner(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.lin = nnx.Linear(5, 6, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.drop(self.lin(x))


class Port(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.inside = Inner(rngs)
        self.never = nnx.Dropout(0.0)
        self.norm = nnx.BatchNorm(6, momentum=0.9, epsilon=1e-5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        hidden = nnx.remat(lambda inside, x: inside(x))(self.inside, self.drop(x))
        return self.norm(self.drop(self.never(hidden)))


def pair(reference: Any = Reference, port: Any = lambda: Port(nnx.Rngs(0)), **changes: Any) -> Pair:
    return Pair(reference=reference, port=port, inputs=X, modules=(("inner", "inside"),), **changes)


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs(pair())


@pytest.mark.parametrize("side", ["reference", "port"])
def test_masks_are_drawn_by_the_framework_and_mean_the_same_to_both(runs: Runs, side: str) -> None:
    masks = runs.draw_masks(side, 3)
    assert {site: mask.shape for site, mask in masks.items()} == {
        "drop": (40, 5),
        "inner.drop": (40, 6),
        "drop#2": (40, 6),
    }
    assert all(mask.dtype == bool for mask in masks.values())
    assert abs(masks["drop"].mean() - 0.75) < 0.15
    assert masks["drop"][X["x"] == 0].mean() > 0.5, "an input of 0 does not look like one that was dropped"
    again, other = runs.draw_masks(side, 3), runs.draw_masks(side, 4)
    assert all((again[site] == mask).all() for site, mask in masks.items())
    assert any((other[site] != mask).any() for site, mask in masks.items())
    reference = runs.run_reference(X, "float64", masks=masks)
    port = runs.run_port(X, "float64", masks=masks)
    np.testing.assert_allclose(port.results["output"], reference.results["output"], rtol=1e-11, atol=1e-12)
    np.testing.assert_array_equal(reference.outputs["drop"], np.where(masks["drop"], X["x"] / 0.75, 0))
    assert port.outputs.keys() == {*reference.outputs, "inner"}, "a ModuleDict is not called, an nnx.Module is"


def test_other_masks_give_something_else(runs: Runs) -> None:
    masks = runs.draw_masks("reference", 3)
    masks["inner.drop"] = ~masks["inner.drop"]
    one = runs.run_reference(X, "float64", masks=runs.draw_masks("reference", 3)).results["output"]
    other = runs.run_port(X, "float64", masks=masks).results["output"]
    assert np.abs(one - other).max() > 0.1


@pytest.mark.parametrize("side", ["reference", "port"])
def test_masks_that_do_not_fit_are_an_error(runs: Runs, side: str) -> None:
    run = runs.run_reference if side == "reference" else runs.run_port
    masks = runs.draw_masks("reference", 0)
    with pytest.raises(ValueError, match=r"expected a dropout mask for drop#2, got masks for \['drop', 'in"):
        run(X, "float64", masks={site: mask for site, mask in masks.items() if site != "drop#2"})
    with pytest.raises(ValueError, match=r"drop: expected a dropout mask of shape \(40, 5\), got \(5,\)"):
        run(X, "float64", masks=masks | {"drop": masks["drop"][0]})
    with pytest.raises(ValueError, match=r"expected masks for the \w+'s dropout alone, got some for \['never'\]"):
        run(X, "float64", masks=masks | {"never": masks["drop"]})


def test_training_leaves_running_statistics_in_the_trace_and_the_model_as_it_was(runs: Runs) -> None:
    masks = runs.draw_masks("reference", 0)
    before = runs.run_reference(X, "float64")
    trained, port = runs.run_reference(X, "float64", masks=masks), runs.run_port(X, "float64", masks=masks)
    np.testing.assert_allclose(port.buffers["norm.mean"], trained.buffers["norm.running_mean"], rtol=1e-11)
    assert np.abs(trained.buffers["norm.running_mean"] - before.buffers["norm.running_mean"]).max() > 1e-4
    assert trained.buffers["norm.num_batches_tracked"] == 1
    module = runs.reference_runner.module("float64")
    assert not module.training
    assert module.norm.num_batches_tracked == 0
    again = runs.run_reference(X, "float64")
    np.testing.assert_array_equal(again.results["output"], before.results["output"])


def test_training_without_masks_drops_out_by_itself(runs: Runs) -> None:
    for run in (runs.run_reference, runs.run_port):
        plain, training = run(X, "float64").outputs["drop"], run(X, "float64", training=True).outputs["drop"]
        np.testing.assert_array_equal(plain, X["x"])
        assert ((training == 0) & (plain != 0)).any()


class Functional(torch.nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.lin = torch.nn.Linear(5, 6)
        self.alpha = torch.nn.AlphaDropout(0.5 if how == "alpha" else 0.0)
        self.lstm = torch.nn.LSTM(6, 6, 2, dropout=0.5 if how == "lstm" else 0.0)

    def forward(self, x: Any) -> Any:
        x = self.lin(x)
        if self.how == "function":
            return functional.dropout(x, 0.5, self.training)
        if self.how == "attention":
            q = x[None]
            return functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5 if self.training else 0.0)[0]
        return self.lstm(self.alpha(x))[0]


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("function", r"torch\.nn\.functional\.dropout"),
        ("attention", r"torch\.nn\.functional\.scaled_dot_product_attention"),
        ("alpha", "alpha, a AlphaDropout,"),
        ("lstm", "lstm"),
    ],
)
def test_torch_dropout_without_a_module_is_not_compared_and_says_so(how: str, name: str) -> None:
    runner = TorchRunner(Side(build=lambda: Functional(how)))
    before = functional.dropout
    with pytest.raises(NotComparedError, match=f"^{name} drops out outside"):
        runner.trace(X, weights=runner.weights(), precision="float64", masks={})
    with pytest.raises(NotComparedError, match=name):
        runner.draw_masks(X, 0)
    assert functional.dropout is before
    assert TorchRunner(Side(build=lambda: Functional("none"))).draw_masks(X, 0) == {}


def test_flax_random_numbers_without_a_dropout_module_are_not_compared() -> None:
    class Drawing(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.lin = nnx.Linear(5, 6, rngs=rngs)
            self.rngs = rngs

        def __call__(self, x: Any) -> Any:
            return self.lin(x) * jax.random.bernoulli(self.rngs.dropout(), 0.5, (40, 6))

    runner = FlaxRunner(Side(build=lambda: Drawing(nnx.Rngs(0))), precision="float64")
    with pytest.raises(NotComparedError, match="the port draws random numbers outside"):
        runner.trace(X, weights={}, masks={})


def test_a_side_with_its_own_dropout_is_given_the_masks_by_its_own_names() -> None:
    class Own(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.lin = nnx.Linear(5, 6, rngs=rngs)

    def draw(module: Any, inputs: Any, seed: int) -> Any:
        return {"mine": jax.random.bernoulli(jax.random.key(seed), 0.5, (40, 6))}

    side = Side(
        build=lambda: Own(nnx.Rngs(0)),
        call=lambda module, inputs: module.lin(inputs["x"]),
        draw_dropout=draw,
        call_with_dropout=lambda module, inputs, masks: module.lin(inputs["x"]) * masks["mine"],
    )
    runner = FlaxRunner(side, precision="float64")
    masks = runner.draw_masks(X, 5)
    trace = runner.trace(X, weights={}, masks=masks)
    np.testing.assert_array_equal(trace.results["output"], trace.outputs["lin"] * masks["mine"])

    class TorchOwn(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(5, 6)

    torch_side = Side(
        build=TorchOwn,
        call=lambda module, inputs: module.lin(inputs["x"]),
        draw_dropout=lambda module, inputs, seed: {"mine": torch.ones(40, 6, dtype=torch.bool)},
        call_with_dropout=lambda module, inputs, masks: module.lin(inputs["x"]) * masks["mine"],
    )
    reference = TorchRunner(torch_side)
    assert reference.draw_masks(X, 5)["mine"].all()
    trace = reference.trace(X, weights=reference.weights(), precision="float64", masks=masks)
    np.testing.assert_array_equal(trace.results["output"], trace.outputs["lin"] * masks["mine"])


def test_a_side_that_is_neither_is_an_error(runs: Runs) -> None:
    with pytest.raises(ValueError, match="expected 'reference' or 'port', got 'flax'"):
        runs.draw_masks("flax", 0)
