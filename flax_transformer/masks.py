"""Which query may attend to which key: padding, causal, local window, combined. True = may attend (paper 3.1, 3.2.3).

Worked example, window=1, causal, the last of four keys is padding; rows are queries, columns are keys:

    causal      window      padding     all three
    1 0 0 0     1 1 0 0     1 1 1 0     1 0 0 0
    1 1 0 0     1 1 1 0     1 1 1 0     1 1 0 0
    1 1 1 0     0 1 1 1     1 1 1 0     0 1 1 0
    1 1 1 1     0 0 1 1     1 1 1 0     0 0 1 0

Several pairs packed into one row attend within their own segments; here two pairs, of two tokens and one, and padding:

    segments 1 1 2 0    with causal and padding
    1 1 0 0             1 0 0 0
    1 1 0 0             1 1 0 0
    0 0 1 0             0 0 1 0
    0 0 0 1             0 0 0 0

Padding is masked in key columns only; rows of padding attend like any other, and whoever uses the output ignores them.
A row in which nothing may be attended to gets an output of zeros, and no gradient.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


def padding_mask(ids: Int[Array, "batch length"], *, pad_id: int) -> Bool[Array, "batch length"]:
    """True where there is a real token."""
    return ids != pad_id


def causal_mask(
    query_positions: Int[Array, "... queries"], key_positions: Int[Array, "... keys"]
) -> Bool[Array, "... queries keys"]:
    """True where the key is not after the query."""
    return key_positions[..., None, :] <= query_positions[..., :, None]


def window_mask(
    query_positions: Int[Array, "... queries"], key_positions: Int[Array, "... keys"], *, window: int
) -> Bool[Array, "... queries keys"]:
    """True where the key is at most `window` positions from the query, to either side."""
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    return jnp.abs(distance) <= window


class Packing(NamedTuple):
    """Which token belongs to which of the pairs of sentences that share a row of the batch.

    0 is padding; 1, 2, ... number the pairs of a row. A pair bears the same number in source and target, and its tokens
    stand side by side.
    """

    src_segments: Int[Array, "batch src_len"]
    tgt_segments: Int[Array, "batch tgt_len"]


def segment_positions(segments: Int[Array, "batch length"]) -> Int[Array, "batch length"]:
    """0, 1, 2, ... from the start of every segment (run of equal numbers): each pair is at the start of its own row."""
    index = jnp.arange(segments.shape[1])
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(segments != before, index, 0), axis=1)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "query_segments", "key_segments"],
    meta_fields=["causal", "window"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """A mask by its parts, so that attention over blocks never has to store it whole."""

    keys: Bool[Array, "batch keys"] | None = None
    """True for keys that are no padding; None: all of them."""
    causal: bool = False
    window: int | None = None
    query_segments: Int[Array, "batch queries"] | None = None
    """Of packed rows: a query attends to keys of its own segment only. None: nothing is packed."""
    key_segments: Int[Array, "batch keys"] | None = None

    def allowed(
        self, query_positions: Int[Array, "*groups queries"], key_positions: Int[Array, "*groups keys"]
    ) -> Bool[Array, "#batch 1 *groups queries keys"]:
        """The dense mask between these positions; a key position outside the keys is never allowed."""
        if (self.query_segments is None) != (self.key_segments is None):
            raise ValueError("expected the segments of queries and of keys, or of neither, got one of them")
        allowed = jnp.ones((*key_positions.shape[:-1], query_positions.shape[-1], key_positions.shape[-1]), bool)
        if self.causal:
            allowed &= causal_mask(query_positions, key_positions)
        if self.window is not None:
            allowed &= window_mask(query_positions, key_positions, window=self.window)
        batched = allowed[None]
        if self.query_segments is not None and self.key_segments is not None:
            batched &= _same(_at(self.query_segments, query_positions), _at(self.key_segments, key_positions))
        if self.keys is not None:
            inside = (key_positions >= 0) & (key_positions < self.keys.shape[1])
            batched &= (_at(self.keys, key_positions) & inside)[..., None, :]
        return batched[:, None]


def _at(
    values: Shaped[Array, "batch length"], positions: Int[Array, "*groups positions"]
) -> Shaped[Array, "batch *groups positions"]:
    # Padding of the last block of attention by blocks lies beyond the end; whoever masks keys masks it by its position.
    return values[:, jnp.clip(positions, 0, values.shape[1] - 1)]


def _same(queries: Int[Array, "*batch queries"], keys: Int[Array, "*batch keys"]) -> Bool[Array, "*batch queries keys"]:
    return queries[..., :, None] == keys[..., None, :]
