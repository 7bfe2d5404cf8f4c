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
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


def padding_mask(ids: Int[Tensor, "batch length"], *, pad_id: int) -> Bool[Tensor, "batch length"]:
    """True where there is a real token."""
    return ids.ne(pad_id)


def causal_mask(
    query_positions: Int[Tensor, "... queries"], key_positions: Int[Tensor, "... keys"]
) -> Bool[Tensor, "... queries keys"]:
    """True where the key is not after the query."""
    return query_positions.unsqueeze(-1) >= key_positions.unsqueeze(-2)


def window_mask(
    query_positions: Int[Tensor, "... queries"], key_positions: Int[Tensor, "... keys"], *, window: int
) -> Bool[Tensor, "... queries keys"]:
    """True where the key is at most `window` positions from the query, to either side."""
    query, key = query_positions.unsqueeze(-1), key_positions.unsqueeze(-2)
    return (query - window <= key) & (key <= query + window)


class Packing(NamedTuple):
    """Which token belongs to which of the pairs of sentences that share a row of the batch.

    0 is padding; 1, 2, ... number the pairs of a row. A pair bears the same number in source and target, and its tokens
    stand side by side.
    """

    src_segments: Int[Tensor, "batch src_len"]
    tgt_segments: Int[Tensor, "batch tgt_len"]


def segment_positions(segments: Int[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
    """0, 1, 2, ... from the start of every segment (run of equal numbers): each pair is at the start of its own row."""
    index = torch.arange(segments.shape[1], device=segments.device)
    goes_on = torch.zeros_like(segments, dtype=torch.bool)
    goes_on[:, 1:] = segments[:, 1:] == segments[:, :-1]
    return index - index.masked_fill(goes_on, 0).cummax(dim=1).values


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AttentionMask:
    """A mask by its parts, so that attention over blocks never has to store it whole."""

    keys: Bool[Tensor, "batch keys"] | None = None
    """True for keys that are no padding; None: all of them."""
    causal: bool = False
    window: int | None = None
    query_segments: Int[Tensor, "batch queries"] | None = None
    """Of packed rows: a query attends to keys of its own segment only. None: nothing is packed."""
    key_segments: Int[Tensor, "batch keys"] | None = None

    def allowed(
        self, query_positions: Int[Tensor, "*groups queries"], key_positions: Int[Tensor, "*groups keys"]
    ) -> Bool[Tensor, "#batch 1 *groups queries keys"]:
        """The dense mask between these positions; a key position outside the keys is never allowed."""
        if (self.query_segments is None) != (self.key_segments is None):
            raise ValueError("expected the segments of queries and of keys, or of neither, got one of them")
        rows = query_positions.new_ones(query_positions.shape).bool()
        if self.keys is None:
            columns = key_positions.new_ones(key_positions.shape).bool()[None, None]
        else:
            inside = (key_positions >= 0) & (key_positions < self.keys.shape[1])
            columns = (_at(self.keys, key_positions) & inside).unsqueeze(1)
        allowed = rows.unsqueeze(-1) & columns.unsqueeze(-2)
        if self.causal:
            allowed = allowed & causal_mask(query_positions, key_positions)
        if self.window is not None:
            allowed = allowed & window_mask(query_positions, key_positions, window=self.window)
        if self.query_segments is not None and self.key_segments is not None:
            queries, keys = _at(self.query_segments, query_positions), _at(self.key_segments, key_positions)
            allowed = allowed & (queries.unsqueeze(-1) == keys.unsqueeze(-2)).unsqueeze(1)
        return allowed


def _at(
    values: Shaped[Tensor, "batch length"], positions: Int[Tensor, "*groups positions"]
) -> Shaped[Tensor, "batch *groups positions"]:
    # Padding of the last block of attention by blocks lies beyond the end; whoever masks keys masks it by its position.
    return values[:, positions.clamp(0, values.shape[1] - 1)]
