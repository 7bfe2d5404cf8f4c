"""Scaled dot-product attention and multi-head attention (paper 3.2).

Three implementations with one semantics: `plain` reads like the formula, `blockwise` (see blockwise.py) never stores
the whole matrix of scores, `library` is `torch.nn.functional.scaled_dot_product_attention`. The library's gives no
weights, takes no dropout masks, and leaves to a kernel of torch's choice the order of summation and, in half widths,
where it rounds. A row in which every key is masked gives zeros and no gradient there too (torch 2.13 on CPU).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from jaxtyping import Bool, Float
from torch import Tensor, nn

from torch_reference.blockwise import blockwise_attention
from torch_reference.dropout import NO_DROPOUT, DropoutSource, apply_dropout
from torch_reference.masks import AttentionMask
from torch_reference.primitives import Linear, wide
from transformer_config import TransformerConfig


class AttentionOutput(NamedTuple):
    """What attention computes, and the weights it did so with if they were asked for."""

    output: Float[Tensor, "..."]
    weights: Float[Tensor, "batch heads queries keys"] | None


class KeyValue(NamedTuple):
    """Keys and values of every head."""

    key: Float[Tensor, "batch heads keys head_dim"]
    value: Float[Tensor, "batch heads keys head_dim"]


def attention_weights(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch heads keys head_dim"],
    allowed: Bool[Tensor, "#batch 1 queries keys"],
) -> Float[Tensor, "batch heads queries keys"]:
    """softmax(QKᵀ / √d_k) over the allowed keys, 0 elsewhere; a row without an allowed key is all 0 (paper 3.2.1)."""
    scores = wide(query @ key.transpose(-2, -1)) / math.sqrt(query.shape[-1])
    # A row without any key is left unmasked for the softmax and zeroed after it: 0/0 would be NaN, also in gradients.
    has_key = allowed.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(has_key & ~allowed, -math.inf)
    return scores.softmax(dim=-1).masked_fill(~has_key, 0.0)


def plain_attention(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch heads keys head_dim"],
    value: Float[Tensor, "batch heads keys head_dim"],
    allowed: Bool[Tensor, "#batch 1 queries keys"],
    *,
    source: DropoutSource = NO_DROPOUT,
    rate: float = 0.0,
) -> AttentionOutput:
    """Attention(Q, K, V) = softmax(QKᵀ / √d_k) V (paper 3.2.1), with dropout on the weights.

    The weights that are returned are those before dropout.
    """
    weights = attention_weights(query, key, allowed)
    dropped = apply_dropout(weights, source, rate=rate).to(value.dtype)
    return AttentionOutput(dropped @ value, weights)


def library_attention(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch heads keys head_dim"],
    value: Float[Tensor, "batch heads keys head_dim"],
    allowed: Bool[Tensor, "#batch 1 queries keys"],
) -> Float[Tensor, "batch heads queries head_dim"]:
    """`F.scaled_dot_product_attention`; its differences are stated at the top of this file."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O, head_i = Attention(QW_i^Q, KW_i^K, VW_i^V) (paper 3.2.2).

    The heads' projections are stored side by side: one matrix each for Q, K and V.
    """

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator):
        super().__init__()
        self.implementation = config.attention
        self.block_size = config.attention_block_size
        self.num_heads = config.num_heads
        self.rate = config.attention_dropout
        self.q_proj = Linear(config, config.d_model, config.d_model, generator=generator)
        self.k_proj = Linear(config, config.d_model, config.d_model, generator=generator)
        self.v_proj = Linear(config, config.d_model, config.d_model, generator=generator)
        self.out_proj = Linear(config, config.d_model, config.d_model, generator=generator)

    def forward(
        self,
        queries: Float[Tensor, "batch queries d_model"],
        keys: Float[Tensor, "batch keys d_model"],
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

    def key_value(self, keys: Float[Tensor, "batch keys d_model"]) -> KeyValue:
        """Keys and values of every head."""
        return KeyValue(self.split_heads(self.k_proj(keys)), self.split_heads(self.v_proj(keys)))

    def attend(
        self,
        query: Float[Tensor, "batch heads queries head_dim"],
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
        attended = plain_attention(query, key, value, allowed, source=source, rate=self.rate)
        return attended if return_weights else AttentionOutput(attended.output, None)

    def split_heads(self, x: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch heads length head_dim"]:
        """(..., heads * head_dim) -> heads apart."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def merge_heads(self, x: Float[Tensor, "batch heads length head_dim"]) -> Float[Tensor, "batch length d_model"]:
        """The inverse of `split_heads`."""
        return x.transpose(1, 2).flatten(-2)


def _dense(
    mask: AttentionMask,
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch heads keys head_dim"],
) -> Bool[Tensor, "#batch 1 queries keys"]:
    rows = torch.arange(query.shape[2], device=query.device)
    columns = torch.arange(key.shape[2], device=key.device)
    return mask.allowed(rows, columns)
