"""Training mode: handed masks, each side's own masks, running statistics; every way of getting them wrong is seen."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity import masks, twins
from parity.rungs import NotComparedError, dropout
from parity.runs import Runs
from tests.parity.rungs import small_pair
from tests.parity.rungs.small_pair import RATE, WIDTHS, Port, Reference
from transformer_config import TransformerConfig


@pytest.fixture(autouse=True)
def _fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "MAX_DRAWS", 60)


def climb(build: type[Port] | None = None, **fields: Any) -> Any:
    return dropout.climb(small_pair.runs(port={"build": build} if build else None, **fields))


def failed(outcome: Any) -> dict[str, set[str]]:
    return {f"{s.title} ({s.precision})": {c.tensor for c in s.failures} for s in outcome.sections if s.failures}


SAME = "training mode, the same masks (float64)"
SHARE = "each side's own masks: share kept (statistics)"
INDEPENDENT = "each side's own masks: independent (statistics)"
RUNNING = "running statistics after one step (float64)"


class Dropout(nnx.Dropout):
    """A port's own Dropout, right but for what is changed below."""

    def drawn(self, x: jax.Array) -> jax.Array:
        return jax.random.bernoulli(self.rngs.dropout(), 1.0 - self.rate, x.shape)

    def scaled(self, x: jax.Array) -> jax.Array:
        return x / (1.0 - self.rate)


def test_equal_models_pass() -> None:
    outcome = climb()
    assert not failed(outcome)
    titles = [f"{s.title} ({s.precision})" for s in outcome.sections]
    assert titles == [
        SAME,
        "training mode, the same masks (float32)",
        "sites of dropout (static)",
        SHARE,
        INDEPENDENT,
        RUNNING,
    ]
    assert outcome.evidence["rates"] == {"drop": RATE}
    assert outcome.evidence["masks"]["drop"].shape == (11, WIDTHS[1])
    assert {c.tensor for c in outcome.sections[-1].comparisons} == {"norm.mean", "norm.var"}
    assert "(n - 1) / n, n = 11" in outcome.sections[-1].comparisons[1].detail
    assert [known.kind for known in outcome.known] == ["running variance"]


def test_what_returns_something_else_in_training_is_compared_all_the_same() -> None:
    def call(module: Any, inputs: Any) -> Any:
        y = module(inputs["x"])
        training = module.training if isinstance(module, torch.nn.Module) else not module.drop.deterministic
        return y if training else {"evaluated": y}

    def loss(output: Any, inputs: Any) -> Any:
        return small_pair.loss(output["evaluated"] if isinstance(output, dict) else output, inputs)

    sides = {"call": call, "loss": loss}
    outcome = dropout.climb(small_pair.runs(reference=sides, port=sides))
    assert not failed(outcome)
    assert "output" in {c.tensor for c in outcome.sections[0].comparisons}


def test_torch_keeps_the_unbiased_variance_and_the_relation_is_judged() -> None:
    """A port that keeps torch's variance is not what nnx.BatchNorm is, and is told."""

    class Unbiased(Port):
        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.first(x)
            old = self.norm.var[...]
            z = self.norm(y)
            if not self.norm.use_running_average:
                self.norm.var[...] = 0.9 * old + 0.1 * y.var(axis=0, ddof=1)
            return self.second(self.drop(jnp.tanh(z)))

    assert failed(climb(Unbiased)) == {RUNNING: {"norm.var"}}


def test_momentum_by_the_other_convention() -> None:
    class Other(Port):
        momentum = 0.1

    outcome = climb(Other)
    assert failed(outcome) == {RUNNING: {"norm.mean", "norm.var"}}
    assert "9 times that" in outcome.sections[-1].failures[0].detail
    evidence = outcome.evidence["buffers"]["norm.mean"]
    assert evidence["momentum"] == pytest.approx(0.1)
    assert evidence["count"] == 11


def test_statistics_that_do_not_move() -> None:
    class Frozen(Port):
        def __call__(self, x: jax.Array) -> jax.Array:
            kept = self.norm.mean[...], self.norm.var[...]
            y = super().__call__(x)
            self.norm.mean[...], self.norm.var[...] = kept
            return y

    outcome = climb(Frozen)
    assert failed(outcome) == {RUNNING: {"norm.mean", "norm.var"}}
    assert "by 0 in the port" in outcome.sections[-1].failures[0].detail


def test_another_rate_changes_the_scale_and_the_share() -> None:
    class Other(Port):
        rate = 0.2

    outcome = climb(Other)
    assert "output" in failed(outcome)[SAME]
    assert failed(outcome)[SHARE] == {"drop, port", "all sites of rate 0.25, port"}
    assert "the first module that differs is drop" in " ".join(outcome.notes)


def test_batch_statistics_in_place_of_running_ones_and_the_other_way_round() -> None:
    class Evaluating(Port):
        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.norm(self.first(x), use_running_average=True)
            return self.second(self.drop(jnp.tanh(y)))

    assert "output" in failed(climb(Evaluating))[SAME]


def test_one_mask_for_the_whole_batch() -> None:
    """P21: Flax's attention does so unless told otherwise."""

    class Shared(Port):
        def dropout(self, rngs: nnx.Rngs) -> nnx.Dropout:
            return nnx.Dropout(self.rate, broadcast_dims=(0,), rngs=rngs)

    outcome = climb(Shared)
    assert failed(outcome) == {INDEPENDENT: {"drop"}}
    (failure,) = outcome.sections[4].failures
    assert failure.detail == "one mask along axes: expected none, found [0]; axis 0 is the batch"
    assert outcome.evidence["shared_axes"]["port"] == {"drop": frozenset({0})}


def test_dropout_on_one_side_only() -> None:
    class Without(Port):
        rate = 0.0

    class ReferenceWithout(Reference):
        def __init__(self) -> None:
            super().__init__()
            self.drop.p = 0.0

    for runs in (small_pair.runs(port={"build": Without}), small_pair.runs(reference={"build": ReferenceWithout})):
        outcome = dropout.climb(runs)
        assert failed(outcome) == {"sites of dropout (static)": {"drop"}}
        assert "drops out here" in outcome.sections[0].failures[0].detail


def test_nothing_that_training_mode_changes() -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(WIDTHS[0], WIDTHS[2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x)

    class PlainPort(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.first = nnx.Linear(WIDTHS[0], WIDTHS[2], rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.first(x)

    with pytest.raises(NotComparedError, match="neither side has dropout"):
        dropout.climb(small_pair.runs(reference={"build": Plain}, port={"build": PlainPort}))


def drawn(draw: Any, *, rate: float = 0.1, draws: int = 40) -> masks.Drawn:
    return masks.draw(lambda seed: draw(np.random.default_rng(seed)), {"a": rate, "b": rate}, wanted=draws * 600)


def test_eight_random_bits_are_26_in_256() -> None:
    """A rate of 0.1 that is really 0.1016 is seen with the elements that the rung draws."""
    rng = np.random.default_rng(0)
    size = masks.WANTED
    bytes_ = rng.integers(0, 256, size, dtype=np.uint8)
    wrong = dropout.share_test(int((bytes_ >= 26).sum()), size, expected=0.9, false_alarm=1e-7)
    halves = rng.integers(0, 65536, size, dtype=np.uint16)
    right = dropout.share_test(int((halves >= 6554).sum()), size, expected=0.9, false_alarm=1e-7)
    assert wrong.share > 1.0
    assert right.share < 1.0


def test_what_is_drawn_together_is_seen() -> None:
    def independent(rng: Any) -> dict[str, np.ndarray]:
        return {name: rng.random((4, 10, 15)) >= 0.1 for name in ("a", "b")}

    def one_mask_for_two_sites(rng: Any) -> dict[str, np.ndarray]:
        mask = rng.random((4, 10, 15)) >= 0.1
        return {"a": mask, "b": mask}

    def over_the_length(rng: Any) -> dict[str, np.ndarray]:
        return {"a": np.broadcast_to(rng.random((4, 1, 15)) >= 0.1, (4, 10, 15)), "b": rng.random((4, 10, 15)) >= 0.1}

    def the_same_every_time(rng: Any) -> dict[str, np.ndarray]:
        return independent(np.random.default_rng(0))

    right = drawn(independent)
    assert not right.alike()
    assert not right.repeating()
    assert right.sites["a"].shared_axes(0.1, false_alarm=1e-9) == frozenset()
    assert drawn(one_mask_for_two_sites).alike() == {("a", "b")}
    assert drawn(over_the_length).sites["a"].shared_axes(0.1, false_alarm=1e-9) == {1}
    assert drawn(the_same_every_time).repeating() == {"a", "b"}
    comparisons = [*dropout._alike({"reference": right, "port": drawn(one_mask_for_two_sites)})]
    assert comparisons[0].error == 1
    assert "a and b have one mask in the port alone" in comparisons[0].detail


ALL_RATES = {"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.3}


def twin_runs(**changes: Any) -> Runs:
    config = TransformerConfig.tiny(num_encoder_layers=1, num_decoder_layers=1, **ALL_RATES)
    pair = twins.preset_pair(config)
    return Runs(dataclasses.replace(pair, port=dataclasses.replace(pair.port, **changes)))


def test_the_twins_and_faults_in_the_port_of_their_dropout() -> None:
    pair = twin_runs().pair
    assert pair.port.draw_dropout is not None
    outcome = dropout.climb(twin_runs())
    assert not failed(outcome), failed(outcome)
    # Two embeddings; residuals 2 + 3, attention weights 1 + 2, activations 1 + 1.
    assert len(outcome.evidence["rates"]) == 2 + 5 + 3 + 2
    assert set(outcome.evidence["rates"].values()) == set(ALL_RATES.values())

    def all_in_one(module: Any, inputs: Any, seed: int) -> dict[str, Any]:
        drawn = pair.port.draw_dropout(module, inputs, seed)
        return {name: jnp.broadcast_to(mask[:1], mask.shape) for name, mask in drawn.items()}

    sections, evidence = dropout._own_masks(twin_runs(draw_dropout=all_in_one))
    assert {c.tensor for s in sections for c in s.failures} == set(outcome.evidence["rates"])
    assert set(evidence["shared_axes"]["port"].values()) == {frozenset({0})}

    def unscaled(module: Any, inputs: Any, given: Any) -> Any:
        logits = pair.port.call_with_dropout(module, inputs, given)
        return logits * 0.9

    runs = twin_runs(call_with_dropout=unscaled)
    given = outcome.evidence["masks"]
    reference, port = (dropout._training(runs, side, given) for side in ("reference", "port"))
    assert abs(float(port.loss) - float(reference.loss)) > 1e-3
    assert not np.allclose(port.results["output"], reference.results["output"])
