"""Greedy decoding and sampling: what becomes of a sentence's samples when the next logits are there."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flax_transformer.hypotheses import (
    Hypotheses,
    LengthLimits,
    allowed_logits,
    at_position,
    nothing_found,
    only_complete,
)
from flax_transformer.primitives import wide
from transformer_config import LengthConfig, SamplingConfig, TransformerConfig


class SamplingState(NamedTuple):
    """What there is of each sample of a sentence."""

    found: Hypotheses
    last: Int[Array, "batch beams"]
    length: Int[Array, " batch"]
    """Pieces so far, of those that have not ended."""
    limits: LengthLimits
    numbers: Int[Array, " batch"]
    """Of the sentences: what samples are drawn by."""
    over: Bool[Array, "batch beams"]
    done: Bool[Array, " batch"]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The likeliest piece, again and again; with a SamplingConfig a piece drawn from the model's distribution.

    What is drawn depends on seed, number of the sentence, number of the sample and position alone.
    """

    config: LengthConfig
    model: TransformerConfig
    seed: int = 0

    @property
    def beams(self) -> int:
        """Samples of a sentence."""
        return self.config.num_samples if isinstance(self.config, SamplingConfig) else 1

    def start(
        self, limits: LengthLimits, numbers: Int[Array, " batch"], *, room: int, dtype: jnp.dtype
    ) -> SamplingState:
        """Before the first piece. What may have no piece is done."""
        shape = (limits.most.shape[0], self.beams)
        done = limits.most == 0
        return SamplingState(
            found=nothing_found((*shape, room), self.model, dtype),
            last=jnp.full(shape, self.model.bos_id, jnp.int32),
            length=jnp.zeros_like(limits.most),
            limits=limits,
            numbers=numbers,
            over=jnp.broadcast_to(done[:, None], shape),
            done=done,
        )

    def advance(
        self, state: SamplingState, logits: Float[Array, "batch beams vocab"]
    ) -> tuple[SamplingState, Int[Array, "batch beams"]]:
        """After one more piece; every sample continues itself."""
        logits, found, over = wide(logits), state.found, state.over
        normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        allowed = allowed_logits(
            logits, normaliser, config=self.config, model=self.model, length=state.length, limits=state.limits
        )
        chosen = self._chosen(state, allowed)
        log_probs = (jnp.take_along_axis(allowed, chosen[..., None], axis=-1) - normaliser)[..., 0]
        chosen = jnp.where(over, self.model.pad_id, chosen).astype(jnp.int32)
        ended = ~over & (chosen == self.model.eos_id)
        length = state.length + 1
        before = jnp.where(found.lengths > 0, found.log_probs, 0.0)
        log_probs = jnp.where(over, found.log_probs, before + log_probs)
        after_all = over | (~state.done[:, None] & (ended | (length >= state.limits.most)[:, None]))
        after = SamplingState(
            found=Hypotheses(
                ids=jnp.where(over[..., None], found.ids, at_position(found.ids, state.length, chosen)),
                scores=log_probs,
                log_probs=log_probs,
                lengths=jnp.where(over, found.lengths, length[:, None]),
                ended=found.ended | ended,
            ),
            last=chosen,
            length=jnp.where(state.done, state.length, length),
            limits=state.limits,
            numbers=state.numbers,
            over=after_all,
            done=state.done | after_all.all(axis=1) | (length >= found.ids.shape[-1]),
        )
        return after, jnp.broadcast_to(jnp.arange(self.beams), chosen.shape)

    def found(self, state: SamplingState) -> Hypotheses:
        """In the order in which they were drawn; none of a sentence of which some are not over.

        Scores are log-probabilities of the model, not narrowed.
        """
        return only_complete(state.found, state.over.all(axis=1), self.model)

    def _chosen(self, state: SamplingState, logits: Float[Array, "batch beams vocab"]) -> Int[Array, "batch beams"]:
        if not isinstance(self.config, SamplingConfig):
            return jnp.argmax(logits, axis=-1)

        def draw(number: Array, sample: Array, position: Array, logits: Array) -> Array:
            key = jax.random.key(self.seed)
            for part in (number, sample, position):
                key = jax.random.fold_in(key, part)
            return jax.random.categorical(key, logits)

        of_sentence = jax.vmap(draw, (None, 0, None, 0))
        narrowed = _narrowed(logits / self.config.temperature, self.config)
        samples = jnp.broadcast_to(jnp.arange(self.beams), state.last.shape)
        return jax.vmap(of_sentence)(state.numbers, samples, state.length, narrowed)


def _narrowed(logits: Float[Array, "batch beams vocab"], config: SamplingConfig) -> Float[Array, "batch beams vocab"]:
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
