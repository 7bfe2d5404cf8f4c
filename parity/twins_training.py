"""Our own trainer's step, compiled and placed by `train.parallel`, in every way that this machine's devices allow."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from parity.pair import Inputs, Training
from parity.rungs import NotComparedError
from train.batching import Batch, Bucket
from train.config import BatchConfig, EvaluationConfig, OptimizerConfig, ParallelConfig, TrainConfig
from train.parallel import Devices
from train.state import TrainState
from transformer_config import TransformerConfig

MICRO_BATCHES = 3
"""Does not divide the four rows of a made-up batch, so one of them is filled up."""

SEED = 0
"""Of the dropout of these steps."""


def modes(
    config: TransformerConfig, optimizer: OptimizerConfig, *, smoothing: float, start: Callable[[Any], TrainState]
) -> dict[str, Training]:
    """By name. Each draws its own dropout, whose masks go by the number of the row: they are the same in every mode.

    Raises NotComparedError for a model that the trainer does not take.
    """
    try:
        return {
            name: _mode(_train_config(config, optimizer, smoothing=smoothing, parallel=parallel), start)
            for name, parallel in _ways(jax.device_count()).items()
        }
    except ValueError as error:
        raise NotComparedError(f"the trainer does not take this model: {error}") from error


def _ways(devices: int) -> dict[str, ParallelConfig]:
    ways = {
        f"{MICRO_BATCHES} micro-batches": ParallelConfig(num_devices=1, accumulation_steps=MICRO_BATCHES),
    }
    if devices > 1:
        fsdp = 2 if devices % 2 == 0 else devices
        ways |= {
            f"jit over {devices} devices": ParallelConfig(mode="jit"),
            f"fsdp of {fsdp} over {devices} devices": ParallelConfig(mode="jit", fsdp=fsdp),
            f"pmap over {devices} devices": ParallelConfig(mode="pmap"),
        }
    return ways


def _train_config(
    config: TransformerConfig, optimizer: OptimizerConfig, *, smoothing: float, parallel: ParallelConfig
) -> TrainConfig:
    limit = config.sequence_limit
    lengths = {} if limit is None else {"max_len": min(BatchConfig().max_len, limit)}
    decoding = {} if limit is None else {"max_decode_len": min(EvaluationConfig().max_decode_len, limit)}
    return TrainConfig(
        run_dir=Path("unused"),
        model=config,
        batch=BatchConfig(**lengths),
        optimizer=optimizer,
        evaluation=EvaluationConfig(**decoding),
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
            vocab_size=max(config.model.src_vocab_size, config.model.tgt_vocab_size),
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
