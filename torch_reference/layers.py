"""One layer of the encoder and one of the decoder: sublayers, residual connections, norms (paper 3.1)."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torch_reference.attention import MultiHeadAttention
from torch_reference.dropout import NO_DROPOUT, DropoutSource, apply_dropout
from torch_reference.feed_forward import FeedForward
from torch_reference.masks import AttentionMask
from torch_reference.primitives import LayerNorm
from transformer_config import TransformerConfig


class LayerOutput(NamedTuple):
    """What a layer, or a stack of them, computes; and by name the attention weights, if they were asked for."""

    hidden: Float[Tensor, "batch length d_model"]
    weights: dict[str, Float[Tensor, "batch heads queries keys"]]


class ResidualLayer(nn.Module):
    """Where the norm stands: norm(x + sublayer(x)), the paper's, or x + sublayer(norm(x))."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.norm_order = config.norm_order
        self.rate = config.dropout

    def before(
        self, norm: LayerNorm, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """What the sublayer sees."""
        return norm(x) if self.norm_order == "pre" else x

    def after(
        self,
        norm: LayerNorm,
        x: Float[Tensor, "batch length d_model"],
        sublayer: Float[Tensor, "batch length d_model"],
        dropout: DropoutSource = NO_DROPOUT,
    ) -> Float[Tensor, "batch length d_model"]:
        """The sublayer's output, dropped out, added to `x` (paper 5.4), and normed if the norm comes last."""
        x = x + apply_dropout(sublayer, dropout, rate=self.rate)
        return norm(x) if self.norm_order == "post" else x


class EncoderLayer(ResidualLayer):
    """Self-attention, then feed-forward."""

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator):
        super().__init__(config)
        self.self_attn = MultiHeadAttention(config, generator=generator)
        self.norm1 = LayerNorm(config)
        self.feed_forward = FeedForward(config, generator=generator)
        self.norm2 = LayerNorm(config)

    def forward(
        self,
        x: Float[Tensor, "batch length d_model"],
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

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator):
        super().__init__(config)
        self.self_attn = MultiHeadAttention(config, generator=generator)
        self.norm1 = LayerNorm(config)
        self.cross_attn = MultiHeadAttention(config, generator=generator)
        self.norm2 = LayerNorm(config)
        self.feed_forward = FeedForward(config, generator=generator)
        self.norm3 = LayerNorm(config)

    def forward(
        self,
        x: Float[Tensor, "batch tgt_len d_model"],
        memory: Float[Tensor, "batch src_len d_model"],
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
