"""One layer of the encoder and one of the decoder: sublayers, residual connections, norms (paper 3.1)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from flax_transformer.attention import CachedKeyValue, KeyValue, MultiHeadAttention
from flax_transformer.dropout import NO_DROPOUT, DropoutSource, apply_dropout
from flax_transformer.feed_forward import FeedForward
from flax_transformer.masks import AttentionMask
from flax_transformer.primitives import LayerNorm
from transformer_config import TransformerConfig


class LayerOutput(NamedTuple):
    """What a layer, or a stack of them, computes; and by name the attention weights, if they were asked for."""

    hidden: Float[Array, "batch length d_model"]
    weights: dict[str, Float[Array, "batch heads queries keys"]]


class LayerCache(NamedTuple):
    """What a decoder layer keeps between steps of decoding."""

    own: CachedKeyValue
    """Of what was decoded so far: one slot a position, or as many beside each other as there are beams. Slots are never
    moved: who descends from which is said by the mask with which they are read."""
    memory: CachedKeyValue
    """Of the encoder's output: one row a sentence, however many beams there are (D6)."""


class ResidualLayer(nnx.Module):
    """Where the norm stands: norm(x + sublayer(x)), the paper's, or x + sublayer(norm(x))."""

    def __init__(self, config: TransformerConfig):
        self.norm_order = config.norm_order
        self.rate = config.dropout

    def before(self, norm: LayerNorm, x: Float[Array, "batch length d_model"]) -> Float[Array, "batch length d_model"]:
        """What the sublayer sees."""
        return norm(x) if self.norm_order == "pre" else x

    def after(
        self,
        norm: LayerNorm,
        x: Float[Array, "batch length d_model"],
        sublayer: Float[Array, "batch length d_model"],
        dropout: DropoutSource = NO_DROPOUT,
    ) -> Float[Array, "batch length d_model"]:
        """The sublayer's output, dropped out, added to `x` (paper 5.4), and normed if the norm comes last."""
        x = x + apply_dropout(sublayer, dropout, rate=self.rate)
        return norm(x) if self.norm_order == "post" else x


class EncoderLayer(ResidualLayer):
    """Self-attention, then feed-forward."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        super().__init__(config)
        self.self_attn = MultiHeadAttention(config, rngs=rngs)
        self.norm1 = LayerNorm(config)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.norm2 = LayerNorm(config)

    def __call__(
        self,
        x: Float[Array, "batch length d_model"],
        *,
        mask: AttentionMask,
        dropout: DropoutSource = NO_DROPOUT,
        return_weights: bool = False,
    ) -> LayerOutput:
        """`mask` says which positions attend to which."""
        y = self.before(self.norm1, x)
        attended = self.self_attn(y, y, mask=mask, dropout=dropout.at("self_attn"), return_weights=return_weights)
        x = self.after(self.norm1, x, attended.output, dropout.at("dropout1"))

        y = self.before(self.norm2, x)
        x = self.after(self.norm2, x, self.feed_forward(y, dropout=dropout.at("feed_forward")), dropout.at("dropout2"))
        return LayerOutput(x, {} if attended.weights is None else {"self_attn": attended.weights})


class DecoderLayer(ResidualLayer):
    """Masked self-attention, attention to the encoder's output, then feed-forward."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        super().__init__(config)
        self.self_attn = MultiHeadAttention(config, rngs=rngs)
        self.norm1 = LayerNorm(config)
        self.cross_attn = MultiHeadAttention(config, rngs=rngs)
        self.norm2 = LayerNorm(config)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.norm3 = LayerNorm(config)

    def __call__(
        self,
        x: Float[Array, "batch tgt_len d_model"],
        memory: Float[Array, "batch src_len d_model"],
        *,
        mask: AttentionMask,
        memory_mask: AttentionMask,
        dropout: DropoutSource = NO_DROPOUT,
        return_weights: bool = False,
    ) -> LayerOutput:
        """`mask` is for attention to the target itself, `memory_mask` for attention to `memory`."""
        y = self.before(self.norm1, x)
        own = self.self_attn(y, y, mask=mask, dropout=dropout.at("self_attn"), return_weights=return_weights)
        x = self.after(self.norm1, x, own.output, dropout.at("dropout1"))

        y = self.before(self.norm2, x)
        cross = self.cross_attn(
            y, memory, mask=memory_mask, dropout=dropout.at("cross_attn"), return_weights=return_weights
        )
        x = self.after(self.norm2, x, cross.output, dropout.at("dropout2"))

        y = self.before(self.norm3, x)
        x = self.after(self.norm3, x, self.feed_forward(y, dropout=dropout.at("feed_forward")), dropout.at("dropout3"))
        weights = {"self_attn": own.weights, "cross_attn": cross.weights}
        return LayerOutput(x, {name: value for name, value in weights.items() if value is not None})

    def step(
        self,
        x: Float[Array, "batch beams d_model"],
        cache: LayerCache,
        *,
        slot: Int[Array, ""],
        allowed: Bool[Array, "#batch 1 #beams slots"],
        memory_allowed: Bool[Array, "#batch 1 1 src_len"],
    ) -> tuple[Float[Array, "batch beams d_model"], LayerCache]:
        """`__call__` for one new position of every beam, written to the cache from `slot` on; no dropout."""
        y = self.before(self.norm1, x)
        new = self.self_attn.key_value(y).cached()
        own = CachedKeyValue(
            jax.lax.dynamic_update_slice_in_dim(cache.own.key, new.key, slot, axis=3),
            jax.lax.dynamic_update_slice_in_dim(cache.own.value, new.value, slot, axis=2),
        )
        x = self.after(self.norm1, x, self.self_attn.attend_cached(y, own, allowed=allowed))

        y = self.before(self.norm2, x)
        x = self.after(self.norm2, x, self.cross_attn.attend_cached(y, cache.memory, allowed=memory_allowed))

        y = self.before(self.norm3, x)
        x = self.after(self.norm3, x, self.feed_forward(y))
        return x, LayerCache(own, cache.memory)

    def new_cache(self, memory: Float[Array, "batch src_len d_model"], *, slots: int) -> LayerCache:
        """Room for what will be decoded, and the keys and values of `memory`."""
        cross = self.cross_attn.key_value(memory).cached()
        batch, heads, head_dim, _ = cross.key.shape
        empty = KeyValue(*2 * [jnp.zeros((batch, heads, slots, head_dim), cross.key.dtype)])
        return LayerCache(empty.cached(), cross)
