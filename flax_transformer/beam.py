"""Beam search (Wu et al. 2016, section 7): what becomes of a sentence's beams when the next logits are there."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flax_transformer.hypotheses import (
    Hypotheses,
    LengthLimits,
    at_position,
    forced_pieces,
    never_chosen,
    nothing_found,
    only_complete,
    without_forbidden,
)
from flax_transformer.primitives import wide
from transformer_config import BeamConfig, TransformerConfig

CHUNK = 64
"""Neighbouring classes of which only the largest is looked at first when the best of all are sought."""


class BeamState(NamedTuple):
    """What a sentence has found, and the beams that go on, the best first."""

    ids: Int[Array, "batch beams room"]
    log_probs: Float[Array, "batch beams"]
    last: Int[Array, "batch beams"]
    length: Int[Array, " batch"]
    """Pieces so far."""
    limits: LengthLimits
    pool: Hypotheses
    top_ended: Bool[Array, " batch"]
    """Whether the best candidate of some step was an end."""
    over: Bool[Array, " batch"]
    """Whether the pool holds all that is wanted."""
    done: Bool[Array, " batch"]
    """It is over, or there is no more room."""


class _Candidates(NamedTuple):
    """The best continuations of all beams of a sentence, the best first."""

    log_probs: Float[Array, "batch candidates"]
    beams: Int[Array, "batch candidates"]
    """Which beam each continues."""
    tokens: Int[Array, "batch candidates"]


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """In each step the best 2·beam_size continuations of a sentence's beams are looked at: those that end among the
    first beam_size are finished and kept apart (D1, D2), the best beam_size that do not end go on."""

    config: BeamConfig
    model: TransformerConfig

    @property
    def beams(self) -> int:
        """Beams of a sentence."""
        return self.config.beam_size

    def start(self, limits: LengthLimits, _numbers: Int[Array, " batch"], *, room: int, dtype: jnp.dtype) -> BeamState:
        """Before the first piece. What may have no piece is done."""
        shape = (limits.most.shape[0], self.beams)
        pool = nothing_found((*shape, room), self.model, dtype)
        return BeamState(
            ids=pool.ids,
            # One beam to begin with: equal ones would stay equal.
            log_probs=pool.scores.at[:, 0].set(0.0),
            last=jnp.full(shape, self.model.bos_id, jnp.int32),
            length=jnp.zeros_like(limits.most),
            limits=limits,
            pool=pool,
            top_ended=jnp.zeros(shape[:1], bool),
            over=limits.most == 0,
            done=limits.most == 0,
        )

    def advance(
        self, state: BeamState, logits: Float[Array, "batch beams vocab"]
    ) -> tuple[BeamState, Int[Array, "batch beams"]]:
        """After one more piece, and which beam each of the beams that go on continues. What is done stays as it is."""
        best = self._best_continuations(state, wide(logits))
        ends = best.tokens == self.model.eos_id
        length = state.length + 1
        top = jnp.arange(best.tokens.shape[1]) < self.beams
        possible = top & (best.log_probs > -jnp.inf) & ~state.done[:, None]
        finished = possible & (ends | (length >= state.limits.most)[:, None])
        pool = self._merged(state.pool, self._hypotheses(state, best, ends), finished)
        log_probs, places = jax.lax.top_k(jnp.where(ends, -jnp.inf, best.log_probs), self.beams)
        chosen = _Candidates(log_probs, _taken(best.beams, places), _taken(best.tokens, places))
        after = BeamState(
            ids=_continued(state.ids, chosen, state.length),
            log_probs=log_probs,
            last=chosen.tokens,
            length=jnp.where(state.done, state.length, length),
            limits=state.limits,
            pool=pool,
            top_ended=state.top_ended | ends[:, 0],
            over=state.over,
            done=state.done,
        )
        over = state.over | (~state.done & self._is_over(after))
        return after._replace(over=over, done=state.done | over | (length >= state.ids.shape[-1])), chosen.beams

    def found(self, state: BeamState) -> Hypotheses:
        """The best `num_hypotheses`; none of a sentence that is not over."""
        best = jax.tree.map(lambda array: array[:, : self.config.num_hypotheses], state.pool)
        return only_complete(best, state.over, self.model)

    def _best_continuations(self, state: BeamState, logits: Float[Array, "batch beams vocab"]) -> _Candidates:
        """The best 2·beams of all beams and pieces; of equals that of the better beam, then that of the lower id."""
        shared = logits
        if self.config.renormalize:
            shared = without_forbidden(
                logits, config=self.config, model=self.model, length=state.length, limits=state.limits
            )
        normaliser = jax.nn.logsumexp(shared, axis=-1, keepdims=True)
        of_each = min(2 * self.beams, logits.shape[-1])
        values, tokens = self._best_allowed(state, logits, normaliser, of_each)
        totals = (state.log_probs[..., None] + (values - normaliser)).reshape(logits.shape[0], -1)
        best, places = jax.lax.top_k(totals, 2 * self.beams)
        return _Candidates(best, places // of_each, _taken(tokens.reshape(logits.shape[0], -1), places))

    def _best_allowed(
        self,
        state: BeamState,
        logits: Float[Array, "batch beams vocab"],
        normaliser: Float[Array, "batch beams 1"],
        number: int,
    ) -> tuple[Float[Array, "batch beams k"], Int[Array, "batch beams k"]]:
        """The best so many pieces of each beam that may be chosen, with their logits: see `allowed_logits`.

        Looked for among a few more of all, so that no copy of all logits without the others has to be made.
        """
        never = never_chosen(self.config, self.model)
        values, tokens = top_k(logits, min(number + len(never) + 1, logits.shape[-1]))
        ends_too_early = (tokens == self.model.eos_id) & (state.length < state.limits.least)[:, None, None]
        forbidden = jnp.isin(tokens, jnp.array(never, jnp.int32)) | ends_too_early
        values, places = jax.lax.top_k(jnp.where(forbidden, -jnp.inf, values), number)
        tokens = jnp.take_along_axis(tokens, places, axis=-1)
        for token, here in forced_pieces(self.config, self.model, length=state.length, limits=state.limits):
            alone = jnp.where(jnp.arange(number) == 0, normaliser, -jnp.inf)
            values = jnp.where(here[:, None, None], alone, values)
            tokens = jnp.where(here[:, None, None], token, tokens)
        return values, tokens

    def _hypotheses(self, state: BeamState, best: _Candidates, ends: Bool[Array, "batch candidates"]) -> Hypotheses:
        """The candidates as hypotheses."""
        lengths = jnp.broadcast_to((state.length + 1)[:, None], ends.shape)
        return Hypotheses(
            ids=_continued(state.ids, best, state.length),
            scores=best.log_probs / self._penalty(lengths, best.log_probs.dtype),
            log_probs=best.log_probs,
            lengths=lengths,
            ended=ends,
        )

    def _penalty(self, length: Int[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
        """What a sum of log-probabilities is divided by."""
        if self.config.length_penalty == "none":
            return jnp.ones(length.shape, dtype)
        if self.config.length_penalty == "gnmt":
            return ((5 + length.astype(dtype)) / 6) ** self.config.alpha
        return length.astype(dtype) ** self.config.alpha

    def _merged(self, pool: Hypotheses, new: Hypotheses, finished: Bool[Array, "batch candidates"]) -> Hypotheses:
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
        behind = missing.astype(jnp.int32) + (~both.ended if self.config.stopping == "bound" else 0)
        *_, order = jax.lax.sort((behind, -both.scores, places), num_keys=3)
        return jax.tree.map(lambda array: _taken(array, order[:, : self.beams]), both)

    def _is_over(self, state: BeamState) -> Bool[Array, " batch"]:
        """Whether a sentence has its greatest length, or nothing of what it could still bring is wanted."""
        return (state.length >= state.limits.most) | self._has_enough(state)

    def _has_enough(self, state: BeamState) -> Bool[Array, " batch"]:
        config, pool, best = self.config, state.pool, state.log_probs[:, 0]
        enough, full = pool.lengths[:, config.num_hypotheses - 1] > 0, pool.lengths[:, -1] > 0
        if config.stopping == "ctranslate2":
            plain = config.length_penalty == "none" or config.alpha == 0.0
            return state.top_ended & enough if plain else full
        if config.stopping == "transformers_early":
            return full
        if config.stopping == "transformers":
            return full & (best / self._penalty(state.length, best.dtype) <= pool.scores[:, -1])
        attainable = best / self._penalty(state.limits.most, best.dtype)
        if config.stopping == "transformers_never":
            return full & (attainable <= pool.scores[:, -1])
        return enough & (attainable <= pool.scores[:, config.num_hypotheses - 1]) | (best == -math.inf)


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


def _continued(
    ids: Int[Array, "batch beams room"], candidates: _Candidates, position: Int[Array, " batch"]
) -> Int[Array, "batch candidates room"]:
    return at_position(_taken(ids, candidates.beams), position, candidates.tokens)


def _taken(array: Array, places: Int[Array, "batch places"]) -> Array:
    """The entries of each sentence that stand in `places`."""
    return jnp.take_along_axis(array, places.reshape(*places.shape, *[1] * (array.ndim - 2)), axis=1)
