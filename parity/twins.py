"""Our own two models as a Pair: the only file of `parity` that knows them, or the trainer.

Deleting it leaves a working tool.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torch_reference
from flax_transformer.decoding import greedy as jax_greedy
from flax_transformer.parameters import abstract_model
from parity.pair import Inputs, Pair, Precision, Side
from parity.weights.twins import twin_mapping
from torch_reference.decoding import greedy as torch_greedy
from torch_reference.training import label_smoothed_cross_entropy as torch_loss
from train.batching import encode_text, evaluation_batches, plan_buckets
from train.config import BatchConfig
from train.corpus import ParallelText, load_corpus
from train.loss import label_smoothed_cross_entropy as jax_loss
from train.translate import TrainedRun, load_run
from transformer_config import TransformerConfig

LABEL_SMOOTHING = 0.1
"""The paper's (5.4)."""

DECODED_LEN = 12
"""Pieces that both decoders may give."""


def twin_pair(
    config: TransformerConfig, *, weights: Mapping[str, np.ndarray], batches: tuple[Inputs, ...], name: str
) -> Pair:
    """The torch reference and the Flax twin with `weights`, by the names of the torch reference.

    Raises ValueError for the library's attention, which has no float64 softmax to compare (see flax_transformer).
    """
    if config.attention == "library":
        raise ValueError("expected attention='plain' or 'blockwise' for a parity check, got 'library'")

    def in_precision(precision: Precision) -> TransformerConfig:
        # In bfloat16 the model computes, its parameters stay float32.
        param_dtype = "float64" if precision == "float64" else "float32"
        return config.replace(dtype=precision, param_dtype=param_dtype)

    def call(module: Any, inputs: Mapping[str, Any]) -> Any:
        return module(inputs["src"], inputs["tgt_in"])

    def reference_loss(logits: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        sums = torch_loss(logits, inputs["tgt_out"], smoothing=LABEL_SMOOTHING, pad_id=config.pad_id)
        return sums.loss, sums.num_tokens

    def port_loss(logits: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        sums = jax_loss(logits, inputs["tgt_out"], smoothing=LABEL_SMOOTHING, pad_id=config.pad_id)
        return sums.loss, sums.num_tokens

    decoded_len = min(DECODED_LEN, config.sequence_limit or DECODED_LEN)
    return Pair(
        name=name,
        reference=Side(
            build=lambda precision: torch_reference.Transformer(
                in_precision(precision), generator=torch.Generator().manual_seed(0)
            ),
            call=call,
            loss=reference_loss,
            decode=lambda module, inputs: torch_greedy(module, inputs["src"], max_len=decoded_len),
        ),
        port=Side(
            build=lambda precision: abstract_model(in_precision(precision)),
            call=call,
            loss=port_loss,
            decode=lambda module, inputs: jax_greedy(module, inputs["src"], max_len=decoded_len),
        ),
        weights=weights,
        mapping=twin_mapping(tied=config.tie_embeddings == "all"),
        inputs=batches,
        adversarial=lambda seed: hard_batches(config, seed=seed),
    )


def preset_pair(config: TransformerConfig, *, seed: int = 0, name: str = "twins") -> Pair:
    """Seeded random weights in torch, and one seeded random batch with padding."""
    return twin_pair(
        config, weights=random_weights(config, seed=seed), batches=(random_batch(config, seed=seed),), name=name
    )


def checkpoint_pair(run: Path, *, pairs: int = 24) -> Pair:
    """The trained weights of a run, and batches of its own validation text.

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
    return twin_pair(config, weights=weights, batches=_real_batches(trained, pairs=pairs), name=name)


def random_weights(config: TransformerConfig, *, seed: int) -> dict[str, np.ndarray]:
    """Initial weights of the torch reference in float32, with noise on biases and norms.

    At their initial 0 and 1 two biases that were exchanged would look alike.
    """
    generator = torch.Generator().manual_seed(seed)
    config = config.replace(dtype="float32", param_dtype="float32")
    module = torch_reference.Transformer(config, generator=generator)
    weights = {}
    for name, parameter in module.named_parameters():
        values = parameter.detach()
        if values.ndim == 1:
            values = values + 0.1 * torch.randn(values.shape, generator=generator)
        weights[name] = values.numpy()
    return weights


def random_batch(config: TransformerConfig, *, seed: int, src_len: int = 11, tgt_len: int = 9) -> dict[str, np.ndarray]:
    """Four pairs of random ids, all but the first with padding at the end; with base, 1.3 million logits."""
    rng = np.random.default_rng(seed)
    limit = config.sequence_limit or max(src_len, tgt_len)
    src_len, tgt_len = min(src_len, limit), min(tgt_len, limit)
    specials = 1 + max(config.pad_id, config.bos_id, config.eos_id)
    src = rng.integers(specials, config.src_vocab_size, (4, src_len), dtype=np.int32)
    tgt = rng.integers(specials, config.tgt_vocab_size, (4, tgt_len), dtype=np.int32)
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
