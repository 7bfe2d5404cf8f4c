"""Scaled dot-product attention and multi-head attention (paper 3.2).

Three implementations with one semantics: `plain` reads like the formula, `blockwise` (see blockwise.py) never stores
the whole matrix of scores, `library` is `jax.nn.dot_product_attention`, which differs: its softmax is float32 even in
a float64 run, and a row in which every key is masked gives the mean of the values instead of zeros.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from flax_transformer.blockwise import blockwise_attention
from flax_transformer.dropout import NO_DROPOUT, DropoutSource, apply_dropout
from flax_transformer.masks import AttentionMask
from flax_transformer.primitives import linear, matmul, wide
from transformer_config import TransformerConfig


class AttentionOutput(NamedTuple):
    """What attention computes, and the weights it did so with if they were asked for."""

    output: Float[Array, "..."]
    weights: Float[Array, "batch heads queries keys"] | None


class KeyValue(NamedTuple):
    """Keys and values of every head."""

    key: Float[Array, "batch heads keys head_dim"]
    value: Float[Array, "batch heads keys head_dim"]

    def cached(self) -> "CachedKeyValue":
        """As decoding keeps them."""
        return CachedKeyValue(jnp.swapaxes(self.key, 2, 3), self.value)


class CachedKeyValue(NamedTuple):
    """Keys and values as decoding keeps them: keys transposed, so that the products with few queries run along them
    (on a CPU three times as fast)."""

    key: Float[Array, "batch heads head_dim keys"]
    value: Float[Array, "batch heads keys head_dim"]


def attention_weights(
    query: Float[Array, "batch heads queries head_dim"],
    key: Float[Array, "batch heads keys head_dim"],
    allowed: Bool[Array, "#batch 1 #queries keys"],
) -> Float[Array, "batch heads queries keys"]:
    """softmax(QKᵀ / √d_k) over the allowed keys, 0 elsewhere; a row without an allowed key is all 0 (paper 3.2.1)."""
    scores = wide(matmul(query, key, True)) / math.sqrt(query.shape[-1])
    # A finite fill keeps rows without any key free of NaN, in values and in gradients.
    scores = jnp.where(allowed, scores, jnp.finfo(scores.dtype).min)
    return jnp.where(allowed, jax.nn.softmax(scores, axis=-1), 0.0)


def plain_attention(
    query: Float[Array, "batch heads queries head_dim"],
    key: Float[Array, "batch heads keys head_dim"],
    value: Float[Array, "batch heads keys head_dim"],
    allowed: Bool[Array, "#batch 1 #queries keys"],
    *,
    source: DropoutSource = NO_DROPOUT,
    rate: float = 0.0,
) -> AttentionOutput:
    """Attention(Q, K, V) = softmax(QKᵀ / √d_k) V (paper 3.2.1), with dropout on the weights.

    The weights that are returned are those before dropout.
    """
    weights = attention_weights(query, key, allowed)
    dropped = apply_dropout(weights, source, rate=rate).astype(value.dtype)
    return AttentionOutput(matmul(dropped, value), weights)


def library_attention(
    query: Float[Array, "batch heads queries head_dim"],
    key: Float[Array, "batch heads keys head_dim"],
    value: Float[Array, "batch heads keys head_dim"],
    allowed: Bool[Array, "#batch 1 queries keys"],
) -> Float[Array, "batch heads queries head_dim"]:
    """`jax.nn.dot_product_attention`; its differences are stated at the top of this file."""
    query, key, value = jnp.swapaxes(query, 1, 2), jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
    return jnp.swapaxes(jax.nn.dot_product_attention(query, key, value, mask=allowed), 1, 2)


class MultiHeadAttention(nnx.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O, head_i = Attention(QW_i^Q, KW_i^K, VW_i^V) (paper 3.2.2).

    The heads' projections are stored side by side: one matrix each for Q, K and V.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.implementation = config.attention
        self.block_size = config.attention_block_size
        self.num_heads = config.num_heads
        self.rate = config.attention_dropout
        self.q_proj = linear(config, config.d_model, config.d_model, rngs=rngs)
        self.k_proj = linear(config, config.d_model, config.d_model, rngs=rngs)
        self.v_proj = linear(config, config.d_model, config.d_model, rngs=rngs)
        self.out_proj = linear(config, config.d_model, config.d_model, rngs=rngs)

    def __call__(
        self,
        queries: Float[Array, "batch queries d_model"],
        keys: Float[Array, "batch keys d_model"],
        *,
        mask: AttentionMask,
        dropout: DropoutSource = NO_DROPOUT,
        return_weights: bool = False,
    ) -> AttentionOutput:
        """Attends from `queries` to `keys`, which also give the values.

        Raises ValueError if weights are asked of the library's attention, which has none to give.
        """
        query, key_value = self.split_heads(self.q_proj(queries)), self.key_value(keys)
        attended = self.attend(query, key_value, mask=mask, dropout=dropout, return_weights=return_weights)
        return AttentionOutput(self.out_proj(self.merge_heads(attended.output)), attended.weights)

    def key_value(self, keys: Float[Array, "batch keys d_model"]) -> KeyValue:
        """Keys and values of every head."""
        return KeyValue(self.split_heads(self.k_proj(keys)), self.split_heads(self.v_proj(keys)))

    def attend(
        self,
        query: Float[Array, "batch heads queries head_dim"],
        key_value: KeyValue,
        *,
        mask: AttentionMask,
        dropout: DropoutSource = NO_DROPOUT,
        return_weights: bool = False,
    ) -> AttentionOutput:
        """Attention of every head, by the configured implementation."""
        key, value = key_value
        source = dropout.at("weights")
        if self.implementation == "library" and return_weights:
            raise ValueError("expected attention='plain' or 'blockwise' where weights are asked for, got 'library'")
        if self.implementation == "blockwise":
            output = blockwise_attention(
                query, key, value, mask, block_size=self.block_size, source=source, rate=self.rate
            )
            # Asking for the weights asks for the whole matrix; the output is still the blockwise one.
            weights = attention_weights(query, key, _dense(mask, query, key)) if return_weights else None
            return AttentionOutput(output, weights)
        allowed = _dense(mask, query, key)
        if self.implementation == "library":
            return AttentionOutput(library_attention(query, key, value, allowed), None)
        output, weights = plain_attention(query, key, value, allowed, source=source, rate=self.rate)
        return AttentionOutput(output, weights if return_weights else None)

    def attend_cached(
        self,
        queries: Float[Array, "batch queries d_model"],
        cached: CachedKeyValue,
        *,
        allowed: Bool[Array, "#batch 1 #queries keys"],
    ) -> Float[Array, "batch queries d_model"]:
        """From a few queries to keys that are there already: a step of decoding."""
        query = self.split_heads(self.q_proj(queries))
        attended = plain_attention(query, jnp.swapaxes(cached.key, 2, 3), cached.value, allowed)
        return self.out_proj(self.merge_heads(attended.output))

    def split_heads(self, x: Float[Array, "batch length d_model"]) -> Float[Array, "batch heads length head_dim"]:
        """(..., heads * head_dim) -> heads apart."""
        batch, length, _ = x.shape
        return jnp.swapaxes(x.reshape(batch, length, self.num_heads, -1), 1, 2)

    def merge_heads(self, x: Float[Array, "batch heads length head_dim"]) -> Float[Array, "batch length d_model"]:
        """The inverse of `split_heads`."""
        batch, _, length, _ = x.shape
        return jnp.swapaxes(x, 1, 2).reshape(batch, length, -1)


def _dense(
    mask: AttentionMask,
    query: Float[Array, "batch heads queries head_dim"],
    key: Float[Array, "batch heads keys head_dim"],
) -> Bool[Array, "#batch 1 queries keys"]:
    return mask.allowed(jnp.arange(query.shape[2]), jnp.arange(key.shape[2]))
