"""Our own trainer's step, compiled and placed by `train.parallel`, in every way that this machine's devices allow."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flax_transformer import DropoutKey, DropoutMasks
from parity.compilation import jit
from parity.pair import Inputs, Training, TrainingModes
from parity.rungs import NotComparedError
from parity.twins_sites import Sites, port_sites
from train.batching import Batch, Bucket
from train.config import BatchConfig, EvaluationConfig, OptimizerConfig, ParallelConfig, TrainConfig
from train.parallel import Devices
from train.state import TrainState, dropout_key
from train.step import Arrays, make_update
from transformer_config import TransformerConfig

MICRO_BATCHES = 3
"""Of several, the last one is ragged, and filled up."""

RATE = 0.1
"""Of the dropout behind the activations, in these steps the only one. A step hands one source with the numbers of its
rows to every site alike; but a program that draws at all of them takes a tiny model 15 s more to compile."""

SEED = 0
"""Of the dropout of these steps."""


def modes(
    config: TransformerConfig, optimizer: OptimizerConfig, *, smoothing: float, start: Callable[[Any], TrainState]
) -> TrainingModes:
    """Each draws its own dropout, whose masks go by the number of the row: the same in every mode.

    Raises NotComparedError for a model that the trainer does not take.
    """
    config = config.replace(dropout=0.0, attention_dropout=0.0, activation_dropout=RATE)
    ways, notes = _ways(jax.device_count())
    try:
        others = {
            name: _mode(_train_config(config, optimizer, smoothing=smoothing, parallel=parallel), start)
            for name, parallel in ways.items()
        }
    except ValueError as error:
        raise NotComparedError(f"the trainer does not take this model: {error}") from error
    sites = Sites(config, port_sites)
    draw = jit(lambda key, inputs: sites.draw(inputs, DropoutKey(key)))

    def drawn(state: TrainState, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return step_masks(draw, state.step, inputs, seed=SEED)

    return TrainingModes(
        plain=_plain(config, optimizer, smoothing=smoothing, start=start),
        others=others,
        drawn=drawn,
        rows=MICRO_BATCHES * jax.device_count() - 1,
        notes=notes,
    )


def step_masks(draw: Callable[..., Any], step: Any, inputs: Mapping[str, Any], *, seed: int) -> dict[str, Any]:
    """What the trainer's step of this number drops, drawn outside of it: `draw(key, inputs)` with the key it makes."""
    return dict(draw(jax.random.fold_in(dropout_key(seed), step), dict(inputs)))


def _plain(
    config: TransformerConfig, optimizer: OptimizerConfig, *, smoothing: float, start: Callable[[Any], TrainState]
) -> Training:
    """The step that the trajectory compares, of this config."""
    update = jit(make_update(config, optimizer, smoothing=smoothing))

    def step(state: TrainState, inputs: Mapping[str, Any], masks: Mapping[str, Any]) -> tuple[TrainState, Any]:
        state, metrics = update(
            state, Arrays.whole(inputs["src"], inputs["tgt_in"], inputs["tgt_out"]), DropoutMasks(masks)
        )
        return state, metrics.loss

    return Training(start=start, step=step, parameters=lambda state: state.params)


def _ways(devices: int) -> tuple[dict[str, ParallelConfig], tuple[str, ...]]:
    """As few programs as show each way of spreading a batch, and a note of what this machine does not allow."""
    if devices == 1:
        alone = ParallelConfig(num_devices=1, accumulation_steps=MICRO_BATCHES)
        note = "training steps not compared on several devices: there is one device only"
        return {f"{MICRO_BATCHES} micro-batches": alone}, (note,)
    fsdp = 2 if devices % 2 == 0 else devices
    mesh = f"{devices // fsdp} x {fsdp} devices" if fsdp < devices else f"{devices} devices"
    return {
        f"{MICRO_BATCHES} micro-batches under jit and fsdp over {mesh}": ParallelConfig(
            fsdp=fsdp, accumulation_steps=MICRO_BATCHES
        ),
        f"pmap over {devices} devices": ParallelConfig(mode="pmap"),
    }, ()


def _train_config(
    config: TransformerConfig, optimizer: OptimizerConfig, *, smoothing: float, parallel: ParallelConfig
) -> TrainConfig:
    limit = config.sequence_limit or max(BatchConfig().max_len, EvaluationConfig().max_decode_len)
    return TrainConfig(
        run_dir=Path("unused"),
        model=config,
        batch=BatchConfig(max_len=min(BatchConfig().max_len, limit)),
        optimizer=optimizer,
        evaluation=EvaluationConfig(max_decode_len=min(EvaluationConfig().max_decode_len, limit)),
        parallel=parallel,
        label_smoothing=smoothing,
        seed=SEED,
    )


def _mode(config: TrainConfig, start: Callable[[Any], TrainState]) -> Training:
    devices = Devices(config.parallel)
    compiled = devices.compile_train_step(config)

    def step(state: TrainState, inputs: Mapping[str, Any], masks: Any) -> tuple[TrainState, float]:
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        (rows, src_len), tgt_len = arrays["src"].shape, arrays["tgt_in"].shape[1]
        batch = devices.place_batch(
            Bucket(src_len=src_len, tgt_len=tgt_len, batch_size=rows),
            lambda start, stop: _rows(arrays, start, stop, pad_id=config.model.pad_id),
            vocab_sizes=config.model.vocab_sizes,
        )
        state, metrics = compiled(state, batch)
        return state, float(devices.metrics(metrics).loss)

    return Training(
        start=lambda model: devices.place_state(start(model)),
        step=step,
        parameters=lambda state: devices.to_save(state).params,
    )


def _rows(arrays: Inputs, start: int, stop: int, *, pad_id: int) -> Batch:
    """Rows of a batch; those beyond its last are padding, as `Plan.rows` gives them."""

    def filled(array: np.ndarray) -> np.ndarray:
        some = array[start:stop]
        return np.pad(some, ((0, stop - start - len(some)), (0, 0)), constant_values=pad_id)

    return Batch(src=filled(arrays["src"]), tgt_in=filled(arrays["tgt_in"]), tgt_out=filled(arrays["tgt_out"]))
