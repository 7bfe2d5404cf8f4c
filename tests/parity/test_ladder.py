"""The harness on a pair of small models that are not our twins: it passes, fails, and locates."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity import ladder
from parity.pair import Pair, Side
from parity.rungs import float32
from parity.rungs.gradients import float64_bounds, floors
from parity.runs import Runs, moved_by_a_rounding
from parity.tolerances import FLOAT32, FLOAT64_RELATIVE
from parity.weights.mapping import Rule, WeightMapping
from parity.weights.rules import Transpose

MAPPING = WeightMapping(
    [
        Rule("{layer}.weight", "{layer}.kernel", (Transpose(),)),
        Rule("{layer}.bias", "{layer}.bias"),
    ]
)


class Reference(torch.nn.Module):
    """Two layers, the second called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.second = torch.nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x))
        return {"out": self.second(x)}


class Port(nnx.Module):
    """Its twin."""

    activation: Callable[[jax.Array], jax.Array] = staticmethod(jnp.tanh)

    def __init__(self, rngs: nnx.Rngs, dtype: Any):
        self.first = nnx.Linear(5, 7, rngs=rngs, param_dtype=dtype)
        self.second = nnx.Linear(7, 7, rngs=rngs, param_dtype=dtype)

    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        x = self.activation(self.first(x))
        x = self.activation(self.second(x))
        return {"out": self.second(x)}


class PortWithRemat(Port):
    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        x = nnx.remat(lambda layer, x: jnp.tanh(layer(x)))(self.first, x)
        x = jnp.tanh(self.second(x))
        return {"out": self.second(x)}


class PortThatSkipsAModule(Port):
    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        x = jnp.tanh(x @ self.first.kernel[...] + self.first.bias[...])
        x = jnp.tanh(self.second(x))
        return {"out": self.second(x)}


class PortWithAnotherActivation(Port):
    activation = staticmethod(lambda x: jnp.tanh(x) + 1e-9 * x)


class PortThatIsOffInFloat32(Port):
    activation = staticmethod(lambda x: jnp.tanh(x) * (1.0 + (1e-5 if x.dtype == jnp.float32 else 0.0)))


class PortWithNaN(Port):
    activation = staticmethod(lambda x: jnp.where(x > 100.0, jnp.nan, jnp.tanh(x)).at[0, 0].set(jnp.nan))


CORE = ("inventory", "weights", "forward", "loss", "gradients")


def make_pair(port: type[nnx.Module] = Port, **changes: Any) -> Pair:
    torch.manual_seed(3)
    weights = {name: p.detach().numpy().copy() for name, p in Reference().named_parameters()}
    rng = np.random.default_rng(0)
    inputs = {"x": rng.normal(size=(3, 5)), "y": rng.normal(size=(3, 7))}

    def call(module: Any, inputs: Any) -> Any:
        return module(inputs["x"])

    def loss(output: Any, inputs: Any) -> Any:
        return ((output["out"] - inputs["y"]) ** 2).mean()

    pair = Pair(
        name="toy",
        reference=Side(build=Reference, call=call, loss=loss),
        port=Side(build=lambda precision: port(nnx.Rngs(0), jnp.dtype(precision)), call=call, loss=loss),
        weights=weights,
        mapping=MAPPING,
        inputs=inputs,
    )
    return dataclasses.replace(pair, **changes)


def check(pair: Pair, **options: Any) -> ladder.Report:
    return ladder.check(pair, rungs=CORE, **options)


@pytest.fixture(scope="module")
def equal() -> ladder.Report:
    return check(make_pair())


def test_an_equal_pair_passes(equal: ladder.Report) -> None:
    assert equal.passed, equal.failed
    assert equal.first_difference is None
    assert equal.results_identical.share == 1.0
    assert [rung.name for rung in equal.rungs if rung.passed] == list(CORE)
    assert len(equal.rungs) == 17
    assert all(rung.skipped == "left out on request" for rung in equal.skipped)


def test_a_module_under_remat_is_seen() -> None:
    assert check(make_pair(PortWithRemat)).passed


def test_a_module_called_twice_is_recorded_twice() -> None:
    runs = Runs(make_pair())
    assert list(runs.reference("float64").outputs) == ["first", "second", "second#2"]
    assert sorted(runs.port("float64").outputs) == ["first", "second", "second#2"]
    assert runs.port("float64").outputs["second#2"].dtype == np.float64


def test_an_activation_off_by_a_billionth_is_found_and_located() -> None:
    outcome = check(make_pair(PortWithAnotherActivation))
    assert not outcome.passed
    assert outcome.first_difference is not None
    # The activation is no module: it stands between two.
    assert "between first, the last that is equal, and second" in str(outcome.first_difference)


def test_float32_is_not_compared_after_a_float64_failure_nor_is_what_comes_after() -> None:
    outcome = check(make_pair(PortWithAnotherActivation))
    forward = outcome.rung("forward")
    assert forward.status == "failed"
    assert {section.precision for section in forward.outcome.sections} == {"float64"}
    assert [rung.status for rung in outcome.rungs if rung.name in ("loss", "gradients")] == ["not reached"] * 2


def test_without_an_explanation_it_still_fails() -> None:
    outcome = check(make_pair(PortWithAnotherActivation), explain=False)
    assert not outcome.passed
    assert outcome.failed
    assert outcome.first_difference is None
    assert outcome.diagnosis is None


def test_with_keep_going_the_later_rungs_are_climbed_too() -> None:
    outcome = check(make_pair(PortWithAnotherActivation), keep_going=True)
    assert [rung.name for rung in outcome.failed] == ["forward", "loss", "gradients"]


def test_a_fault_that_only_float32_shows_is_found_whatever_the_further_runs() -> None:
    outcome = check(make_pair(PortThatIsOffInFloat32), keep_going=True)
    failed = {(r.name, s.precision) for r in outcome.rungs for s in r.outcome.sections if not s.passed}
    assert {precision for _, precision in failed} == {"float32"}
    assert ("forward", "float32") in failed
    assert outcome.first_difference is not None
    assert outcome.first_difference.module == "second"
    assert "equal in float64" in str(outcome.first_difference)


def test_weights_are_moved_to_a_neighbour_at_most() -> None:
    weights = {"w": np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)}
    moved = moved_by_a_rounding(weights, seed=1)["w"]
    assert moved.dtype == np.float32
    steps = (moved.view(np.int32).astype(int) - weights["w"].view(np.int32)) * np.sign(weights["w"])
    assert sorted(np.unique(steps)) == [-1, 0, 1]
    assert not np.array_equal(moved, moved_by_a_rounding(weights, seed=2)["w"])


def test_a_module_that_inherits_its_call_is_recorded() -> None:
    class MyLinear(nnx.Linear):
        pass

    class Inheriting(Port):
        def __init__(self, rngs: nnx.Rngs, dtype: Any):
            self.first = MyLinear(5, 7, rngs=rngs, param_dtype=dtype)
            self.second = nnx.Linear(7, 7, rngs=rngs, param_dtype=dtype)

    before = nnx.Linear.__call__
    assert check(make_pair(Inheriting)).passed
    assert nnx.Linear.__call__ is before
    assert "__call__" not in MyLinear.__dict__


def test_scaled_logits_are_located_in_the_model_itself() -> None:
    class Scaled(Port):
        def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
            return {"out": super().__call__(x)["out"] * 1.001}

    outcome = check(make_pair(Scaled))
    assert not outcome.passed
    assert outcome.first_difference is not None
    assert "every module is equal" in str(outcome.first_difference)


def test_a_fault_of_the_backward_pass_alone_is_located() -> None:
    class Stopped(Port):
        activation = staticmethod(lambda x: jnp.tanh(x) + 0.5 * (x - jax.lax.stop_gradient(x)))

    outcome = check(make_pair(Stopped))
    assert not outcome.passed
    assert outcome.first_difference is not None
    assert outcome.first_difference.module in ("second.kernel", "second.bias")
    assert "outputs are equal" in outcome.first_difference.explanation


def test_an_error_of_three_times_the_references_is_not_excused() -> None:
    """Well above the floor, on a tensor that every further run would have to make three times worse."""
    ours, theirs = {"x": 6e-6, "y": 1e-7}, {"x": 2e-6, "y": 1e-7}
    judged = list(float32.against_float64(ours, theirs, rule=FLOAT32))
    assert [c.passed for c in judged] == [False, True, False]
    further = [{"x": 2.2e-6, "y": 5e-6}, {"x": 2.9e-6, "y": 1e-7}]
    again = list(float32.judged_again(judged, further, rule=FLOAT32))
    assert [c.passed for c in again] == [False, True, True]
    assert again[1].bound == judged[1].bound, "what passed keeps its bound"
    assert again[2].bound == pytest.approx(2 * np.sqrt((2.2e-6**2 + 5e-6**2) / 2)), "pooled over a run"
    alike = [{"x": 2.1e-6, "y": 1e-7}] * 8
    assert [c.passed for c in float32.judged_again(judged, alike, rule=FLOAT32)] == [False, True, False]
    excused = list(float32.judged_again(judged, [*further, {"x": 3.1e-6, "y": 0.0}], rule=FLOAT32))
    assert [c.passed for c in excused] == [True, True, True]


def test_a_floor_of_its_own_excuses_one_tensor_and_hardly_the_pool() -> None:
    ours, theirs = {"x": 6e-5, **dict.fromkeys("abcdefgh", 1e-7)}, dict.fromkeys("xabcdefgh", 1e-7)
    judged = {c.tensor: c for c in float32.against_float64(ours, theirs, rule=FLOAT32, floors={"x": 7e-5})}
    assert judged["x"].passed
    assert judged["x"].bound == 7e-5
    assert judged["a"].bound == FLOAT32.floor
    assert judged[float32.POOLED].bound == pytest.approx(np.sqrt(7e-5**2 + 8 * FLOAT32.floor**2) / 9)
    assert not judged[float32.POOLED].passed


def test_small_gradients_are_judged_beside_the_others() -> None:
    gradients = {"large": np.full(100, 1.0), "small": np.full(4, 5e-4)}
    bounds = float64_bounds(gradients, {"large": 3e-7})
    assert bounds["large"] == 3e-7
    assert bounds["small"] == pytest.approx(16 * 2**-53 * 10.0 / 1e-3, rel=1e-6)
    assert bounds["small"] > FLOAT64_RELATIVE
    assert floors({"none": np.zeros(3)}, "float32") == {"none": 0.0}


def test_nan_fails() -> None:
    assert not check(make_pair(PortWithNaN)).passed


def test_a_module_that_the_port_does_not_call_fails_and_is_named() -> None:
    outcome = check(make_pair(PortThatSkipsAModule))
    assert not outcome.passed
    failures = {failure.tensor for rung in outcome.rungs for failure in rung.failures}
    assert "first" in failures


def test_weights_that_fit_nowhere_fail_the_inventory_by_name() -> None:
    weights = dict(make_pair().weights or {})
    weights["frist.weight"] = weights.pop("first.weight")
    outcome = check(make_pair(weights=weights))
    assert [rung.name for rung in outcome.failed] == ["inventory"]
    assert any("frist.kernel" in failure.detail for failure in outcome.failed[0].failures)
    assert all(rung.status == "not reached" for rung in outcome.rungs if rung.name in CORE[1:])


def test_a_missing_transpose_of_a_square_matrix_is_found() -> None:
    mapping = WeightMapping(
        [
            Rule("first.weight", "first.kernel", (Transpose(),)),
            Rule("second.weight", "second.kernel"),
            Rule("{layer}.bias", "{layer}.bias"),
        ]
    )
    outcome = check(make_pair(mapping=mapping))
    assert not outcome.passed
    assert outcome.first_difference is not None
    assert outcome.first_difference.module == "second"


def test_no_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        make_pair(inputs=())


def test_an_unknown_rung_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"expected rungs among .*forward.*, got fowrard"):
        ladder.check(make_pair(), rungs=("fowrard",))
