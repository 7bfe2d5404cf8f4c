"""Beam search: one jittable loop over static buffers, with a cache of keys and values that is never moved.

The pieces of all beams at one position stand beside each other in the cache. When a beam continues another, nothing is
copied: its lineage, which beam it was at each earlier position, becomes the mask with which it reads the cache.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flax_transformer.hypotheses import Hypotheses, allowed_logits, length_limits
from flax_transformer.layers import LayerCache
from flax_transformer.masks import padding_mask
from flax_transformer.primitives import wide
from flax_transformer.transformer import Transformer
from transformer_config import BeamConfig

CHUNK = 64
"""Neighbouring classes of which only the largest is looked at first when the best of all are sought."""


class _Alive(NamedTuple):
    """The beams that go on, the best first."""

    ids: Int[Array, "batch beams max_len"]
    log_probs: Float[Array, "batch beams"]
    last: Int[Array, "batch beams"]
    lineage: Int[Array, "batch beams max_len"]


class _State(NamedTuple):
    length: Int[Array, ""]
    alive: _Alive
    pool: Hypotheses
    top_ended: Bool[Array, " batch"]
    """Whether the best candidate of some step was an end."""
    done: Bool[Array, " batch"]
    caches: tuple[LayerCache, ...]


class _Candidates(NamedTuple):
    """The best continuations of all beams of a sentence, the best first."""

    log_probs: Float[Array, "batch candidates"]
    beams: Int[Array, "batch candidates"]
    """Which beam each continues."""
    tokens: Int[Array, "batch candidates"]


def beam_search(model: Transformer, src: Int[Array, "batch src_len"], *, config: BeamConfig) -> Hypotheses:
    """The likeliest translations that a beam finds (Wu et al. 2016, section 7), `config.num_hypotheses` a sentence.

    In each step the best 2·beam_size continuations of a sentence's beams are looked at: those that end among the first
    beam_size are finished and kept apart, the best beam_size that do not end go on. pad_id and bos_id are never chosen,
    unless eos_id is the same. A row of the batch that is all padding is over at once, without a hypothesis. The result
    of a sentence does not depend on its neighbours.

    Raises ValueError for a `max_len` beyond a learned position table.
    """
    src_mask = padding_mask(src, pad_id=model.config.pad_id)
    least, limit = length_limits(config, src_mask.sum(axis=-1))
    memory = model.encode(src, src_mask=src_mask)

    def go_on(state: _State) -> Bool[Array, ""]:
        return (state.length < config.max_len) & ~state.done.all()

    def step(state: _State) -> _State:
        logits, caches = model.decode_step(
            state.alive.last, state.caches, position=state.length, src_mask=src_mask, lineage=state.alive.lineage
        )
        best = _best_continuations(model, logits, state.alive.log_probs, may_end=state.length >= least)
        ends = best.tokens == model.config.eos_id
        length = state.length + 1
        top = jnp.arange(best.tokens.shape[1]) < config.beam_size
        finished = top & (ends | (length >= limit)[:, None]) & (best.log_probs > -jnp.inf) & ~state.done[:, None]
        pool = _merged(config, state.pool, _hypotheses(config, state.alive, best, ends, length), finished)
        alive = _going_on(config, state.alive, best, ends, state.length)
        top_ended = state.top_ended | ends[:, 0]
        over = (length >= limit) | _is_over(config, alive, pool, top_ended, length, limit)
        return _State(length, alive, pool, top_ended, state.done | over, caches)

    start = _start(model, config, src, memory)._replace(done=~src_mask.any(axis=-1))
    pool = jax.lax.while_loop(go_on, step, start).pool
    return jax.tree.map(lambda array: array[:, : config.num_hypotheses], pool)


def _start(model: Transformer, config: BeamConfig, src: Array, memory: Array) -> _State:
    batch, beams = src.shape[0], config.beam_size
    ids = jnp.full((batch, beams, config.max_len), model.config.pad_id, src.dtype)
    nothing = jnp.full((batch, beams), -jnp.inf, wide(memory[0, 0]).dtype)
    return _State(
        length=jnp.zeros((), jnp.int32),
        alive=_Alive(
            ids=ids,
            # One beam to begin with: equal ones would stay equal.
            log_probs=nothing.at[:, 0].set(0.0),
            last=jnp.full((batch, beams), model.config.bos_id, src.dtype),
            lineage=jnp.zeros((batch, beams, config.max_len), jnp.int32),
        ),
        pool=Hypotheses(
            ids=ids,
            scores=nothing,
            log_probs=nothing,
            lengths=jnp.zeros((batch, beams), jnp.int32),
            ended=jnp.zeros((batch, beams), bool),
        ),
        top_ended=jnp.zeros(batch, bool),
        done=jnp.zeros(batch, bool),
        caches=model.new_caches(memory, max_len=config.max_len, beams=beams),
    )


def _best_continuations(
    model: Transformer,
    logits: Float[Array, "batch beams vocab"],
    log_probs: Float[Array, "batch beams"],
    *,
    may_end: Bool[Array, " batch"],
) -> _Candidates:
    """The best 2·beams of all beams and pieces; of equals the one of the better beam, then the one of the lower id."""
    batch, beams, vocab = logits.shape
    logits = wide(logits)
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    logits = allowed_logits(logits, model.config, may_end=may_end)
    of_each = min(2 * beams, vocab)
    values, tokens = top_k(logits, of_each)
    totals = (log_probs[..., None] + (values - normaliser)).reshape(batch, -1)
    best, places = jax.lax.top_k(totals, 2 * beams)
    return _Candidates(best, places // of_each, _taken(tokens.reshape(batch, -1), places))


def top_k(x: Float[Array, "*batch classes"], k: int) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """`jax.lax.top_k`, in two steps where there are many classes: the k largest lie in the k chunks of largest maximum.

    A search through all classes is slow on a CPU. Of equal values the first ones are taken, as there.
    """
    classes = x.shape[-1]
    chunks = -(-classes // CHUNK)
    if chunks <= 2 * k:
        values, places = jax.lax.top_k(x, k)
        return values, places
    padding = [(0, 0)] * (x.ndim - 1) + [(0, chunks * CHUNK - classes)]
    chunked = jnp.pad(x, padding, constant_values=-jnp.inf).reshape(*x.shape[:-1], chunks, CHUNK)
    # In ascending order, so that of equal values in several chunks the first stays first.
    chosen = jnp.sort(jax.lax.top_k(chunked.max(axis=-1), k)[1], axis=-1)
    among = jnp.take_along_axis(chunked, chosen[..., None], axis=-2).reshape(*x.shape[:-1], k * CHUNK)
    values, places = jax.lax.top_k(among, k)
    return values, jnp.take_along_axis(chosen, places // CHUNK, axis=-1) * CHUNK + places % CHUNK


def _hypotheses(config: BeamConfig, alive: _Alive, best: _Candidates, ends: Array, length: Array) -> Hypotheses:
    """The candidates as hypotheses of `length` pieces."""
    counted = length - ends if config.stopping == "ctranslate2" else jnp.broadcast_to(length, ends.shape)
    return Hypotheses(
        ids=_continued(alive.ids, best, length - 1),
        scores=best.log_probs / _penalty(config, counted).astype(best.log_probs.dtype),
        log_probs=best.log_probs,
        lengths=jnp.broadcast_to(length, ends.shape),
        ended=ends,
    )


def _penalty(config: BeamConfig, length: Int[Array, "..."]) -> Float[Array, "..."]:
    """What a sum of log-probabilities is divided by."""
    if config.length_penalty == "none":
        return jnp.ones(length.shape)
    if config.length_penalty == "gnmt":
        return ((5.0 + length) / 6.0) ** config.alpha
    return jnp.asarray(length, jnp.result_type(float)) ** config.alpha


def _merged(
    config: BeamConfig, pool: Hypotheses, new: Hypotheses, finished: Bool[Array, "batch candidates"]
) -> Hypotheses:
    """The best of the pool and of those candidates that are finished."""
    new = new._replace(
        scores=jnp.where(finished, new.scores, -jnp.inf),
        log_probs=jnp.where(finished, new.log_probs, -jnp.inf),
        lengths=jnp.where(finished, new.lengths, 0),
        ended=new.ended & finished,
    )
    both = jax.tree.map(lambda first, second: jnp.concatenate([first, second], axis=1), pool, new)
    places = jnp.broadcast_to(jnp.arange(both.scores.shape[1]), both.scores.shape)
    missing = both.lengths == 0
    behind = missing.astype(jnp.int32) + (~both.ended if config.stopping == "bound" else 0)
    *_, order = jax.lax.sort((behind, -both.scores, places), num_keys=3)
    return jax.tree.map(lambda array: _taken(array, order[:, : config.beam_size]), both)


def _going_on(config: BeamConfig, alive: _Alive, best: _Candidates, ends: Array, length: Array) -> _Alive:
    """The best that do not end."""
    log_probs, places = jax.lax.top_k(jnp.where(ends, -jnp.inf, best.log_probs), config.beam_size)
    chosen = _Candidates(log_probs, _taken(best.beams, places), _taken(best.tokens, places))
    # At this position each beam's piece stood in its own slot.
    own = alive.lineage.at[:, :, length].set(jnp.arange(config.beam_size, dtype=alive.lineage.dtype))
    return _Alive(
        ids=_continued(alive.ids, chosen, length),
        log_probs=log_probs,
        last=chosen.tokens.astype(alive.last.dtype),
        lineage=_taken(own, chosen.beams),
    )


def _is_over(
    config: BeamConfig, alive: _Alive, pool: Hypotheses, top_ended: Array, length: Array, limit: Array
) -> Bool[Array, " batch"]:
    """Whether nothing of what a sentence could still bring is wanted."""
    best = alive.log_probs[:, 0]
    enough, full = pool.lengths[:, config.num_hypotheses - 1] > 0, pool.lengths[:, -1] > 0
    if config.stopping == "ctranslate2":
        plain = config.length_penalty == "none" or config.alpha == 0.0
        return top_ended & enough if plain else full
    if config.stopping == "transformers_early":
        return full
    if config.stopping == "transformers":
        return full & (best / _penalty(config, length) <= pool.scores[:, -1])
    attainable = best / _penalty(config, limit).astype(best.dtype)
    if config.stopping == "transformers_never":
        return full & (attainable <= pool.scores[:, -1])
    return enough & (attainable <= pool.scores[:, config.num_hypotheses - 1]) | (best == -math.inf)


def _continued(ids: Int[Array, "batch beams max_len"], candidates: _Candidates, position: Array) -> Array:
    return _taken(ids, candidates.beams).at[:, :, position].set(candidates.tokens.astype(ids.dtype))


def _taken(array: Array, places: Int[Array, "batch places"]) -> Array:
    """The entries of each sentence that stand in `places`."""
    return jnp.take_along_axis(array, places.reshape(*places.shape, *[1] * (array.ndim - 2)), axis=1)
