"""Some steps of the real trainer's step on made-up pairs, on whatever devices: the gradients and the losses.

Run as a program it is one of several processes: `python -m tests.train.some_steps OUTPUT CONFIG STEPS`.
"""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.batching import Plan, epoch_batches, plan_buckets
from train.config import BatchConfig, OptimizerConfig, ParallelConfig, TrainConfig
from train.packing import packed_epoch, plan_packing
from train.parallel import Devices, start_processes
from train.sentences import EncodedText, Sentences
from train.state import TrainState, initial_state
from transformer_config import EOS_ID, TransformerConfig

B1 = 0.9


@dataclasses.dataclass
class Outcome:
    """After the last step, in numpy, whole."""

    losses: list[float]
    gradients: dict[str, np.ndarray]
    """Of the first step: Adam's first moments after it, divided by 1 - b1."""
    params: dict[str, np.ndarray]


def config(
    parallel: ParallelConfig, *, dtype: str = "float64", dropout: float = 0.2, packing: bool = False
) -> TrainConfig:
    model = TransformerConfig.tiny(
        d_model=16,
        d_ff=24,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=1,
        src_vocab_size=40,
        tgt_vocab_size=40,
        tie_embeddings="all",
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
        dtype=dtype,
        param_dtype=dtype,
    )
    return TrainConfig(
        run_dir=Path("unused"),
        model=model,
        batch=BatchConfig(max_tokens=130, num_buckets=2, max_len=20, packing=packing),
        optimizer=OptimizerConfig(b1=B1, clip_norm=None, warmup_steps=20, eps=1e-6),
        parallel=parallel,
    )


def text(pairs: int = 57, seed: int = 0) -> EncodedText:
    rng = np.random.default_rng(seed)
    sides = [
        Sentences.of([[*rng.integers(4, 40, length).tolist(), EOS_ID] for length in rng.integers(1, 11, pairs)])
        for _ in "st"
    ]
    return EncodedText(*sides)


def plan_of(config: TrainConfig, epoch: int, *, encoded: EncodedText) -> Plan:
    if config.batch.packing:
        return packed_epoch(encoded, plan_packing(encoded, config=config.batch), seed=config.seed, epoch=epoch)
    return epoch_batches(encoded, plan_buckets(encoded, config=config.batch), seed=config.seed, epoch=epoch)


def whole(tree):
    """In numpy, from wherever it lies."""

    def gathered(leaf):
        spread = isinstance(leaf, jax.Array) and jax.process_count() > 1
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True) if spread else leaf)

    return jax.tree.map(gathered, tree)


def some_steps(config: TrainConfig, *, steps: int = 1, state: TrainState | None = None) -> Outcome:
    devices = Devices(config.parallel)
    step = devices.compile_train_step(config)
    state = devices.place_state(initial_state(config) if state is None else state)
    encoded, losses, gradients = text(), [], {}
    per_epoch = len(plan_of(config, 0, encoded=encoded))
    for number in range(steps):
        epoch, i = divmod(number, per_epoch)
        plan = plan_of(config, epoch, encoded=encoded)
        batch = devices.place_batch(plan.shape(i), partial(plan.rows, i), vocab_sizes=(40, 40))
        state, metrics = step(state, batch)
        losses.append(float(devices.metrics(metrics).loss))
        if number == 0:
            moments = whole(devices.to_save(state)).opt_state[0].mu
            gradients = {name: moment / (1 - B1) for name, moment in moments.items()}
    return Outcome(losses, gradients, whole(devices.to_save(state)).params)


def main() -> None:
    output, values, steps = sys.argv[1:]
    run = TrainConfig.from_dict(json.loads(values))
    start_processes(run.parallel)
    with jax.enable_x64(run.model.dtype == "float64"):
        outcome = some_steps(run, steps=int(steps))
    if jax.process_index() == 0:
        arrays = {f"gradients/{k}": v for k, v in outcome.gradients.items()}
        arrays |= {f"params/{k}": v for k, v in outcome.params.items()}
        np.savez(output, losses=outcome.losses, **arrays)


if __name__ == "__main__":
    main()
