"""The facts that both twins share: hyper-parameters and special ids. Standard library only."""

from transformer_config.config import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    UNK_ID,
    TransformerConfig,
)
from transformer_config.decoding import BeamConfig, LengthConfig, SamplingConfig

__all__ = ["BOS_ID", "EOS_ID", "PAD_ID", "UNK_ID", "BeamConfig", "LengthConfig", "SamplingConfig", "TransformerConfig"]
