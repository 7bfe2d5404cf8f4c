"""Which query may attend to which key: padding, causal, local window, combined. True = may attend (paper 3.1, 3.2.3).

Worked example, window=1, causal, the last of four keys is padding; rows are queries, columns are keys:

    causal      window      padding     all three
    1 0 0 0     1 1 0 0     1 1 1 0     1 0 0 0
    1 1 0 0     1 1 1 0     1 1 1 0     1 1 0 0
    1 1 1 0     0 1 1 1     1 1 1 0     0 1 1 0
    1 1 1 1     0 0 1 1     1 1 1 0     0 0 1 0

Padding is masked in key columns only; rows of padding attend like any other, and whoever uses the output ignores them.
A row in which nothing may be attended to gets an output of zeros, and no gradient.
"""

import dataclasses

from jaxtyping import Bool, Int
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AttentionMask:
    """A mask by its parts, so that attention over blocks never has to store it whole."""

    keys: Bool[Tensor, "batch keys"] | None = None
    """True for keys that are no padding; None: all of them."""
    causal: bool = False
    window: int | None = None

    def allowed(
        self, query_positions: Int[Tensor, "*groups queries"], key_positions: Int[Tensor, "*groups keys"]
    ) -> Bool[Tensor, "#batch 1 *groups queries keys"]:
        """The dense mask between these positions; a key position outside the keys is never allowed."""
        rows = query_positions.new_ones(query_positions.shape).bool()
        if self.keys is None:
            columns = key_positions.new_ones(key_positions.shape).bool()[None, None]
        else:
            num_keys = self.keys.shape[1]
            inside = (key_positions >= 0) & (key_positions < num_keys)
            columns = (self.keys[:, key_positions.clamp(0, num_keys - 1)] & inside).unsqueeze(1)
        allowed = rows.unsqueeze(-1) & columns.unsqueeze(-2)
        if self.causal:
            allowed = allowed & causal_mask(query_positions, key_positions)
        if self.window is not None:
            allowed = allowed & window_mask(query_positions, key_positions, window=self.window)
        return allowed
