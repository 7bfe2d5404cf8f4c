"""The Transformer in PyTorch, from scratch: the same files and classes as `flax_transformer`, and no jax."""

from torch_reference.dropout import NO_DROPOUT, DropoutMasks, DropoutSeed, DropoutSource
from torch_reference.masks import AttentionMask, Packing
from torch_reference.transformer import Decoder, Encoder, Transformer
from transformer_config import TransformerConfig

__all__ = [
    "NO_DROPOUT",
    "AttentionMask",
    "Decoder",
    "DropoutMasks",
    "DropoutSeed",
    "DropoutSource",
    "Encoder",
    "Packing",
    "Transformer",
    "TransformerConfig",
]
