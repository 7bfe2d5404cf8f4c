"""The Transformer in Flax NNX: the same files and classes as `torch_reference`, and no torch."""

from flax_transformer.dropout import NO_DROPOUT, DropoutKey, DropoutMasks, DropoutSource
from flax_transformer.masks import AttentionMask, Packing
from flax_transformer.transformer import Decoder, Encoder, Transformer
from transformer_config import TransformerConfig

__all__ = [
    "NO_DROPOUT",
    "AttentionMask",
    "Decoder",
    "DropoutKey",
    "DropoutMasks",
    "DropoutSource",
    "Encoder",
    "Packing",
    "Transformer",
    "TransformerConfig",
]
