"""Dropout whose every mask comes from an explicit key, or is handed in (Srivastava et al. 2014; paper 5.4).

A `DropoutSource` travels down the model beside the activations. `source.at("encoder").at("layers.0")` is the source
for a part of the model, so every site has a name, the same in both twins: masks drawn by one framework can be handed
to the other under these names.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from flax_transformer.primitives import wide


@runtime_checkable
class DropoutSource(Protocol):
    """Where the keep masks of one part of the model come from. True = keep."""

    def at(self, name: str) -> "DropoutSource":
        """The source for the part of the model called `name`."""
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

    def keep(self, shape: tuple[int, ...], *, rate: float) -> None:
        """None: keep everything."""
        return

    def keep_tile(self, lead: object, query_index: object, key_index: object, *, rate: float, step: object) -> None:
        """None: keep everything."""
        return


NO_DROPOUT = NoDropout()


@jax.tree_util.register_pytree_node_class
class DropoutKey:
    """Draws every mask from one key, folded with the name of the site."""

    def __init__(self, key: Key[Array, ""]):
        self.key = key

    def at(self, name: str) -> "DropoutKey":
        """Folds a checksum of `name` into the key; crc32 because Python's own hash differs between processes."""
        return type(self)(jax.random.fold_in(self.key, zlib.crc32(name.encode())))

    def keep(self, shape: tuple[int, ...], *, rate: float) -> Bool[Array, "..."]:
        """A fresh mask, each element kept with probability 1 - rate."""
        return _bernoulli_keep(self.key, shape, rate)

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
        return _bernoulli_keep(jax.random.fold_in(self.key, step), shape, rate)

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        """For jax transformations."""
        return (self.key,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> "DropoutKey":
        """For jax transformations; leaves need not be arrays here."""
        dropout = object.__new__(cls)
        (dropout.key,) = children
        return dropout


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


def _bernoulli_keep(key: Key[Array, ""], shape: tuple[int, ...], rate: float) -> Bool[Array, "..."]:
    # 16 bits an element: 8 would make a rate of 0.1 really 26/256, and 32 cost twice as much. Whole words are drawn
    # and read as halves, because jax's partitionable threefry spends a full word on every narrower draw.
    size = math.prod(shape)
    words = jax.random.bits(key, ((size + 1) // 2,), jnp.uint32)
    halves = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[:size]
    return (halves >= jnp.uint16(min(round(rate * 65536), 65535))).reshape(shape)
