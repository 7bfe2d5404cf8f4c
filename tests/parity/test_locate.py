"""Where two small models first differ, by following the values and by handing over the reference's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity import ladder
from parity.diagnose import Diagnosis, diagnose_case, suspect
from parity.diagnose.by_rung import MODEL
from parity.locate import Found, follow_and_hand
from parity.pair import Pair
from parity.runs import Runs
from parity.trace import Trace
from tests.parity.residual_blocks import DEPTH, WIDTH, Block, Model, norm_eps, pair, reclass


@pytest.fixture(scope="module")
def reference() -> Trace:
    return Runs(pair()).reference("float64")


def located(reference: Trace, *faults: Callable[[Model], None]) -> tuple[Found, Diagnosis | None]:
    runs = Runs(pair(*faults))
    runs._traces["reference", "float64", 0] = reference
    port = runs.port("float64")
    found = follow_and_hand(runs, reference, port, runs.batches[0], handed=runs.handed)
    assert found is not None
    return found, None if found.case is None else diagnose_case(found.case)


@pytest.mark.parametrize("i", range(DEPTH))
def test_a_module_at_every_place(reference: Trace, i: int) -> None:
    found, diagnosis = located(reference, norm_eps(i))
    assert found.location.module == f"blocks.{i}.norm"
    assert found.location.handed == (f"blocks.{i}.norm",)
    assert found.location.agree
    assert found.location.persists
    assert diagnosis is not None
    assert diagnosis.kind == "norm eps"


def test_a_fault_between_submodules_is_the_fault_of_the_module_around_them(reference: Trace) -> None:
    def tanh_form(self: Any, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(self.norm(x)), approximate=True))

    found, diagnosis = located(reference, lambda model: reclass(model.blocks[1], inner=tanh_form))
    assert found.location.module == "blocks.1"
    expected = "between blocks.1.up, the last that is equal, and blocks.1.down, which is given something else"
    assert found.location.explanation == expected
    assert found.location.handed == ("blocks.1",)
    assert diagnosis is not None
    assert diagnosis.kind == "gelu approximation"


def test_a_residual_that_is_missing(reference: Trace) -> None:
    def without(self: Any, x: jax.Array, keep: jax.Array) -> jax.Array:
        return self.inner(x) * keep[..., None]

    found, _ = located(reference, lambda model: reclass(model.blocks[2], __call__=without))
    assert found.location.module == "blocks.2"
    assert found.location.agree


def test_between_modules_of_the_model_itself(reference: Trace) -> None:
    def scaled(self: Any, ids: jax.Array) -> jax.Array:
        x = self.embed(ids) * WIDTH**0.5
        x = x + self.side(x)[:, :1]
        for block in self.blocks:
            x = block(x, ids != 0)
        return self.head(x)

    found, diagnosis = located(reference, lambda model: reclass(model, __call__=scaled))
    assert found.location.module == MODEL
    assert "between embed, the last that is equal, and side" in found.location.explanation
    assert found.location.handed[0] == MODEL
    assert diagnosis is not None
    assert diagnosis.kind == "embedding scale doubled"


def test_a_mask_that_is_handed_on_otherwise_is_not_the_fault_of_who_is_given_it(reference: Trace) -> None:
    def inverted(self: Any, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        x = x + self.side(x)[:, :1]
        for block in self.blocks:
            x = block(x, ids == 0)
        return self.head(x)

    found, diagnosis = located(reference, lambda model: reclass(model, __call__=inverted))
    assert found.location.module == MODEL
    assert diagnosis is not None
    assert diagnosis.kind == "mask inverted"


def test_two_faults_at_once_are_both_found_by_handing(reference: Trace) -> None:
    found, _ = located(reference, norm_eps(0), norm_eps(2))
    assert found.location.module == "blocks.0.norm"
    assert found.location.handed == ("blocks.0.norm", "blocks.2.norm")
    assert any("blocks.2.norm" in sentence for sentence in found.location.sentences)


def test_a_module_that_is_not_called(reference: Trace) -> None:
    def skipping(self: Any, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        x = x + self.side(x)[:, :1]
        for i in (0, 2):
            x = self.blocks[i](x, ids != 0)
        return self.head(x)

    found, _ = located(reference, lambda model: reclass(model, __call__=skipping))
    assert found.location.module == "blocks.1"
    assert found.location.explanation == "the port does not call it"
    assert not found.called
    report = ladder.check(pair(lambda model: reclass(model, __call__=skipping)), rungs=("weights", "forward"))
    assert report.diagnosis is not None
    assert report.diagnosis.kind == "layer skipped"


def test_a_spike_is_told_from_a_step(reference: Trace) -> None:
    """Only the first position of `side` is used: what differs elsewhere does not reach the output."""

    def off_behind_the_first(self: Any, x: jax.Array) -> jax.Array:
        y = nnx.Linear.__call__(self, x)
        return y.at[:, 1:].add(1.0)

    found, _ = located(reference, lambda model: reclass(model.side, __call__=off_behind_the_first))
    assert found.location.module == "side"
    assert found.location.persists is False
    assert any("vanished" in sentence for sentence in found.location.sentences)


def test_a_gradient_alone_is_located_at_the_parameter_nearest_to_the_loss() -> None:
    def stopped(self: Any, x: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(nnx.Linear.__call__(self, x))

    wrong = pair(lambda model: reclass(model.blocks[1].up, __call__=stopped))
    report = ladder.check(wrong, rungs=("weights", "forward", "gradients"))
    assert report.first_difference is not None
    assert report.first_difference.module == "blocks.1.up"
    assert "outputs are equal" in report.first_difference.explanation
    assert "blocks.1.up." in report.first_difference.explanation, "a parameter of it is the nearest to the loss"
    assert report.diagnosis is not None
    assert report.diagnosis.kind == "gradient stopped"
    marked = [node.path for node in report.tree if node.status == "first difference"]
    assert marked == ["blocks.1.up"]


def test_a_gradient_that_is_cut_in_two_places_or_scaled_is_located_by_cutting_the_references() -> None:
    @jax.custom_vjp
    def doubled(x: jax.Array) -> jax.Array:
        return x

    doubled.defvjp(lambda x: (x, None), lambda _, g: (2.0 * g,))

    def cut(self: Any, x: jax.Array, keep: jax.Array) -> jax.Array:
        return x + jax.lax.stop_gradient(self.inner(x)) * keep[..., None]

    def scaled(self: Any, x: jax.Array, keep: jax.Array) -> jax.Array:
        return Block.__call__(self, doubled(x), keep)

    def both(model: Model) -> None:
        reclass(model.blocks[0], __call__=cut)
        reclass(model.blocks[2], __call__=cut)

    core = ("weights", "forward", "gradients")
    report = ladder.check(pair(both), rungs=core)
    assert report.first_difference is not None
    assert report.first_difference.module == "blocks.2.down"
    assert report.diagnosis is not None
    assert report.diagnosis.kind == "gradient stopped"
    assert "what blocks.2.down returns, and through what blocks.0.down returns" in report.diagnosis.sentence
    report = ladder.check(pair(lambda model: reclass(model.blocks[1], __call__=scaled)), rungs=core)
    assert report.first_difference is not None
    assert report.first_difference.module in ("blocks.1", "blocks.0"), "what one returns, the other is given"
    assert report.diagnosis is not None
    assert report.diagnosis.kind == "gradient scaled"
    assert "2 times" in report.diagnosis.sentence


def test_a_low_precision_in_float32_alone_is_located() -> None:
    def narrow(self: Any, x: jax.Array) -> jax.Array:
        y = nnx.Linear.__call__(self, x)
        return y if y.dtype == jnp.float64 else y.astype(jnp.bfloat16).astype(y.dtype)

    report = ladder.check(
        pair(lambda model: reclass(model.blocks[0].up, __call__=narrow)), rungs=("weights", "forward")
    )
    assert report.first_difference is not None
    assert report.first_difference.module == "blocks.0.up"
    assert "float32" in report.first_difference.explanation
    assert report.diagnosis is not None
    assert report.diagnosis.kind == "low precision product"


def test_what_hard_inputs_alone_show_is_located_within_their_run() -> None:
    def wrong_where_nothing_is_kept(self: Any, x: jax.Array, keep: jax.Array) -> jax.Array:
        empty = ~keep.any(axis=1)[:, None, None]
        return jnp.where(empty, x + 1.0, Block.__call__(self, x, keep))

    hard = {"rows of padding only": {"ids": np.zeros((2, 4), int)}}
    wrong = pair(
        lambda model: reclass(model.blocks[1], __call__=wrong_where_nothing_is_kept), adversarial=lambda seed: hard
    )
    report = ladder.check(wrong, rungs=("weights", "forward", "adversarial"))
    assert report.rung("forward").passed
    assert report.first_difference is not None
    assert report.first_difference.module == "blocks.1"
    assert "with rows of padding only" in report.first_difference.explanation


def test_a_norm_that_is_probed_by_itself_is_diagnosed() -> None:
    """Its variance is E[x²] - E[x]²: on well-behaved numbers as good as any."""
    report = ladder.check(
        pair(lambda model: setattr(model.blocks[2].norm, "use_fast_variance", True)),
        rungs=("weights", "forward", "adversarial"),
    )
    assert report.first_difference is not None
    assert report.first_difference.module == "blocks.2.norm"
    assert report.diagnosis is not None
    assert report.diagnosis.kind == "fast variance"


def test_hyper_parameters_are_diagnosed_without_a_run() -> None:
    report = ladder.check(pair(norm_eps(1)), rungs=("inventory",))
    assert report.first_difference is not None
    assert report.first_difference.module == "blocks.1.norm"
    assert report.diagnosis is not None
    assert report.diagnosis.kind == "norm eps"
    assert report.diagnosis.fix == "epsilon=1e-05"


def test_a_users_suspect_explains_what_no_other_does() -> None:
    def odd(self: Any, x: jax.Array) -> jax.Array:
        return jnp.sin(nnx.Linear.__call__(self, x) + 0.25)

    @suspect("sine", sentence="the port takes a sine there", fix="return the sum itself")
    def sine(case: Any) -> np.ndarray:
        # What the reference returns, by what the port's module is given.
        return case.x @ case.weights["kernel"] + case.weights["bias"]

    def wrong(model: Model) -> None:
        reclass(model.blocks[1].up, __call__=odd)

    plain = ladder.check(pair(wrong), rungs=("weights", "forward"))
    assert plain.first_difference is not None
    assert plain.first_difference.module == "blocks.1.up"
    assert plain.diagnosis is None, "no suspect explains it, so nothing is said"
    report = ladder.check(pair(wrong, suspects=(sine,)), rungs=("weights", "forward"))
    assert report.diagnosis is not None
    assert report.diagnosis.kind == "sine"
    assert str(report.diagnosis) == "the port takes a sine there; fix: return the sum itself."


def test_a_suspect_that_fails_costs_its_diagnosis_not_the_report() -> None:
    def broken(case: Any) -> None:
        raise KeyError("no such weight")

    report = ladder.check(pair(norm_eps(1), suspects=(broken,)), rungs=("weights", "forward"))
    assert [rung.name for rung in report.failed] == ["forward"]
    assert report.first_difference is not None
    assert report.first_difference.module == "blocks.1.norm"
    assert "the diagnosis ended in KeyError: 'no such weight' (test_locate.py" in report.first_difference.explanation
    assert report.diagnosis is None


def test_a_search_that_fails_costs_the_place_not_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("no such call")

    monkeypatch.setattr("parity.locate.follow_and_hand", broken)
    report = ladder.check(pair(norm_eps(1)), rungs=("weights", "forward"))
    assert [rung.name for rung in report.failed] == ["forward"]
    assert report.first_difference is not None
    assert "the search for its module ended in KeyError: 'no such call'" in report.first_difference.explanation
    assert report.diagnosis is None


def test_weights_are_exchanged_where_the_formula_is_unknown() -> None:
    """A module of the user's own, whose matrix is square and not transposed."""

    class TorchOwn(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = torch.nn.Parameter(torch.randn(5, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cumsum(torch.tanh(x @ self.mix.T), dim=1)

    class Own(nnx.Module):
        def __init__(self) -> None:
            self.mix = nnx.Param(jnp.zeros((5, 5)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.cumsum(jnp.tanh(x @ self.mix[...]), axis=1)

    class TorchOuter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = TorchOwn()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(x)

    class Outer(nnx.Module):
        def __init__(self) -> None:
            self.own = Own()

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.own(x)

    x = np.random.default_rng(0).normal(size=(2, 4, 5))
    report = ladder.check(Pair(reference=TorchOuter, port=Outer, inputs={"x": x}), rungs=("weights", "forward"))
    assert report.first_difference is not None
    assert report.first_difference.module == "own"
    assert report.diagnosis is not None
    assert report.diagnosis.kind == "kernel transposed"
    assert "mix transposed" in report.diagnosis.sentence
