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
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


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


@partial(jax.tree_util.register_dataclass, data_fields=["keys"], meta_fields=["causal", "window"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """A mask by its parts, so that attention over blocks never has to store it whole."""

    keys: Bool[Array, "batch keys"] | None = None
    """True for keys that are no padding; None: all of them."""
    causal: bool = False
    window: int | None = None

    def allowed(
        self, query_positions: Int[Array, "*groups queries"], key_positions: Int[Array, "*groups keys"]
    ) -> Bool[Array, "#batch 1 *groups queries keys"]:
        """The dense mask between these positions; a key position outside the keys is never allowed."""
        allowed = jnp.ones((*key_positions.shape[:-1], query_positions.shape[-1], key_positions.shape[-1]), bool)
        if self.causal:
            allowed &= causal_mask(query_positions, key_positions)
        if self.window is not None:
            allowed &= window_mask(query_positions, key_positions, window=self.window)
        if self.keys is None:
            return allowed[None, None]
        num_keys = self.keys.shape[1]
        inside = (key_positions >= 0) & (key_positions < num_keys)
        present = self.keys[:, jnp.clip(key_positions, 0, num_keys - 1)] & inside
        return (present[..., None, :] & allowed)[:, None]
