"""The harness on a pair of small models that are not our twins: it passes, fails, and locates."""

import dataclasses
import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from rich.console import Console

from parity import ladder, report
from parity.capture import PortRunner, run_reference
from parity.locate import MODEL
from parity.pair import Pair
from parity.rungs import forward
from parity.weights.mapping import MappingError, Rule, WeightMapping
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


def make_pair(port: type[nnx.Module] = Port, **changes: Any) -> Pair:
    torch.manual_seed(3)
    weights = {name: p.detach().numpy().copy() for name, p in Reference().named_parameters()}
    rng = np.random.default_rng(0)
    inputs = {"x": rng.normal(size=(3, 5)), "y": rng.normal(size=(3, 7))}

    def run(module: Any, inputs: Any) -> Any:
        x = inputs["x"].to(next(module.parameters()).dtype) if isinstance(module, torch.nn.Module) else inputs["x"]
        out = module(x)["out"]
        return out, ((out - inputs["y"]) ** 2).mean()

    pair = Pair(
        name="toy",
        build_reference=lambda precision: Reference().to(getattr(torch, precision)),
        build_port=lambda precision: port(nnx.Rngs(0), jnp.dtype(precision)),
        weights=weights,
        mapping=MAPPING,
        run_reference=run,
        run_port=run,
        batches=(inputs,),
    )
    return dataclasses.replace(pair, **changes)


@pytest.fixture(scope="module")
def equal() -> ladder.Report:
    return ladder.check(make_pair())


def test_an_equal_pair_passes(equal: ladder.Report) -> None:
    assert equal.passed, [rung for rung in equal.rungs if not rung.passed and rung.name != "zero gradients"]
    assert equal.first_difference is None
    assert equal.logits_identical.share == 1.0


def test_a_module_under_remat_is_seen() -> None:
    assert ladder.check(make_pair(PortWithRemat)).passed


def test_a_module_called_twice_is_recorded_twice() -> None:
    pair = make_pair()
    inputs = pair.batches[0]
    reference = run_reference(
        pair.build_reference("float64"), pair.run_reference, inputs, weights=pair.weights, precision="float64"
    )
    port = PortRunner(pair.build_port, pair.run_port, precision="float64")(pair.mapping.apply(pair.weights), inputs)
    assert list(reference.outputs) == ["first", "second", "second#2"]
    assert sorted(port.outputs) == ["first", "second", "second#2"]
    assert port.outputs["second#2"].dtype == np.float64


def test_an_activation_off_by_a_billionth_is_found_and_located() -> None:
    outcome = ladder.check(make_pair(PortWithAnotherActivation))
    assert not outcome.passed
    assert outcome.first_difference is not None
    # The activation is no module: it stands between two.
    assert outcome.first_difference.module == MODEL
    assert "between first, the last that is equal, and second" in outcome.first_difference.explanation


def test_the_float32_gate_is_skipped_after_a_float64_failure_and_does_not_pass() -> None:
    outcome = ladder.check(make_pair(PortWithAnotherActivation))
    skipped = [rung for rung in outcome.rungs if rung.precision == "float32"]
    assert skipped
    assert all(rung.compared == 0 and not rung.passed for rung in skipped)


def test_a_fault_that_only_float32_shows_is_found_whatever_the_further_runs() -> None:
    outcome = ladder.check(make_pair(PortThatIsOffInFloat32))
    verdicts = {(rung.name, rung.precision): rung.passed for rung in outcome.rungs}
    assert all(passed for (_, precision), passed in verdicts.items() if precision != "float32")
    assert not verdicts["outputs, logits and loss", "float32"]
    assert not outcome.passed
    assert outcome.first_difference is not None
    assert outcome.first_difference.module == "second"
    assert "equal in float64" in outcome.first_difference.explanation


def test_weights_are_moved_to_a_neighbour_at_most() -> None:
    weights = {"w": np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)}
    moved = ladder.moved_by_a_rounding(weights, seed=1)["w"]
    assert moved.dtype == np.float32
    steps = (moved.view(np.int32).astype(int) - weights["w"].view(np.int32)) * np.sign(weights["w"])
    assert sorted(np.unique(steps)) == [-1, 0, 1]
    assert not np.array_equal(moved, ladder.moved_by_a_rounding(weights, seed=2)["w"])


def test_a_module_that_inherits_its_call_is_recorded() -> None:
    class MyLinear(nnx.Linear):
        pass

    class Inheriting(Port):
        def __init__(self, rngs: nnx.Rngs, dtype: Any):
            self.first = MyLinear(5, 7, rngs=rngs, param_dtype=dtype)
            self.second = nnx.Linear(7, 7, rngs=rngs, param_dtype=dtype)

    before = nnx.Linear.__call__
    assert ladder.check(make_pair(Inheriting)).passed
    assert nnx.Linear.__call__ is before
    assert "__call__" not in MyLinear.__dict__


def test_scaled_logits_are_located_in_the_model_itself() -> None:
    class Scaled(Port):
        def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
            return {"out": super().__call__(x)["out"] * 1.001}

    outcome = ladder.check(make_pair(Scaled))
    assert not outcome.passed
    assert outcome.first_difference is not None
    assert outcome.first_difference.module == MODEL
    assert "every module is equal, the logits not" in outcome.first_difference.explanation


def test_a_fault_of_the_backward_pass_alone_is_located() -> None:
    class Stopped(Port):
        activation = staticmethod(lambda x: jnp.tanh(x) + 0.5 * (x - jax.lax.stop_gradient(x)))

    outcome = ladder.check(make_pair(Stopped))
    assert not outcome.passed
    assert outcome.first_difference is not None
    assert outcome.first_difference.module in ("second.kernel", "second.bias")
    assert "outputs are equal" in outcome.first_difference.explanation


def test_an_error_of_three_times_the_references_is_not_excused() -> None:
    """Well above the floor, on a tensor that every further run would have to make three times worse."""
    ours, theirs = {"x": 6e-6, "y": 1e-7}, {"x": 2e-6, "y": 1e-7}
    judged = list(forward.against_float64(ours, theirs))
    assert [c.passed for c in judged] == [False, True, False]
    further = [{"x": 2.2e-6, "y": 5e-6}, {"x": 2.9e-6, "y": 5e-6}]
    again = list(forward.judged_again(judged, further))
    assert [c.passed for c in again] == [False, True, False]
    assert again[1].bound == judged[1].bound, "what passed keeps its bound"
    excused = list(forward.judged_again(judged, [*further, {"x": 3.1e-6, "y": 0.0}]))
    assert [c.passed for c in excused] == [True, True, False], "the pooled error is not judged again"


def test_nan_fails() -> None:
    assert not ladder.check(make_pair(PortWithNaN)).passed


def test_a_module_that_the_port_does_not_call_fails_and_is_named() -> None:
    outcome = ladder.check(make_pair(PortThatSkipsAModule))
    assert not outcome.passed
    failures = {failure.tensor for rung in outcome.rungs for failure in rung.failures}
    assert "first" in failures


def test_weights_that_fit_nowhere_are_an_error_with_names() -> None:
    weights = dict(make_pair().weights)
    weights["frist.weight"] = weights.pop("first.weight")
    with pytest.raises(MappingError, match=r"frist\.kernel"):
        ladder.check(make_pair(weights=weights))


def test_a_missing_transpose_of_a_square_matrix_is_found() -> None:
    mapping = WeightMapping(
        [
            Rule("first.weight", "first.kernel", (Transpose(),)),
            Rule("second.weight", "second.kernel"),
            Rule("{layer}.bias", "{layer}.bias"),
        ]
    )
    outcome = ladder.check(make_pair(mapping=mapping))
    assert not outcome.passed
    assert outcome.first_difference is not None
    assert outcome.first_difference.module == "second"


def test_no_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        make_pair(batches=())


def test_report_as_json_and_as_a_table(equal: ladder.Report, tmp_path: Path) -> None:
    report.write_json(equal, tmp_path / "deep" / "report.json")
    values = json.loads((tmp_path / "deep" / "report.json").read_text())
    assert values["passed"] is True
    for rung in values["rungs"]:
        assert {"name", "passed", "precision", "worst"} <= rung.keys()
        assert {"tensor", "error", "bound"} == rung["worst"].keys()
    assert values["logits_identical"]["share"] == 1.0
    assert values["logits_identical"]["count"] == 21
    assert "max_units_in_the_last_place" in values["gradients_identical"]
    for distance in values["float32_distance_from_float64"].values():
        assert 0.0 < distance["port"] < 1e-6
        assert 0.0 < distance["reference"] < 1e-6
    assert {"versions", "platform", "jax_matmul_precision"} <= values["environment"].keys()
    out = StringIO()
    report.show(equal, console=Console(file=out, width=100))
    assert "The two are equal" in out.getvalue()


def test_a_failure_is_written_without_infinities(tmp_path: Path) -> None:
    outcome = ladder.check(make_pair(PortWithNaN))
    report.write_json(outcome, tmp_path / "report.json")
    values = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert values["passed"] is False
    out = StringIO()
    report.show(outcome, console=Console(file=out, width=100))
    assert "NOT EQUAL" in out.getvalue()
