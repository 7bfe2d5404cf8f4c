"""Our own two models as a Pair. This file and its neighbours `twins_*.py` are all of `parity` that knows them, or the
trainer: deleting them leaves a working tool.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flax_transformer
from flax_transformer.decoding import beam_search as jax_beam_search
from flax_transformer.decoding import greedy as jax_greedy
from flax_transformer.parameters import (
    abstract_model,
    fixed_arrays,
    initial_parameters,
    parameters,
)
from parity import twins_training
from parity.compilation import jit
from parity.pair import Inputs, Pair, Precision, Side, Training
from parity.twins_sites import Sites, port_sites
from parity.weights.twins import twin_mapping
from train.batching import evaluation_batches, plan_buckets
from train.config import BatchConfig, OptimizerConfig
from train.corpus import ParallelText, load_corpus
from train.loss import label_smoothed_cross_entropy
from train.schedule import make_schedule
from train.sentences import encode_text
from train.state import TrainState, make_adam, make_clipping, make_optimizer
from train.step import Arrays, make_update
from train.translate import TrainedRun, load_run
from transformer_config import BeamConfig, LengthConfig, TransformerConfig

LABEL_SMOOTHING = 0.1
"""The paper's (5.4)."""

OPTIMIZER = OptimizerConfig(warmup_steps=40)
"""With a warm-up short enough that the steps of a trajectory move the parameters, and see both sides of it."""

DECODED_LEN = 12
"""Pieces that both decoders may give."""


def twin_pair(
    config: TransformerConfig,
    *,
    weights: Mapping[str, np.ndarray],
    batches: Sequence[Inputs] | Callable[[int], Inputs],
    name: str,
    optimizer: OptimizerConfig = OPTIMIZER,
    smoothing: float = LABEL_SMOOTHING,
) -> Pair:
    """The torch reference and the Flax twin with `weights`, by the names of the torch reference.

    Raises ValueError for the library's attention, which has no float64 softmax to compare (see flax_transformer).
    """
    if config.attention == "library":
        raise ValueError("expected attention='plain' or 'blockwise' for a parity check, got 'library'")
    warmup = optimizer.warmup_steps
    decay = optimizer.decay_steps or warmup
    around = (1, 2, warmup - 1, warmup, warmup + 1, 2 * warmup, (warmup + decay) // 2, decay, 100_000)
    return Pair(
        name=name,
        reference=_reference_side(config, optimizer, smoothing=smoothing),
        port=_port_side(config, optimizer, smoothing=smoothing),
        weights=weights,
        mapping=twin_mapping(tied=config.tie_embeddings == "all"),
        inputs=batches,
        adversarial=lambda seed: hard_batches(config, seed=seed),
        schedule_steps=tuple(step for step in dict.fromkeys(around) if step >= 1),
    )


def has_reference(optimizer: OptimizerConfig) -> bool:
    """Whether the torch reference can take the same steps."""
    return optimizer.name == "adam" and optimizer.schedule in ("noam", "cosine")


def _reference_side(config: TransformerConfig, optimizer: OptimizerConfig, *, smoothing: float) -> Side:
    """Where torch is not installed, one that cannot be built: a golden file stands in its place."""
    reference = _reference_module()
    return Side(build=_no_reference) if reference is None else reference.side(config, optimizer, smoothing=smoothing)


def _reference_module() -> Any:
    """None where torch is not installed."""
    try:
        return importlib.import_module("parity.twins_reference")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None


def _no_reference() -> Any:
    raise ImportError("expected torch to be installed, to run the reference")


def _port_side(config: TransformerConfig, optimizer: OptimizerConfig, *, smoothing: float) -> Side:
    clipping = make_clipping(optimizer)
    schedule = make_schedule(optimizer, d_model=config.d_model)
    # When it is first called: a float64 model is only made where float64 is switched on.
    update = functools.cache(lambda: jit(make_update(in_precision(config, "float64"), optimizer, smoothing=smoothing)))
    sites = Sites(config, port_sites)
    in_float32 = in_precision(config, "float32")
    # Put together anew each time: it may be changed by whoever has it.
    parts = functools.cache(lambda precision: nnx.split(abstract_model(in_precision(config, precision))))
    draw_parameters = jit(lambda key: initial_parameters(in_float32, key))
    draw = jit(lambda key, inputs: sites.draw(inputs, flax_transformer.DropoutKey(key)))

    def loss(logits: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        sums = label_smoothed_cross_entropy(logits, inputs["tgt_out"], smoothing=smoothing, pad_id=config.pad_id)
        return sums.loss, sums.num_tokens

    def start(model: Any) -> TrainState:
        params = parameters(model)
        return TrainState(
            jnp.zeros((), jnp.int32),
            params,
            make_optimizer(optimizer, d_model=config.d_model).init(params),
            fixed=fixed_arrays(model) or None,
        )

    def step(state: TrainState, inputs: Mapping[str, Any], masks: Mapping[str, Any]) -> tuple[TrainState, Any]:
        batch = Arrays.whole(inputs["src"], inputs["tgt_in"], inputs["tgt_out"])
        state, metrics = update()(state, batch, flax_transformer.DropoutMasks(masks))
        return state, metrics.loss

    return Side(
        build=lambda precision: nnx.merge(*parts(precision)),
        call=lambda module, inputs: module(inputs["src"], inputs["tgt_in"]),
        loss=loss,
        draw_dropout=lambda module, inputs, seed: draw(jax.random.key(seed), dict(inputs)),
        dropout_rates=lambda module, inputs: sites.rates(inputs),
        call_with_dropout=lambda module, inputs, masks: module(
            inputs["src"], inputs["tgt_in"], dropout=flax_transformer.DropoutMasks(masks)
        ),
        initial=lambda seed: draw_parameters(jax.random.key(seed)),
        clip=lambda gradients: clipping.update(gradients, clipping.init(gradients))[0],
        optimizer=make_adam(optimizer, 1.0),
        schedule=lambda step: schedule(step - 1),
        training=Training(
            start=start,
            step=step,
            parameters=lambda state: state.params,
            modes=lambda: twins_training.modes(
                in_precision(config, "float64"), optimizer, smoothing=smoothing, start=start
            ),
        ),
        decode=lambda module, inputs: _decoded(module, inputs["src"], beam=decoded_beam(config)),
    )


def _decoded(module: flax_transformer.Transformer, src: Any, *, beam: BeamConfig) -> dict[str, Any]:
    found = jax_beam_search(module, src, config=beam)
    # Fewer slots than sentences, so that some have to wait.
    greedy = jax_greedy(module, src, config=LengthConfig(max_len=beam.max_len), slots=max(1, src.shape[0] - 1))
    return {
        "ids": greedy.ids[:, 0],
        "beam_ids": found.ids,
        "beam_scores": jnp.where(found.lengths > 0, found.scores, 0.0),
    }


def in_precision(config: TransformerConfig, precision: Precision) -> TransformerConfig:
    """In bfloat16 the model computes, its parameters stay float32."""
    return config.replace(dtype=precision, param_dtype="float64" if precision == "float64" else "float32")


def decoded_beam(config: TransformerConfig) -> BeamConfig:
    """The search that both decoders make, as long as the positions reach."""
    max_len = min(DECODED_LEN, config.sequence_limit or DECODED_LEN)
    return BeamConfig(beam_size=3, num_hypotheses=3, max_len=max_len)


def random_weights(config: TransformerConfig, *, seed: int) -> dict[str, np.ndarray]:
    """Initial weights of the torch reference in float32, with noise on biases and norms.

    At their initial 0 and 1 two biases that were exchanged would look alike. Without torch none: a golden file has its
    own.
    """
    reference = _reference_module()
    return {} if reference is None else reference.initial_weights(config, seed=seed)


def preset_pair(config: TransformerConfig, *, seed: int = 0, name: str = "twins") -> Pair:
    """Seeded random weights in torch, and seeded random batches with padding."""
    return twin_pair(
        config,
        weights=random_weights(config, seed=seed),
        batches=lambda further: random_batch(config, seed=seed + further),
        name=name,
    )


def checkpoint_pair(run: Path, *, pairs: int = 24) -> Pair:
    """The trained weights of a run, and batches of its own validation text.

    What the reference does not have, the check leaves out and the pair's name says so: of a run with another optimizer
    or schedule, Adam and Noam take the training steps.

    Raises FileNotFoundError or ValueError that names what is missing from the run.
    """
    trained = load_run(run)
    config = trained.config.model
    name = f"{run}, step {trained.step:,}"
    if config.attention == "library":
        config, name = config.replace(attention="plain"), f"{name}, with plain attention"
    if config.param_dtype != "float32":
        name = f"{name}, its {config.param_dtype} weights as float32"
    # To float32 every narrower dtype goes exactly; a float64 weight is rounded, for both sides alike.
    params = {name: np.asarray(array).astype(np.float32) for name, array in trained.params.items()}
    weights = twin_mapping(tied=config.tie_embeddings == "all").inverse().apply(params)
    batches: tuple[Inputs, ...] = (random_batch(config, seed=0), random_batch(config, seed=1, src_len=23, tgt_len=19))
    if trained.config.tokenizer.kind == "bpe" or not trained.config.corpus.is_missing:
        batches = _real_batches(trained, pairs=pairs)
    else:
        name = f"{name}, on random ids, for it has no text of its own"
    optimizer = trained.config.optimizer
    if not has_reference(optimizer):
        name = f"{name}, where Adam and Noam take the place of {optimizer.name} and {optimizer.schedule}"
        optimizer = dataclasses.replace(OPTIMIZER, clip_norm=optimizer.clip_norm)
    return twin_pair(
        config,
        weights=weights,
        batches=batches,
        name=name,
        optimizer=optimizer,
        smoothing=trained.config.label_smoothing,
    )


def random_batch(config: TransformerConfig, *, seed: int, src_len: int = 11, tgt_len: int = 9) -> dict[str, np.ndarray]:
    """Four pairs of random ids, all but the first with padding at the end; with base, 1.3 million logits."""
    rng = np.random.default_rng(seed)
    limit = config.sequence_limit or max(src_len, tgt_len)
    src_len, tgt_len = min(src_len, limit), min(tgt_len, limit)
    special = (config.pad_id, config.bos_id, config.eos_id)

    def draw(vocab_size: int, length: int) -> np.ndarray:
        pieces = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), special)
        return pieces[rng.integers(len(pieces), size=(4, length), dtype=np.int32)]

    src, tgt = draw(config.src_vocab_size, src_len), draw(config.tgt_vocab_size, tgt_len)
    for row, (src_padding, tgt_padding) in enumerate(((0, 0), (2, 3), (5, 1), (7, 4))):
        src_end, tgt_end = max(1, src_len - src_padding), max(1, tgt_len - tgt_padding)
        src[row, src_end - 1 :], tgt[row, tgt_end - 1 :] = config.pad_id, config.pad_id
        src[row, src_end - 1], tgt[row, tgt_end - 1] = config.eos_id, config.eos_id
    tgt_in = np.concatenate([np.full((4, 1), config.bos_id, np.int32), tgt[:, :-1]], axis=1)
    tgt_in[tgt == config.pad_id] = config.pad_id
    return {"src": src, "tgt_in": tgt_in, "tgt_out": tgt}


def hard_batches(config: TransformerConfig, *, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Rows in which every key is masked, padding on the left, equal tokens; a length of 1, and long ones (P15-P17)."""
    usual = random_batch(config, seed=seed)
    nothing = {name: ids.copy() for name, ids in usual.items()}
    nothing["src"][0] = config.pad_id
    nothing["tgt_in"][1] = nothing["tgt_out"][1] = config.pad_id
    equal = {name: np.where(ids == config.pad_id, ids, ids.max()) for name, ids in usual.items()}
    return {
        "a source and a target of padding only": nothing,
        "padding on the left": {name: np.ascontiguousarray(ids[:, ::-1]) for name, ids in usual.items()},
        "equal tokens": equal,
        "a length of 1": {name: ids[:2, :1] for name, ids in usual.items()},
        "long sequences": random_batch(config, seed=seed, src_len=67, tgt_len=58),
    }


def _real_batches(trained: TrainedRun, *, pairs: int) -> tuple[Inputs, ...]:
    """Two batches of different shape out of the run's validation text."""
    text = load_corpus(trained.config.corpus).validation
    encoded = encode_text(ParallelText(source=text.source[:pairs], target=text.target[:pairs]), trained.tokenizer)
    longest = int(encoded.lengths.max())
    budget = BatchConfig(max_tokens=max(longest, longest * pairs // 2), num_buckets=2, max_len=longest)
    plan = evaluation_batches(encoded, plan_buckets(encoded, config=budget))
    return tuple({"src": batch.src, "tgt_in": batch.tgt_in, "tgt_out": batch.tgt_out} for batch in plan)
