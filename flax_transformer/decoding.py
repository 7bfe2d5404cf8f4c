"""Greedy decoding: one jittable loop over static buffers, with a cache of keys and values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from flax_transformer.layers import LayerCache
from flax_transformer.masks import padding_mask
from flax_transformer.transformer import Transformer


class _State(NamedTuple):
    position: Int[Array, ""]
    last: Int[Array, " batch"]
    output: Int[Array, "batch max_len"]
    finished: Bool[Array, " batch"]
    caches: tuple[LayerCache, ...]


def greedy(model: Transformer, src: Int[Array, "batch src_len"], *, max_len: int) -> Int[Array, "batch max_len"]:
    """The likeliest next token, again and again, until every sentence has ended or is `max_len` pieces long.

    The output has no bos_id; it ends with eos_id where the sentence ended in time, and is pad_id from there on.
    pad_id and bos_id are never chosen, unless eos_id is the same. A row of the batch that is all padding is over at
    once. The result of a sentence does not depend on its neighbours. Raises ValueError for a `max_len` below 1.
    """
    if max_len < 1:
        raise ValueError(f"max_len: expected at least 1, got {max_len}")
    config = model.config
    never = sorted({config.pad_id, config.bos_id} - {config.eos_id})
    src_mask = padding_mask(src, pad_id=config.pad_id)
    memory = model.encode(src, src_mask=src_mask)
    batch = src.shape[0]

    def go_on(state: _State) -> Bool[Array, ""]:
        return (state.position < max_len) & ~state.finished.all()

    def step(state: _State) -> _State:
        logits, caches = model.decode_step(
            state.last[:, None], state.caches, position=state.position, src_mask=src_mask
        )
        logits = logits[:, 0].at[:, jnp.array(never, jnp.int32)].set(jnp.finfo(logits.dtype).min)
        chosen = jnp.argmax(logits, axis=-1)
        chosen = jnp.where(state.finished, config.pad_id, chosen).astype(src.dtype)
        return _State(
            position=state.position + 1,
            last=chosen,
            output=state.output.at[:, state.position].set(chosen),
            finished=state.finished | (chosen == config.eos_id),
            caches=caches,
        )

    start = _State(
        position=jnp.zeros((), jnp.int32),
        last=jnp.full(batch, config.bos_id, src.dtype),
        output=jnp.full((batch, max_len), config.pad_id, src.dtype),
        finished=~src_mask.any(axis=-1),
        caches=model.new_caches(memory, max_len=max_len),
    )
    return jax.lax.while_loop(go_on, step, start).output
