"""Training steps: equal ones stay together, and a fault in any part of a step is seen, with the step and the manner."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

from parity import training, trajectory, twins
from parity.pair import Training
from parity.rungs import NotComparedError
from parity.rungs import trajectory as rung
from parity.runs import Runs
from parity.tolerances import TRAJECTORY_LOSS, TRAJECTORY_PARAMETERS
from parity.weights.variation import Noise
from tests.parity.rungs import small_pair
from tests.parity.rungs.small_pair import Port
from transformer_config import TransformerConfig

RATE = 1e-2


def climb(*, steps: int = 5, **fields: Any) -> Any:
    return rung.climb(small_pair.runs(training_steps=steps, **fields))


def failed(outcome: Any) -> set[str]:
    return {s.title for s in outcome.sections if not s.passed}


def test_a_composed_training_stays_together() -> None:
    """Dropout with handed masks, a batch norm in training mode, clipping, a schedule, Adam: new inputs every step."""

    def clip(gradients: Any) -> Any:
        norm = torch.sqrt(sum((g**2).sum() for g in gradients.values()))
        return {name: g * torch.clamp(0.1 / norm, max=1.0) for name, g in gradients.items()}

    clipping = optax.clip_by_global_norm(0.1)
    outcome = climb(
        reference={
            "clip": clip,
            "schedule": lambda step: RATE / step,
            "optimizer": lambda p: torch.optim.Adam(p, lr=1.0),
        },
        port={
            "clip": lambda gradients: clipping.update(gradients, clipping.init(gradients))[0],
            "schedule": lambda step: RATE / step,
            "optimizer": optax.adam(1.0),
        },
    )
    assert not failed(outcome), [s.failures[:3] for s in outcome.sections]
    losses, parameters, moves = outcome.sections[:3]
    assert len(losses.comparisons) == 5
    names = {"first.kernel", "norm.scale", "norm.bias", "second.kernel", "second.bias"}
    assert {c.tensor for c in parameters.comparisons} == names | {name + trajectory.ELEMENT for name in names}
    assert set(outcome.evidence["distances"]) == names | {"first.bias"}
    assert len({loss for loss, _ in outcome.evidence["losses"]}) == 5, "new inputs and masks every step"
    assert outcome.evidence["rates"] == pytest.approx([RATE / n for n in range(1, 6)])
    assert [c.tensor for c in moves.comparisons] == ["the reference", "the port"]
    # In training mode the batch norm subtracts the bias before it again: its gradient is zero.
    apart = outcome.sections[3]
    assert [c.tensor for c in apart.comparisons] == ["first.bias"]


FAULTS: dict[str, dict[str, Any]] = {
    "eps": {"optimizer": optax.adam(RATE, eps=1e-7)},
    "b2": {"optimizer": optax.adam(RATE, b2=0.99)},
    "decay": {"optimizer": optax.adamw(RATE)},
    "a schedule on one side": {"schedule": lambda step: 1.0 / step},
    "clipping on one side": {"clip": lambda g: {n: 0.5 * x for n, x in g.items()}, "optimizer": optax.sgd(RATE)},
    "a rate that is off in the ninth digit": {"optimizer": optax.adam(RATE * (1 + 1e-9))},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_update_is_seen(fault: str) -> None:
    outcome = climb(port=FAULTS[fault], steps=3)
    assert "parameters" in failed(outcome)
    first = 2 if fault in ("b2", "a schedule on one side") else 1
    assert outcome.evidence["first"] == first
    assert outcome.evidence["departure"] == "jump"
    assert f"parameters depart in step {first}, in a jump" in outcome.notes


def test_drift_is_told_from_a_jump() -> None:
    kind = rung._kind
    bounds = [1e-12 * n for n in range(1, 9)]
    assert kind([0.9e-12, 1.8e-12, 5e-12], bounds, 2) == "drift"
    assert kind([1e-16, 1e-16, 5e-9], bounds, 2) == "jump"
    assert kind([5e-9], bounds, 0) == "jump"


def test_a_step_that_changes_nothing() -> None:
    """P25: the update of a module inside jax.jit is dropped without a word."""

    def start(model: Any) -> Any:
        return model, nnx.Optimizer(model, optax.adam(RATE), wrt=nnx.Param)

    def update(model: Any, optimizer: Any, inputs: Any) -> jax.Array:
        value, gradients = nnx.value_and_grad(lambda m: small_pair.loss(m(inputs["x"]), inputs))(model)
        optimizer.update(model, gradients)
        return value

    def training_with(compile_: Callable[..., Any]) -> Training:
        compiled = compile_(update)

        def step(state: Any, inputs: Any, masks: Any) -> Any:
            return state, compiled(*state, inputs)

        return Training(
            start=start,
            step=step,
            parameters=lambda state: {
                ".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(nnx.state(state[0], nnx.Param))
            },
        )

    class WithoutDropout(Port):
        rate = 0.0

    class Reference(small_pair.Reference):
        def __init__(self) -> None:
            super().__init__()
            self.drop.p = 0.0

    def outcome_of(compile_: Callable[..., Any]) -> Any:
        port = {"build": WithoutDropout, "training": training_with(compile_)}
        return climb(steps=2, reference={"build": Reference}, port=port)

    assert not failed(outcome_of(nnx.jit))

    def dropping(function: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(model: Any, optimizer: Any, inputs: Any) -> Any:
            graphdef, state = nnx.split((model, optimizer))
            return jax.jit(lambda state: function(*nnx.merge(graphdef, state), inputs))(state)

        return compiled

    outcome = outcome_of(dropping)
    assert {"parameters", "steps that change nothing"} <= failed(outcome)
    failure = next(s for s in outcome.sections if s.title == "steps that change nothing").failures[0]
    assert failure.tensor == "the port"
    assert "after step 1, 2 every parameter is as before" in failure.detail


def test_a_rate_of_zero_in_the_first_step_changes_nothing_on_either_side_and_is_no_fault() -> None:
    def warm_up(step: int) -> float:
        return RATE * (step - 1)

    sides = {"reference": {"schedule": warm_up}, "port": {"schedule": warm_up}}
    assert not failed(climb(steps=3, **sides))

    def never(step: int) -> float:
        return 0.0

    sides = {"reference": {"schedule": never}, "port": {"schedule": never}}
    assert "steps that change nothing" in failed(climb(steps=2, **sides)), "nothing was trained: no proof"


def test_without_an_optimizer_there_is_nothing_to_compare() -> None:
    with pytest.raises(NotComparedError, match="reference's side brings neither"):
        climb(reference={"optimizer": None})
    with pytest.raises(NotComparedError, match="port's side brings neither"):
        climb(port={"optimizer": None})


def test_dropout_at_other_places_is_left_to_its_own_rung() -> None:
    class Without(Port):
        rate = 0.0

    with pytest.raises(NotComparedError, match="do not drop out at the same places"):
        climb(port={"build": Without}, steps=1)


def test_an_element_by_itself_is_seen() -> None:
    adam = optax.adam(RATE)

    def update(gradients: Any, state: Any, params: Any) -> Any:
        updates, state = adam.update(gradients, state, params)
        kernel = updates["second.kernel"]
        return updates | {"second.kernel": kernel.at[0, 0].multiply(1 + 1e-5)}, state

    outcome = climb(steps=1, port={"optimizer": optax.GradientTransformation(adam.init, update)})
    failures = {c.tensor for s in outcome.sections for c in s.failures}
    assert failures == {"second.kernel", "second.kernel" + trajectory.ELEMENT}


def test_what_rounding_alone_does_is_judged_by_the_reference_beside_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bound far too small, trainings of the reference settle it; a fault, they do not."""
    monkeypatch.setattr(trajectory, "trained_apart", lambda way, steps, largest, per_unit=0.0: 1e-18)
    outcome = climb(steps=3)
    assert not failed(outcome)
    assert any("trainings of the reference beside itself" in note for note in outcome.notes)
    faulty = climb(steps=2, port={"optimizer": optax.adam(RATE * (1 + 1e-6))})
    assert "parameters" in failed(faulty)


def test_batches_are_new_or_taken_by_turns() -> None:
    runs = small_pair.runs()
    assert (training.batch_of(runs, 1)["x"] == small_pair.inputs(1)["x"]).all()
    batches = tuple(small_pair.inputs(seed) for seed in (7, 8))
    runs = small_pair.runs(inputs=batches)
    assert [int((training.batch_of(runs, n)["x"] == batches[1]["x"]).all()) for n in (1, 2, 3, 4)] == [0, 1, 0, 1]


def twin_pair(**changes: Any) -> Any:
    rates = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
    return twins.preset_pair(TransformerConfig.tiny(num_encoder_layers=1, num_decoder_layers=1, **rates), **changes)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_hundred_steps_of_the_twins_with_dropout(seed: int) -> None:
    found = trajectory.train_both(Runs(twin_pair(), seed=seed), num_steps=100)
    assert max(found.loss_errors) < TRAJECTORY_LOSS
    way = found.summed_rates[-1]
    assert way > 1.0, "steps that move the parameters"
    assert found.losses[-1][0] < found.losses[0][0] - 0.3, "and learn something"
    # The training of seed 0 amplifies any rounding, at its end tenfold in nine steps: single elements are 1e-10 to
    # 5e-10 apart, by how a step is computed; those of seed 1 are 7e-12.
    if seed:
        apart = {name: d[-1] for name, d in found.elements.items() if name not in found.zero}
        assert max(apart.values()) < TRAJECTORY_PARAMETERS * way
    assert found.within(), "every element and every mean, as the rung judges them"
    means = {name: d[-1] for name, d in found.distances.items() if name not in found.zero}
    assert max(means.values()) < TRAJECTORY_PARAMETERS * way
    assert all(name.endswith("k_proj.bias") for name in found.zero)
    assert len(found.zero) == 3
    assert found.unchanged == {"reference": [], "port": []}


@pytest.mark.parametrize("own_step", [True, False])
def test_trainings_beside_itself_have_noise_in_every_gradient(own_step: bool) -> None:
    """By the reference's own training step, and by the one that the harness composes."""
    runs = Runs(twin_pair()) if own_step else small_pair.runs()
    names, inputs = training.trained(runs, max_elements=None), training.batch_of(runs, 1)
    masks = runs.draw_masks("reference", 1, inputs=inputs)
    after = []
    for norm in (0.0, 1.0):
        trainer = trajectory._reference(runs, names, noise=Noise(norm, seed=0))
        trainer.step(inputs, masks)
        after.append(trainer.parameters())
    assert all((after[0][name] != array).any() for name, array in after[1].items())


def test_the_twins_real_steps_are_compared_not_copies_of_them() -> None:
    pair = twin_pair()
    real = pair.port.training

    def step(state: Any, inputs: Any, masks: Any) -> Any:
        if int(state.step) == 3:
            masks = {site: jnp.ones_like(mask) for site, mask in masks.items()}
        return real.step(state, inputs, masks)

    port = dataclasses.replace(pair.port, training=dataclasses.replace(real, step=step))
    outcome = rung.climb(Runs(dataclasses.replace(pair, port=port, training_steps=5)))
    assert outcome.evidence["first"] == 4
    assert outcome.evidence["departure"] == "jump"
    assert {c.tensor for c in outcome.sections[0].failures} == {"loss of step 4", "loss of step 5"}


def test_not_finite_is_not_equal() -> None:
    infinite = (float("inf"), float("inf"))
    assert trajectory.apart(np.array([np.nan]), np.array([np.nan])) == infinite
    assert trajectory.apart(np.ones(2), np.ones(3)) == infinite
    assert trajectory.relative(float("nan"), float("nan")) == float("inf")
    assert trajectory.relative(float("inf"), float("inf")) == float("inf")
