"""Dropout whose every mask comes from an explicit key, or is handed in (Srivastava et al. 2014; paper 5.4).

A `DropoutSource` travels down the model beside the activations. `source.at("encoder").at("layers.0")` is the source
for a part of the model, so every site has a name, the same in both twins: masks drawn by one framework can be handed
to the other under these names.

The first axis of a mask counts the rows of the batch. A row's drawn mask is a function of the key, the site's name, the
row's number and the place within the row, and of nothing else: cutting a batch into micro-batches, spreading it over
devices or appending rows to it changes no mask.
"""

import math
import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from flax_transformer.primitives import wide


@runtime_checkable
class DropoutSource(Protocol):
    """Where the keep masks of one part of the model come from. True = keep."""

    def at(self, name: str) -> "DropoutSource":
        """The source for the part of the model called `name`."""
        ...

    def for_rows(self, rows: Int[Array, " batch"]) -> "DropoutSource":
        """The source for a batch whose rows have these numbers in the batch that this source is for."""
        ...

    def keep(self, shape: tuple[int, ...], *, rate: float) -> Bool[Array, "..."] | None:
        """The keep mask of this site, or None to keep everything."""
        ...

    def keep_tile(
        self,
        lead: tuple[int, int],
        query_index: Int[Array, "groups queries"],
        key_index: Int[Array, "groups keys"],
        *,
        rate: float,
        step: Int[Array, ""],
    ) -> Bool[Array, "batch heads groups queries keys"] | None:
        """The tile of an attention-weight mask at these rows and columns, for attention that works block by block.

        `lead` is (batch, heads). A drawn tile depends on `step`, so each step must ask for a different tile.
        """
        ...


@jax.tree_util.register_static
class NoDropout:
    """Keeps everything: evaluation, decoding."""

    def at(self, name: str) -> "NoDropout":
        """Itself."""
        return self

    def for_rows(self, rows: object) -> "NoDropout":
        """Itself."""
        return self

    def keep(self, shape: tuple[int, ...], *, rate: float) -> None:
        """None: keep everything."""
        return

    def keep_tile(self, lead: object, query_index: object, key_index: object, *, rate: float, step: object) -> None:
        """None: keep everything."""
        return


NO_DROPOUT = NoDropout()


@jax.tree_util.register_pytree_node_class
class DropoutKey:
    """Draws every mask from one key, folded with the name of the site, and the numbers of the rows.

    `rows` are the numbers of the batch's rows, each in [0, 2³¹); by default 0, 1, 2, ... Every element is dropped with
    probability `rate` itself, to within 2⁻⁴⁸. Raises ValueError for a key of another kind than threefry2x32, for a
    mask without axes, and for one whose rows are not as many as `rows`.
    """

    def __init__(self, key: Key[Array, ""], rows: Int[Array, " batch"] | None = None):
        self.key, self.rows = key, rows

    def at(self, name: str) -> "DropoutKey":
        """Folds a checksum of `name` into the key; crc32 because Python's own hash differs between processes."""
        return type(self)(jax.random.fold_in(self.key, zlib.crc32(name.encode())), self.rows)

    def for_rows(self, rows: Int[Array, " batch"]) -> "DropoutKey":
        """The same key for other rows; for rows among its own if it has been given some already."""
        return type(self)(self.key, rows if self.rows is None else self.rows[rows])

    def keep(self, shape: tuple[int, ...], *, rate: float) -> Bool[Array, "..."]:
        """A mask of this site, each element kept with probability 1 - rate."""
        return self._draw(self.key, shape, rate)

    def keep_tile(
        self,
        lead: tuple[int, int],
        query_index: Int[Array, "groups queries"],
        key_index: Int[Array, "groups keys"],
        *,
        rate: float,
        step: Int[Array, ""],
    ) -> Bool[Array, "batch heads groups queries keys"]:
        """A fresh tile for every step."""
        groups = max(query_index.shape[0], key_index.shape[0])
        shape = (*lead, groups, query_index.shape[1], key_index.shape[1])
        return self._draw(jax.random.fold_in(self.key, step), shape, rate)

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        """For jax transformations."""
        return (self.key, self.rows), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, Any]) -> "DropoutKey":
        """For jax transformations; leaves need not be arrays here."""
        dropout = object.__new__(cls)
        dropout.key, dropout.rows = children
        return dropout

    def _draw(self, key: Key[Array, ""], shape: tuple[int, ...], rate: float) -> Bool[Array, "..."]:
        words = jax.random.key_data(key)
        if words.shape != (2,):
            raise ValueError(f"expected a dropout key of threefry2x32, got {jax.random.key_impl(key)}")
        if not shape or (self.rows is not None and self.rows.shape[0] != shape[0]):
            wanted = "at least one axis" if self.rows is None else f"{self.rows.shape[0]} rows"
            raise ValueError(f"expected a dropout mask of {wanted}, got the shape {shape}")
        rows = jax.lax.iota(jnp.uint32, shape[0]) if self.rows is None else self.rows.astype(jnp.uint32)
        return _keep_rows(words, rows, shape[1:], rate)


@jax.tree_util.register_pytree_node_class
class DropoutMasks:
    """Hands in masks by the name of their site, e.g. `encoder.layers.0.self_attn.weights`.

    Raises ValueError at a site for which there is no mask, or one of another shape.
    """

    def __init__(self, masks: Mapping[str, Bool[Array, "..."]], path: str = ""):
        self.masks = dict(masks)
        self.path = path

    def at(self, name: str) -> "DropoutMasks":
        """The masks below `name`."""
        return type(self)(self.masks, f"{self.path}.{name}" if self.path else name)

    def for_rows(self, rows: Int[Array, " batch"]) -> "DropoutMasks":
        """These rows of every mask."""
        return type(self)({site: jnp.asarray(mask)[rows] for site, mask in self.masks.items()}, self.path)

    def keep(self, shape: tuple[int, ...], *, rate: float) -> Bool[Array, "..."]:
        """The mask that was handed in for this site."""
        if self.path not in self.masks:
            raise ValueError(f"expected a dropout mask of shape {shape} for {self.path}, got none")
        mask = jnp.asarray(self.masks[self.path])
        if mask.shape != shape:
            raise ValueError(f"expected a dropout mask of shape {shape} for {self.path}, got {mask.shape}")
        return mask

    def keep_tile(
        self,
        lead: tuple[int, int],
        query_index: Int[Array, "groups queries"],
        key_index: Int[Array, "groups keys"],
        *,
        rate: float,
        step: Int[Array, ""],
    ) -> Bool[Array, "batch heads groups queries keys"]:
        """The tile of the handed-in mask; rows and columns beyond it (padding of the last block) are clipped."""
        mask = jnp.asarray(self.masks[self.path]) if self.path in self.masks else None
        if mask is None or mask.ndim != 4 or mask.shape[:2] != lead:
            got = None if mask is None else mask.shape
            raise ValueError(
                f"expected a dropout mask of shape {(*lead, 'queries', 'keys')} for {self.path}, got {got}"
            )
        rows = jnp.clip(query_index, 0, mask.shape[2] - 1)
        columns = jnp.clip(key_index, 0, mask.shape[3] - 1)
        return mask[:, :, rows[:, :, None], columns[:, None, :]]

    def tree_flatten(self) -> tuple[tuple[dict[str, Any]], str]:
        """For jax transformations."""
        return (self.masks,), self.path

    @classmethod
    def tree_unflatten(cls, path: str, children: tuple[dict[str, Any]]) -> "DropoutMasks":
        """For jax transformations; leaves need not be arrays here."""
        dropout = object.__new__(cls)
        dropout.masks, dropout.path = children[0], path
        return dropout


def apply_dropout(
    x: Float[Array, "..."],
    source: DropoutSource,
    *,
    rate: float,
) -> Float[Array, "..."]:
    """Zeroes elements with probability `rate` and scales the others by 1 / (1 - rate)."""
    if rate == 0.0:
        return x
    return apply_keep(x, source.keep(x.shape, rate=rate), rate=rate)


def apply_keep(x: Float[Array, "..."], keep: Bool[Array, "..."] | None, *, rate: float) -> Float[Array, "..."]:
    """x / (1 - rate) where `keep`, else 0; x itself if `keep` is None."""
    if keep is None:
        return x
    # Divided in float32 or wider: 1 - rate rounded to bfloat16 would shift every mean by 0.2%.
    return jnp.where(keep, (wide(x) / (1.0 - rate)).astype(x.dtype), jnp.zeros((), x.dtype))


@partial(jax.jit, static_argnums=(2, 3))  # traced once a shape, not once a site
def _keep_rows(
    key: UInt32[Array, "2"], rows: UInt32[Array, " batch"], shape: tuple[int, ...], rate: float
) -> Bool[Array, "batch ..."]:
    """Keep masks of `shape`, one a row; each element is dropped with probability `rate`, to within 2⁻⁴⁸.

    16 random bits an element make the rate a multiple of 1/65536, so the threshold t is drawn too, once a row: one of
    the two integers around 65536 · rate, the upper one with probability (65536 · rate) mod 1, of 32 bits. Then
    P(bits < t) = E[t] / 65536 = rate.
    """
    last = np.uint32(0xFFFFFFFF)
    threshold = rate * 65536
    share = np.uint32(min(round(threshold % 1 * 2**32), int(last)))
    upper = threefry(key, rows, jnp.full_like(rows, last))[0] < share  # no row has a block of this number
    thresholds = np.uint32(threshold) + upper.astype(jnp.uint32)

    *lines, length = shape or (1,)
    per_line = -(-length // 4)
    blocks = jnp.arange(math.prod(lines) * per_line, dtype=jnp.uint32).reshape(1, *lines, 1, per_line)

    def of_rows(values: UInt32[Array, " batch"]) -> UInt32[Array, "batch ..."]:
        return values.reshape(-1, *[1] * (blocks.ndim - 1))

    first, second = threefry(key, of_rows(rows), blocks)
    # The quarters of a line's blocks one after the other, instead of each block's side by side: so everything is
    # elementwise along the blocks, and XLA makes one vectorised loop of it and of what uses the mask. Along the last
    # axis, because a quarter that begins within a line of what uses the mask costs that (on CPU ten times the time).
    # The generator is cheap enough to be run again for every quarter, and in the backward pass, which XLA does rather
    # than to store the mask.
    quarter = jnp.arange(4, dtype=jnp.uint32)[:, None]
    words = jnp.where(quarter < 2, first, second)
    halves = (words >> (quarter % 2 * 16)) & np.uint32(0xFFFF)
    keep = (halves >= of_rows(thresholds)).reshape(rows.shape[0], *lines, 4 * per_line)
    return keep[..., :length].reshape(rows.shape[0], *shape)


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(
    key: UInt32[Array, "2"],
    first: UInt32[Array, "..."],
    second: UInt32[Array, "..."],
    *,
    rounds: int = 13,
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Threefry-2x32 of the counters (first, second): 64 random bits each (Salmon et al. 2011, Parallel Random Numbers).

    jax's own generator is the same function, of 20 rounds; but its `random.bits` throws half of every result away where
    it has to be partitionable, and numbers the elements of the whole array, not of a row.
    """
    # 13 rounds are the fast variant of Random123, Salmon et al.'s library; they report that it passes BigCrush, Gromacs
    # that its 2 x 64 bits fail one test of it. From 11 rounds on, flipping a bit of a counter flips every bit of the
    # result with probability 1/2, as far as 2¹⁸ counters show. 20 rounds, the default of Random123 and of jax, are a
    # margin of safety that dropout has no use for: on CPU a mask takes nearly twice as long with them.
    keys = key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
    first, second = first + keys[0], second + keys[1]
    for i in range(rounds):
        distance = _ROTATIONS[i // 4 % 2][i % 4]
        first = first + second
        second = first ^ ((second << np.uint32(distance)) | (second >> np.uint32(32 - distance)))
        if i % 4 == 3:
            injection = i // 4 + 1
            first = first + keys[injection % 3]
            second = second + keys[(injection + 1) % 3] + np.uint32(injection)
    return first, second
