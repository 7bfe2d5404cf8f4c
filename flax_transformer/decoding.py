"""Decoding: one jittable loop over static buffers, with a cache of keys and values that is never moved (D5).

Sentences are decoded in slots, and sentences that wait take the slots of those that are done, so that a long one delays
no other. The cache is a ring of positions common to all slots, in which the pieces of all beams at one position stand
beside each other; what belongs to a beam's own past is said by a mask: a slot's past begins where its sentence began,
and a beam's lineage says which beam it was at each position. So nothing is copied when beams continue each other.
"""

import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from flax_transformer.beam import BeamSearch
from flax_transformer.hypotheses import Hypotheses, LengthLimits, length_limits
from flax_transformer.layers import LayerCache
from flax_transformer.masks import padding_mask
from flax_transformer.parameters import without_recomputing
from flax_transformer.sampling import Sampling
from flax_transformer.transformer import Transformer
from transformer_config import BeamConfig, LengthConfig, SamplingConfig

__all__ = ["Hypotheses", "beam_search", "decode", "greedy", "sample"]

PARTS_FILLED = 8
"""Of this many parts of all slots one is filled with new sentences at a time."""
FEWER_SLOTS = (4, 16)
"""When no sentence waits, and those that are left fit in one of so many parts of the slots, only these are decoded."""


Search = BeamSearch | Sampling
"""What is done with logits, sentence by sentence: `start`, `advance` by a piece, `found`. Its state is a NamedTuple of
arrays with a row a sentence, of which the loop reads `last`, the pieces that stand last in each beam, `length`, how
many there are, and `done`."""


class _Slots(NamedTuple):
    """The sentences that are being decoded."""

    sentence: Int[Array, " slots"]
    """Number of each in `src`; the number of all where a slot has had none yet."""
    search: Any
    src_mask: Bool[Array, "slots src_len"]
    lineage: Int[Array, "slots beams room"]
    """Which beam each beam was at each position of the ring."""
    caches: tuple[LayerCache, ...]


class _State(NamedTuple):
    step: Int[Array, ""]
    waiting: Int[Array, ""]
    """Number of the first sentence that waits."""
    slots: _Slots
    found: Hypotheses


def beam_search(
    model: Transformer,
    src: Int[Array, "batch src_len"],
    *,
    config: BeamConfig,
    slots: int | None = None,
    room: int | None = None,
) -> Hypotheses:
    """The likeliest translations that a beam finds, `config.num_hypotheses` a sentence; see `BeamSearch`, `decode`."""
    return decode(model, src, search=BeamSearch(config, model.config), slots=slots, room=room)


def greedy(
    model: Transformer,
    src: Int[Array, "batch src_len"],
    *,
    config: LengthConfig,
    slots: int | None = None,
    room: int | None = None,
) -> Hypotheses:
    """The likeliest next piece, again and again; one hypothesis a sentence; see `decode`."""
    return decode(model, src, search=Sampling(config, model.config), slots=slots, room=room)


def sample(
    model: Transformer,
    src: Int[Array, "batch src_len"],
    *,
    config: SamplingConfig,
    seed: int = 0,
    numbers: Int[Array, " batch"] | None = None,
    slots: int | None = None,
    room: int | None = None,
) -> Hypotheses:
    """`config.num_samples` translations of each sentence, drawn by its number; see `Sampling`, `decode`."""
    return decode(model, src, search=Sampling(config, model.config, seed), numbers=numbers, slots=slots, room=room)


def decode(
    model: Transformer,
    src: Int[Array, "batch src_len"],
    *,
    search: Search,
    numbers: Int[Array, " batch"] | None = None,
    slots: int | None = None,
    room: int | None = None,
) -> Hypotheses:
    """What `search` finds for each sentence, with at most so many `slots` decoded together; by default all.

    There is room for so many pieces, by default for the longest that may be. Less is faster, because attention runs
    over all of it; a sentence whose search is not over then has no hypothesis.

    pad_id and bos_id are never chosen, unless eos_id is the same. A row of the batch that is all padding has no
    hypothesis. The result of a sentence does not depend on its neighbours, nor on `slots`, but for rounding (D3).
    Raises ValueError for a `max_len` beyond a learned position table, for less than one slot and for no room.
    """
    model = without_recomputing(model)
    batch = src.shape[0]
    slots = batch if slots is None else min(slots, batch)
    if slots < 1:
        raise ValueError(f"slots: expected at least 1, got {slots}")
    least, most = length_limits(search.config, model.config, src.shape[1])
    limits = LengthLimits(jnp.asarray(least), jnp.asarray(most))
    longest = max(search.config.max_len, int(most.max()))
    room = longest if room is None else min(room, longest)
    if room < 1:
        raise ValueError(f"room: expected at least 1 piece, got {room}")
    # With as many slots as sentences all are filled at once.
    fill = batch if slots == batch else max(1, slots // PARTS_FILLED)
    numbers = jnp.arange(batch, dtype=jnp.int32) if numbers is None else numbers
    src = jnp.pad(src, ((0, -batch % fill), (0, 0)), constant_values=model.config.pad_id)
    numbers = jnp.pad(numbers, (0, -batch % fill))

    def refill(state: _State) -> _State:
        rows, of_rows = (jax.lax.dynamic_slice_in_dim(array, state.waiting, fill) for array in (src, numbers))
        found = _collected(state.found, state.slots, search)
        places = jnp.argsort(~state.slots.search.done, stable=True)[:fill]
        filled = _filled(state.slots, places, model, search, rows, limits, numbers=of_rows, first=state.waiting)
        return _State(state.step, state.waiting + fill, filled, found)

    def step(state: _State) -> _State:
        return state._replace(step=state.step + 1, slots=_advanced(model, search, state.slots, state.step))

    # Rows of padding at the end are not waited for.
    last = jnp.max(jnp.where((src != model.config.pad_id).any(axis=1), jnp.arange(src.shape[0]) + 1, 0))

    def is_waiting(state: _State) -> Bool[Array, ""]:
        return state.waiting < last

    def goes_on(state: _State, enough: int) -> Bool[Array, ""]:
        """Until there is room for new sentences, or, when none waits, at most `enough` are left."""
        left = (~state.slots.search.done).sum()
        return (left > 0) & jnp.where(is_waiting(state), left > slots - fill, left > enough)

    sizes = [slots, *(slots // part for part in FEWER_SLOTS if slots >= part), 0]
    # Whenever something waits and the inner loop has ended, there is room for it.
    state = jax.lax.while_loop(
        is_waiting,
        lambda state: jax.lax.while_loop(partial(goes_on, enough=sizes[1]), step, refill(state)),
        _empty(model, search, src, slots, room),
    )
    for size, enough in itertools.pairwise(sizes[1:]):
        state = jax.lax.while_loop(partial(goes_on, enough=enough), step, _in_fewer_slots(state, search, size))
    found = _collected(state.found, state.slots, search)
    return jax.tree.map(lambda array: array[:batch], found)


def _in_fewer_slots(state: _State, search: Search, size: int) -> _State:
    """When at most `size` sentences are left."""
    left_first = jnp.argsort(state.slots.search.done, stable=True)[:size]
    return state._replace(
        slots=jax.tree.map(lambda array: array[left_first], state.slots),
        found=_collected(state.found, state.slots, search),
    )


def _empty(model: Transformer, search: Search, src: Int[Array, "sentences src_len"], slots: int, room: int) -> _State:
    """Slots that are done without having had a sentence."""
    sentences, src_len = src.shape
    nothing = jnp.zeros(slots, jnp.int32)
    memory = jnp.zeros((slots, src_len, model.config.d_model), model.config.dtype)
    of_all = jnp.zeros(sentences, jnp.int32)
    dtype = _scores_dtype(model)
    started: Any = search.start(LengthLimits(of_all, of_all), of_all, room=room, dtype=dtype)
    return _State(
        step=jnp.zeros((), jnp.int32),
        waiting=jnp.zeros((), jnp.int32),
        slots=_Slots(
            sentence=jnp.full(slots, sentences, jnp.int32),
            search=search.start(LengthLimits(nothing, nothing), nothing, room=room, dtype=dtype),
            src_mask=jnp.zeros((slots, src_len), bool),
            lineage=jnp.zeros((slots, search.beams, room), jnp.int32),
            caches=model.new_caches(memory, max_len=room, beams=search.beams),
        ),
        found=search.found(started),
    )


def _filled(
    slots: _Slots,
    places: Int[Array, " fill"],
    model: Transformer,
    search: Search,
    src: Int[Array, "fill src_len"],
    limits_by_length: LengthLimits,
    *,
    numbers: Int[Array, " fill"],
    first: Int[Array, ""],
) -> _Slots:
    """With new sentences in some places. The ring stays as it is: its mask leaves out what was there before."""
    src_mask = padding_mask(src, pad_id=model.config.pad_id)
    memories = model.memory_caches(model.encode(src, src_mask=src_mask))
    limits = jax.tree.map(lambda by_length: by_length[src_mask.sum(axis=-1)], limits_by_length)
    started: Any = search.start(limits, numbers, room=slots.lineage.shape[-1], dtype=_scores_dtype(model))

    def put(array: Array, new: Array) -> Array:
        return array.at[places].set(new)

    return _Slots(
        sentence=put(slots.sentence, first + jnp.arange(src.shape[0], dtype=jnp.int32)),
        search=jax.tree.map(put, slots.search, started),
        src_mask=put(slots.src_mask, src_mask),
        lineage=slots.lineage,
        caches=tuple(
            LayerCache(cache.own, jax.tree.map(put, cache.memory, memory))
            for cache, memory in zip(slots.caches, memories, strict=True)
        ),
    )


def _advanced(model: Transformer, search: Search, slots: _Slots, step: Int[Array, ""]) -> _Slots:
    """One more piece in every slot."""
    ring = slots.lineage.shape[2]
    column = step % ring
    state = slots.search
    lineage = slots.lineage.at[:, :, column].set(jnp.arange(search.beams, dtype=jnp.int32))
    logits, caches = model.decode_step(
        state.last,
        slots.caches,
        positions=state.length,
        key_positions=state.length[:, None] - (step - jnp.arange(ring)) % ring,
        column=column,
        lineage=lineage,
        src_mask=slots.src_mask,
    )
    state, parents = search.advance(state, logits)
    lineage = jnp.take_along_axis(lineage, parents[..., None], axis=1)
    return slots._replace(search=state, lineage=lineage, caches=caches)


def _collected(found: Hypotheses, slots: _Slots, search: Search) -> Hypotheses:
    """With what those slots have found that are done."""
    beyond = found.lengths.shape[0]
    sentences = jnp.where(slots.search.done, slots.sentence, beyond)
    of_slots = search.found(slots.search)
    return jax.tree.map(lambda array, new: array.at[sentences].set(new, mode="drop"), found, of_slots)


def _scores_dtype(model: Transformer) -> jnp.dtype:
    return jnp.promote_types(model.config.dtype, jnp.float32)
