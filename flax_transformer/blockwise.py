"""Attention by an online softmax over blocks of keys: memory linear in length, forward and backward.

After Milakov & Gimelshein 2018 (online softmax), Rabe & Staats 2021 and Dao et al. 2022 (blocks, recomputation in the
backward pass). The same semantics as `plain_attention`, any dtype, the same treatment of rows without any key.

Without a window there is one group of all queries, and step t brings key block t. With a window, queries are grouped
into blocks as wide as the key blocks, and step t brings to every group its t-th neighbour: blocks outside the window
are never visited, so time is linear in length too. Both are one loop: step t takes the `groups` key blocks that start
at block t of a key array padded with `left` blocks in front.
"""

import dataclasses
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flax_transformer.dropout import NO_DROPOUT, DropoutSource, apply_keep
from flax_transformer.masks import AttentionMask
from flax_transformer.primitives import wide


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """How queries and keys are cut; all static."""

    num_queries: int
    num_keys: int
    groups: int
    query_block: int
    key_block: int
    left: int
    steps: int

    @classmethod
    def of(cls, num_queries: int, num_keys: int, *, block_size: int, mask: AttentionMask) -> "_Tiling":
        if mask.window is None or num_queries != num_keys:
            return cls(num_queries, num_keys, 1, num_queries, block_size, 0, math.ceil(num_keys / block_size))
        reach = math.ceil(mask.window / block_size)
        groups = math.ceil(num_queries / block_size)
        left = min(reach, groups - 1)
        right = 0 if mask.causal else left
        return cls(num_queries, num_keys, groups, block_size, block_size, left, left + right + 1)

    def cut_queries(self, x: Float[Array, "batch heads queries d"]) -> Float[Array, "batch heads groups block d"]:
        padding = self.groups * self.query_block - self.num_queries
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0)))
        return x.reshape(*x.shape[:2], self.groups, self.query_block, x.shape[3])

    def join_queries(self, x: Float[Array, "batch heads groups block d"]) -> Float[Array, "batch heads queries d"]:
        return x.reshape(*x.shape[:2], -1, x.shape[4])[:, :, : self.num_queries]

    def cut_keys(self, x: Float[Array, "batch heads keys d"]) -> Float[Array, "batch heads blocks block d"]:
        before = self.left * self.key_block
        after = (self.steps - 1 + self.groups) * self.key_block - before - self.num_keys
        x = jnp.pad(x, ((0, 0), (0, 0), (before, after), (0, 0)))
        return x.reshape(*x.shape[:2], -1, self.key_block, x.shape[3])

    def join_keys(self, x: Float[Array, "batch heads blocks block d"]) -> Float[Array, "batch heads keys d"]:
        before = self.left * self.key_block
        return x.reshape(*x.shape[:2], -1, x.shape[4])[:, :, before : before + self.num_keys]

    def query_index(self) -> Int[Array, "groups block"]:
        return jnp.arange(self.groups * self.query_block).reshape(self.groups, self.query_block)

    def key_index(self, step: Int[Array, ""]) -> Int[Array, "groups block"]:
        blocks = step + jnp.arange(self.groups) - self.left
        return blocks[:, None] * self.key_block + jnp.arange(self.key_block)

    def take(
        self, blocks: Float[Array, "batch heads blocks block d"], step: Int[Array, ""]
    ) -> Float[Array, "batch heads groups block d"]:
        return jax.lax.dynamic_slice_in_dim(blocks, step, self.groups, axis=2)

    def add(
        self,
        blocks: Float[Array, "batch heads blocks block d"],
        step: Int[Array, ""],
        update: Float[Array, "batch heads groups block d"],
    ) -> Float[Array, "batch heads blocks block d"]:
        return jax.lax.dynamic_update_slice_in_dim(blocks, self.take(blocks, step) + update, step, axis=2)


class _Residuals(NamedTuple):
    query: Float[Array, "batch heads queries d"]
    key: Float[Array, "batch heads keys d"]
    value: Float[Array, "batch heads keys d"]
    mask: AttentionMask
    source: DropoutSource
    output: Float[Array, "batch heads queries d"]
    log_normaliser: Float[Array, "batch heads groups block"]


def blockwise_attention(
    query: Float[Array, "batch heads queries d"],
    key: Float[Array, "batch heads keys d"],
    value: Float[Array, "batch heads keys d"],
    mask: AttentionMask,
    *,
    block_size: int,
    source: DropoutSource = NO_DROPOUT,
    rate: float = 0.0,
) -> Float[Array, "batch heads queries d"]:
    """The output of `plain_attention`, without its matrix of weights.

    `block_size` is in keys. Drawn dropout masks differ from the plain implementation's, handed-in ones are the same.
    """
    source = source if rate > 0.0 else NO_DROPOUT
    return _attention(block_size, rate, query, key, value, mask, source)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    block_size: int,
    rate: float,
    query: Float[Array, "batch heads queries d"],
    key: Float[Array, "batch heads keys d"],
    value: Float[Array, "batch heads keys d"],
    mask: AttentionMask,
    source: DropoutSource,
) -> Float[Array, "batch heads queries d"]:
    return _forward(block_size, rate, query, key, value, mask, source)[0]


def _tile(
    tiling: _Tiling,
    step: Int[Array, ""],
    query_blocks: Float[Array, "batch heads groups queries d"],
    key_blocks: Float[Array, "batch heads blocks keys d"],
    mask: AttentionMask,
) -> tuple[Float[Array, "batch heads groups queries keys"], Bool[Array, "#batch 1 groups queries keys"]]:
    """Scores of one step, and which of them count."""
    key = tiling.take(key_blocks, step)
    scores = wide(jnp.einsum("bhgqd,bhgkd->bhgqk", query_blocks, key)) / math.sqrt(query_blocks.shape[-1])
    key_index = tiling.key_index(step)
    inside = (key_index >= 0) & (key_index < tiling.num_keys)
    allowed = mask.allowed(tiling.query_index(), key_index) & inside[:, None, :]
    return scores, allowed


def _keep(
    tiling: _Tiling, step: Int[Array, ""], query_blocks: Array, source: DropoutSource, rate: float
) -> Bool[Array, "batch heads groups queries keys"] | None:
    lead = (query_blocks.shape[0], query_blocks.shape[1])
    return source.keep_tile(lead, tiling.query_index(), tiling.key_index(step), rate=rate, step=step)


def _forward(
    block_size: int,
    rate: float,
    query: Float[Array, "batch heads queries d"],
    key: Float[Array, "batch heads keys d"],
    value: Float[Array, "batch heads keys d"],
    mask: AttentionMask,
    source: DropoutSource,
) -> tuple[Float[Array, "batch heads queries d"], _Residuals]:
    tiling = _Tiling.of(query.shape[2], key.shape[2], block_size=block_size, mask=mask)
    query_blocks, key_blocks, value_blocks = tiling.cut_queries(query), tiling.cut_keys(key), tiling.cut_keys(value)
    dtype = wide(query).dtype
    lowest = jnp.finfo(dtype).min

    def step(t: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, weighted = carry
        scores, allowed = _tile(tiling, t, query_blocks, key_blocks, mask)
        new_maximum = jnp.maximum(maximum, jnp.where(allowed, scores, lowest).max(axis=-1))
        exponentials = jnp.where(allowed, jnp.exp(scores - new_maximum[..., None]), 0.0)
        rescale = jnp.exp(maximum - new_maximum)
        dropped = apply_keep(exponentials, _keep(tiling, t, query_blocks, source, rate), rate=rate)
        update = jnp.einsum("bhgqk,bhgkd->bhgqd", dropped.astype(value.dtype), tiling.take(value_blocks, t))
        return (
            new_maximum,
            total * rescale + exponentials.sum(axis=-1),
            weighted * rescale[..., None] + update.astype(dtype),
        )

    rows = query_blocks.shape[:-1]
    start = (jnp.full(rows, lowest), jnp.zeros(rows, dtype), jnp.zeros((*rows, value.shape[-1]), dtype))
    maximum, total, weighted = jax.lax.fori_loop(0, tiling.steps, step, start)
    total = jnp.where(total == 0.0, 1.0, total)  # a row without any key: zeros, not 0/0
    output = tiling.join_queries((weighted / total[..., None]).astype(query.dtype))
    return output, _Residuals(query, key, value, mask, source, output, maximum + jnp.log(total))


def _backward(
    block_size: int, rate: float, residuals: _Residuals, output_grad: Float[Array, "batch heads queries d"]
) -> tuple[Array, Array, Array, None, None]:
    query, key, value, mask, source, output, log_normaliser = residuals
    tiling = _Tiling.of(query.shape[2], key.shape[2], block_size=block_size, mask=mask)
    query_blocks, key_blocks, value_blocks = tiling.cut_queries(query), tiling.cut_keys(key), tiling.cut_keys(value)
    grad_blocks = tiling.cut_queries(output_grad)
    dtype = wide(query).dtype
    # Row sums of weights * (their gradient), needed by the softmax's derivative: equal to output · output_grad.
    row_sums = (wide(grad_blocks) * wide(tiling.cut_queries(output))).sum(axis=-1, keepdims=True)

    def step(t: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        query_grad, key_grad, value_grad = carry
        scores, allowed = _tile(tiling, t, query_blocks, key_blocks, mask)
        weights = jnp.where(allowed, jnp.exp(scores - log_normaliser[..., None]), 0.0)
        keep = _keep(tiling, t, query_blocks, source, rate)
        dropped = apply_keep(weights, keep, rate=rate).astype(value.dtype)
        value_update = jnp.einsum("bhgqk,bhgqd->bhgkd", dropped, grad_blocks)
        weights_grad = wide(jnp.einsum("bhgqd,bhgkd->bhgqk", grad_blocks, tiling.take(value_blocks, t)))
        scores_grad = weights * (apply_keep(weights_grad, keep, rate=rate) - row_sums)
        scores_grad = (scores_grad / math.sqrt(query.shape[-1])).astype(query.dtype)
        query_update = jnp.einsum("bhgqk,bhgkd->bhgqd", scores_grad, tiling.take(key_blocks, t))
        key_update = jnp.einsum("bhgqk,bhgqd->bhgkd", scores_grad, query_blocks)
        return (
            query_grad + query_update.astype(dtype),
            tiling.add(key_grad, t, key_update.astype(dtype)),
            tiling.add(value_grad, t, value_update.astype(dtype)),
        )

    start = (
        jnp.zeros(query_blocks.shape, dtype),
        jnp.zeros(key_blocks.shape, dtype),
        jnp.zeros(value_blocks.shape, dtype),
    )
    query_grad, key_grad, value_grad = jax.lax.fori_loop(0, tiling.steps, step, start)
    return (
        tiling.join_queries(query_grad).astype(query.dtype),
        tiling.join_keys(key_grad).astype(key.dtype),
        tiling.join_keys(value_grad).astype(value.dtype),
        None,
        None,
    )


_attention.defvjp(_forward, _backward)
