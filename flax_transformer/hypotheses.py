"""What searches have in common: what they find, how long it may be, and which pieces may be chosen."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_config import LengthConfig, TransformerConfig

EXTRA_PIECES = 10
"""What a sentence may have beyond `max_len_ratio` times the pieces of its source."""


class Hypotheses(NamedTuple):
    """Translations of each sentence, the best first."""

    ids: Int[Array, "batch hypotheses max_len"]
    """Without bos_id; with eos_id where the hypothesis ended, and pad_id from there on."""
    scores: Float[Array, "batch hypotheses"]
    """What hypotheses are ranked by: `log_probs` over the penalty for length, if any. -inf where there is none."""
    log_probs: Float[Array, "batch hypotheses"]
    """Sum of the pieces' log-probabilities, the end included."""
    lengths: Int[Array, "batch hypotheses"]
    """Pieces, the end included; 0 where there is no hypothesis."""
    ended: Bool[Array, "batch hypotheses"]
    """False for what was cut at the limit on length."""


def nothing_found(
    shape: tuple[int, ...], config: LengthConfig, model: TransformerConfig, dtype: jnp.dtype
) -> Hypotheses:
    """No hypothesis yet, and room for (batch, hypotheses)."""
    nothing = jnp.full(shape, -jnp.inf, dtype)
    return Hypotheses(
        ids=jnp.full((*shape, config.max_len), model.pad_id, jnp.int32),
        scores=nothing,
        log_probs=nothing,
        lengths=jnp.zeros(shape, jnp.int32),
        ended=jnp.zeros(shape, bool),
    )


def longest_target(max_len_ratio: float, src_length: int) -> int:
    """Pieces at most for a source of so many, by the ratio."""
    return math.floor(max_len_ratio * src_length) + EXTRA_PIECES


def length_limits(
    config: LengthConfig, src_lengths: Int[Array, " batch"]
) -> tuple[Int[Array, " batch"], Int[Array, " batch"]]:
    """Pieces that must come before the end, and pieces that may come at most."""
    limit = jnp.full_like(src_lengths, config.max_len)
    if config.max_len_ratio is not None:
        relative = jnp.floor(config.max_len_ratio * src_lengths).astype(limit.dtype) + EXTRA_PIECES
        limit = jnp.minimum(limit, relative)
    least = jnp.ceil(config.min_len_ratio * src_lengths).astype(limit.dtype)
    return jnp.minimum(jnp.maximum(least, config.min_len), limit - 1), limit


def allowed_logits(
    logits: Float[Array, "batch beams vocab"], config: TransformerConfig, *, may_end: Bool[Array, " batch"]
) -> Float[Array, "batch beams vocab"]:
    """-inf for what is never chosen, pad_id and bos_id unless eos_id is the same, and for an end that is too early.

    The log-probabilities of the rest are not made larger by what is left out: they stay the model's.
    """
    never = jnp.array(sorted({config.pad_id, config.bos_id} - {config.eos_id}), jnp.int32)
    logits = logits.at[..., never].set(-jnp.inf)
    end = logits[..., config.eos_id]
    return logits.at[..., config.eos_id].set(jnp.where(may_end[:, None], end, -jnp.inf))


def at_position(
    ids: Int[Array, "batch beams max_len"], position: Int[Array, " batch"], tokens: Int[Array, "batch beams"]
) -> Int[Array, "batch beams max_len"]:
    """`ids` with `tokens` at a position that each sentence has of its own."""
    here = jnp.arange(ids.shape[-1]) == position[:, None, None]
    return jnp.where(here, tokens[..., None].astype(ids.dtype), ids)
