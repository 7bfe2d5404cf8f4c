"""What searches have in common: what they find, how long it may be, and which pieces may be chosen."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from transformer_config import LengthConfig, TransformerConfig

EXTRA_PIECES = 10
"""What a sentence may have beyond `max_len_ratio` times the pieces of its source."""


class LengthLimits(NamedTuple):
    """How long a translation of each sentence may be."""

    least: Int[Array, " batch"]
    """Pieces that must come before the end."""
    most: Int[Array, " batch"]
    """Pieces that may come at most; none for a source without pieces."""


class Hypotheses(NamedTuple):
    """Translations of each sentence, the best first."""

    ids: Int[Array, "batch hypotheses room"]
    """Without bos_id; with eos_id where the hypothesis ended, and pad_id from there on."""
    scores: Float[Array, "batch hypotheses"]
    """What hypotheses are ranked by: `log_probs` over the penalty for length, if any. -inf where there is none."""
    log_probs: Float[Array, "batch hypotheses"]
    """Sum of the pieces' log-probabilities, the end included."""
    lengths: Int[Array, "batch hypotheses"]
    """Pieces, the end included; 0 where there is no hypothesis."""
    ended: Bool[Array, "batch hypotheses"]
    """False for what was cut at the limit on length."""


def nothing_found(shape: tuple[int, int, int], model: TransformerConfig, dtype: jnp.dtype) -> Hypotheses:
    """No hypothesis yet, and space for (batch, hypotheses, pieces)."""
    nothing = jnp.full(shape[:2], -jnp.inf, dtype)
    return Hypotheses(
        ids=jnp.full(shape, model.pad_id, jnp.int32),
        scores=nothing,
        log_probs=nothing,
        lengths=jnp.zeros(shape[:2], jnp.int32),
        ended=jnp.zeros(shape[:2], bool),
    )


def length_limits(
    config: LengthConfig, model: TransformerConfig, src_len: int
) -> tuple[Int[np.ndarray, " lengths"], Int[np.ndarray, " lengths"]]:
    """Least and most of `LengthLimits` for sources of 0, 1, ..., `src_len` pieces.

    Raises ValueError for a `max_len` beyond a learned position table.
    """
    positions = model.sequence_limit
    if positions is not None and config.max_len > positions:
        raise ValueError(f"max_len: expected at most {positions} positions, got {config.max_len}")
    pieces = np.arange(src_len + 1)
    most = np.maximum(config.max_len, np.floor(config.max_len_growth * pieces))
    if positions is not None:
        most = np.minimum(most, positions)
    if config.max_len_ratio is not None:
        most = np.minimum(most, np.floor(config.max_len_ratio * pieces) + EXTRA_PIECES)
    least = np.maximum(config.min_len, np.ceil(config.min_len_ratio * pieces))
    most = np.where(pieces > 0, most, 0).astype(np.int32)
    return np.minimum(least, most - 1).astype(np.int32), most


def only_complete(found: Hypotheses, complete: Bool[Array, " batch"], model: TransformerConfig) -> Hypotheses:
    """Nothing of the sentences that are not complete."""

    def kept(array: Array, nothing: Array) -> Array:
        return jnp.where(complete.reshape(-1, *[1] * (array.ndim - 1)), array, nothing)

    batch, hypotheses, room = found.ids.shape
    return jax.tree.map(kept, found, nothing_found((batch, hypotheses, room), model, found.scores.dtype))


def never_chosen(config: LengthConfig, model: TransformerConfig) -> tuple[int, ...]:
    """What `config` says; by default pad_id and bos_id. The end is not among them."""
    special = {model.pad_id, model.bos_id} if config.never is None else set(config.never)
    return tuple(sorted(special - {model.eos_id}))


def forced_pieces(
    config: LengthConfig, model: TransformerConfig, *, length: Int[Array, " batch"], limits: LengthLimits
) -> list[tuple[int, Bool[Array, " batch"]]]:
    """Pieces that have to follow `length` others, and in which sentences; of two the later counts."""
    forced = [] if config.first_id is None else [(config.first_id, length == 0)]
    return [*forced, (model.eos_id, length + 1 >= limits.most)] if config.forced_end else forced


def without_forbidden(
    logits: Float[Array, "batch beams vocab"],
    *,
    config: LengthConfig,
    model: TransformerConfig,
    length: Int[Array, " batch"],
    limits: LengthLimits,
) -> Float[Array, "batch beams vocab"]:
    """The logits with -inf for what is never chosen, and for an end after fewer than the least pieces."""
    logits = logits.at[..., jnp.array(never_chosen(config, model), jnp.int32)].set(-jnp.inf)
    end = jnp.where((length >= limits.least)[:, None], logits[..., model.eos_id], -jnp.inf)
    return logits.at[..., model.eos_id].set(end)


def allowed_logits(
    logits: Float[Array, "batch beams vocab"],
    normaliser: Float[Array, "batch beams 1"],
    *,
    config: LengthConfig,
    model: TransformerConfig,
    length: Int[Array, " batch"],
    limits: LengthLimits,
) -> Float[Array, "batch beams vocab"]:
    """The logits of what may follow `length` pieces; -inf for all else: what is never chosen, an end too early.

    The log-probabilities (logits less `normaliser`) of the rest are not made larger by what is left out: they stay the
    model's, but for what is forced, which has 0.
    """
    logits = without_forbidden(logits, config=config, model=model, length=length, limits=limits)
    for token, here in forced_pieces(config, model, length=length, limits=limits):
        alone = jnp.full_like(logits, -jnp.inf).at[..., token].set(normaliser[..., 0])
        logits = jnp.where(here[:, None, None], alone, logits)
    return logits


def at_position(
    ids: Int[Array, "batch beams max_len"], position: Int[Array, " batch"], tokens: Int[Array, "batch beams"]
) -> Int[Array, "batch beams max_len"]:
    """`ids` with `tokens` at a position that each sentence has of its own."""
    here = jnp.arange(ids.shape[-1]) == position[:, None, None]
    return jnp.where(here, tokens[..., None].astype(ids.dtype), ids)
