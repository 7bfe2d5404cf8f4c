"""Decoding piece by piece, greedy or by sampling: one jittable loop over static buffers, with a cache (D5)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from flax_transformer.beam import beam_search
from flax_transformer.hypotheses import Hypotheses, allowed_logits, length_limits
from flax_transformer.layers import LayerCache
from flax_transformer.masks import padding_mask
from flax_transformer.primitives import wide
from flax_transformer.transformer import Transformer
from transformer_config import LengthConfig, SamplingConfig

__all__ = ["Hypotheses", "beam_search", "greedy", "sample"]

Choose = Callable[[Float[Array, "batch samples vocab"], Int[Array, ""]], Int[Array, "batch samples"]]
"""Out of the logits of all pieces, -inf where one may not be, and the position: the next piece."""


class _State(NamedTuple):
    position: Int[Array, ""]
    last: Int[Array, "batch samples"]
    ids: Int[Array, "batch samples max_len"]
    log_probs: Float[Array, "batch samples"]
    lengths: Int[Array, "batch samples"]
    ended: Bool[Array, "batch samples"]
    done: Bool[Array, "batch samples"]
    caches: tuple[LayerCache, ...]


def greedy(model: Transformer, src: Int[Array, "batch src_len"], *, config: LengthConfig) -> Hypotheses:
    """The likeliest next piece, again and again, until every sentence has ended or is as long as it may be.

    One hypothesis a sentence, whose score is its log-probability. pad_id and bos_id are never chosen, unless eos_id is
    the same. A row of the batch that is all padding is over at once. The result of a sentence does not depend on its
    neighbours. Raises ValueError for a `max_len` beyond a learned position table.
    """
    return _piece_by_piece(model, src, config, samples=1, choose=lambda logits, _: jnp.argmax(logits, axis=-1))


def sample(
    model: Transformer,
    src: Int[Array, "batch src_len"],
    *,
    keys: Key[Array, " batch"],
    config: SamplingConfig,
) -> Hypotheses:
    """`config.num_samples` translations of each sentence, drawn piece by piece; in the order in which they were drawn.

    Scores are log-probabilities of the model itself, neither tempered nor narrowed. What is drawn for a sentence
    depends on its own key alone: not on its neighbours, nor on how many samples there are of it.
    Otherwise as `greedy`.
    """
    of_sample = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys, jnp.arange(config.num_samples))

    def choose(logits: Float[Array, "batch samples vocab"], position: Int[Array, ""]) -> Int[Array, "batch samples"]:
        of_position = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))(of_sample, position)
        return jax.vmap(jax.vmap(jax.random.categorical))(of_position, _narrowed(logits / config.temperature, config))

    return _piece_by_piece(model, src, config, samples=config.num_samples, choose=choose)


def _narrowed(logits: Float[Array, "batch samples vocab"], config: SamplingConfig) -> Array:
    """-inf for what is not among the likeliest; of pieces equally likely at the border all are kept."""
    if config.top_k is not None:
        border = jax.lax.top_k(logits, min(config.top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits >= border, logits, -jnp.inf)
    if config.top_p is not None:
        likeliest_first = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(likeliest_first, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        border = jnp.where(before < config.top_p, likeliest_first, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits >= border, logits, -jnp.inf)
    return logits


def _piece_by_piece(
    model: Transformer, src: Int[Array, "batch src_len"], config: LengthConfig, *, samples: int, choose: Choose
) -> Hypotheses:
    pad_id, eos_id = model.config.pad_id, model.config.eos_id
    src_mask = padding_mask(src, pad_id=pad_id)
    least, limit = length_limits(config, src_mask.sum(axis=-1))
    memory = model.encode(src, src_mask=src_mask)
    shape = (src.shape[0], samples)
    # Samples are beams that never change places.
    own = jnp.broadcast_to(jnp.arange(samples)[:, None], (*shape, config.max_len)) if samples > 1 else None

    def go_on(state: _State) -> Bool[Array, ""]:
        return (state.position < config.max_len) & ~state.done.all()

    def step(state: _State) -> _State:
        logits, caches = model.decode_step(
            state.last, state.caches, position=state.position, src_mask=src_mask, lineage=own
        )
        logits = wide(logits)
        chosen = choose(allowed_logits(logits, model.config, may_end=state.position >= least), state.position)
        log_probs = jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)
        length = state.position + 1
        ended = ~state.done & (chosen == eos_id)
        chosen = jnp.where(state.done, pad_id, chosen).astype(src.dtype)
        return _State(
            position=length,
            last=chosen,
            ids=state.ids.at[:, :, state.position].set(chosen),
            log_probs=jnp.where(state.done, state.log_probs, state.log_probs + log_probs),
            lengths=jnp.where(state.done, state.lengths, length),
            ended=state.ended | ended,
            done=state.done | ended | (length >= limit)[:, None],
            caches=caches,
        )

    start = _State(
        position=jnp.zeros((), jnp.int32),
        last=jnp.full(shape, model.config.bos_id, src.dtype),
        ids=jnp.full((*shape, config.max_len), pad_id, src.dtype),
        log_probs=jnp.zeros(shape, wide(memory[0, 0]).dtype),
        lengths=jnp.zeros(shape, jnp.int32),
        ended=jnp.zeros(shape, bool),
        done=jnp.broadcast_to(~src_mask.any(axis=-1, keepdims=True), shape),
        caches=model.new_caches(memory, max_len=config.max_len, beams=samples),
    )
    found = jax.lax.while_loop(go_on, step, start)
    scores = jnp.where(found.lengths > 0, found.log_probs, -jnp.inf)
    return Hypotheses(found.ids, scores, scores, found.lengths, found.ended)
