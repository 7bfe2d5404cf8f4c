"""Rung 16 takes steps of the real trainer in each of its modes: equal ones agree, and a fault in a mode is named."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from parity import ladder, training_modes, twins, twins_training
from parity.pair import Pair, TrainingModes
from parity.rungs import NotComparedError
from parity.runs import Runs
from train import parallel, step
from transformer_config import TransformerConfig


def make_pair(**changes: Any) -> Pair:
    fields: dict[str, Any] = {"num_encoder_layers": 1, "num_decoder_layers": 1, "use_bias": False}
    return twins.preset_pair(TransformerConfig.tiny(**fields | changes))


def climb(pair: Pair) -> dict[str, Any]:
    sections, notes = training_modes.climb(Runs(pair))
    assert not notes
    return {section.title: section for section in sections}


def only(pair: Pair, *wanted: str) -> Pair:
    """Of the modes those whose name has one of these words: each is compiled."""
    training = pair.port.training

    def modes() -> TrainingModes:
        every = training.modes()
        return dataclasses.replace(
            every, others={n: mode for n, mode in every.others.items() if any(word in n for word in wanted)}
        )

    return dataclasses.replace(
        pair, port=dataclasses.replace(pair.port, training=dataclasses.replace(training, modes=modes))
    )


MICRO = "training, 3 micro-batches under jit and fsdp over 4 x 2 devices"
PMAP = "training, pmap over 8 devices"


@pytest.mark.parametrize("changes", [{}, {"attention": "blockwise", "norm_order": "pre"}], ids=["plain", "blockwise"])
def test_the_real_step_is_the_same_in_every_mode(changes: dict[str, Any]) -> None:
    assert jax.device_count() == 8
    sections = climb(make_pair(**changes))
    assert list(sections) == [MICRO, PMAP]
    for section in sections.values():
        assert section.passed, section.failures[:3]
        names = {c.tensor for c in section.comparisons}
        assert {"loss of step 1", "loss of step 2", "encoder.layers.0.feed_forward.linear1.kernel"} <= names
        assert max(c.error for c in section.comparisons) < 1e-12


def test_the_steps_move_the_parameters_and_drop_out() -> None:
    """Equal because nothing happened would be no proof."""
    pair = make_pair()
    runs = Runs(pair)
    runner = runs.port_runner("float64")
    with runner.numerics():
        modes = pair.port.training.modes()
        state = modes.plain.start(runner.merged(runner.cast(runs.port_weights)))
        inputs = runner.inputs(training_modes._batch(runs, 1, rows=modes.rows))
        assert {len(array) for array in inputs.values()} == {23}, "of 24: in each micro-batch, and one row is filled up"
        masks = [modes.drawn(state._replace(step=jax.numpy.int32(n)), inputs) for n in (0, 1)]
        assert masks[0].keys() == {
            "encoder.layers.0.feed_forward.activation",
            "decoder.layers.0.feed_forward.activation",
        }
        for site, first in masks[0].items():
            assert 0.8 < np.asarray(first).mean() < 0.97
            assert (np.asarray(first) != np.asarray(masks[1][site])).any()
        after, _ = modes.plain.step(state, inputs, masks[0])
        before, later = modes.plain.parameters(state), modes.plain.parameters(after)
        assert all((np.asarray(before[name]) != np.asarray(later[name])).any() for name in later)


def test_a_mean_of_the_devices_means_is_found_and_the_mode_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: each device divides by its own tokens."""

    def mean_of_means(tree: Any) -> Any:
        return tree if isinstance(tree, jax.Array) else jax.lax.pmean(tree, "devices")

    def across(**options: Any) -> step.Across:
        return step.Across(sum=mean_of_means) if "sum" in options else step.Across(**options)

    monkeypatch.setattr(parallel, "Across", across)
    report = ladder.check(make_pair(), rungs=("weights", "modes"))
    rung = report.rung("modes")
    assert {section.title for section in rung.outcome.sections if not section.passed} == {PMAP}
    assert report.first_difference is not None
    assert report.first_difference.module == "training step"
    assert PMAP in report.first_difference.explanation
    assert "loss of step 1" in report.first_difference.explanation


def test_masks_that_go_by_the_place_on_the_device_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """T12: every device, and every micro-batch, has the masks of the first rows."""
    arrays = parallel._arrays
    monkeypatch.setattr(parallel, "_arrays", lambda batch, start, stop: arrays(batch, 0, stop - start))
    failed = {title for title, section in climb(make_pair()).items() if not section.passed}
    assert failed == {MICRO, PMAP}


def test_a_gradient_that_is_not_added_up_over_micro_batches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_alone(share: Any, params: Any, batch: Any) -> Any:
        first = jax.tree.map(lambda array: array[0], batch)
        return jax.grad(share, has_aux=True)(params, first)

    monkeypatch.setattr(step, "_added_up", first_alone)
    assert not climb(only(make_pair(), "micro-batches"))[MICRO].passed


def test_what_the_trainer_does_not_take_is_said() -> None:
    pair = make_pair(pad_id=2, bos_id=0, eos_id=1)
    sections, notes = training_modes.climb(Runs(pair))
    assert not sections
    (note,) = notes
    assert "training steps in other modes not compared: the trainer does not take this model: model.pad_id" in note


def test_on_one_device_there_are_micro_batches_alone_and_a_note() -> None:
    ways, notes = twins_training._ways(1)
    assert list(ways) == ["3 micro-batches"]
    assert "one device only" in notes[0]
    assert list(twins_training._ways(2)[0]) == [
        "3 micro-batches under jit and fsdp over 2 devices",
        "pmap over 2 devices",
    ]
    assert twins_training._ways(2)[1] == ()


def test_modes_of_anybodys_training_are_given_the_ports_masks() -> None:
    """Without `drawn`, and with a mode that is off."""
    pair = only(make_pair(), "nothing")
    training = pair.port.training
    seen: list[Any] = []

    def step(state: Any, inputs: Any, masks: Any) -> Any:
        seen.append(masks)
        state, loss = training.step(state, inputs, masks)
        return state, loss * (1 + 1e-9)

    off = dataclasses.replace(training, step=step)
    modes = TrainingModes(plain=training, others={"itself": training, "off": off})
    port = dataclasses.replace(pair.port, training=dataclasses.replace(training, modes=lambda: modes))
    found = climb(dataclasses.replace(pair, port=port))
    assert found["training, itself"].passed
    assert [c.tensor for c in found["training, off"].failures] == ["loss of step 1", "loss of step 2"]
    assert len(seen) == 2
    assert len(seen[0]) > 2, "at every site of the model"

    def none() -> TrainingModes:
        raise NotComparedError("because")

    port = dataclasses.replace(pair.port, training=dataclasses.replace(training, modes=none))
    assert training_modes.climb(Runs(dataclasses.replace(pair, port=port)))[1] == [
        "training steps in other modes not compared: because"
    ]
