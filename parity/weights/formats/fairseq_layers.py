"""What the layouts that descend from fairseq have in common: the names within layers, and sinusoids in float32."""

import math
from typing import Any

import numpy as np

from parity.weights.formats.fields import Fields
from parity.weights.mapping import Rule
from transformer_config import TransformerConfig

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
    "silu": "silu",
}
"""Names of `transformers` to ours."""

DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 1024,
    "encoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_layers": 12,
    "decoder_ffn_dim": 4096,
    "decoder_attention_heads": 16,
    "is_encoder_decoder": True,
    "d_model": 1024,
    "dropout": 0.1,
    "activation_dropout": 0.0,
}
"""What the config classes of `transformers` have alike for fields that a file leaves out."""

MOST_POSITIONS = 1 << 17
"""A table of more is not computed: a config that asks for it is damaged, and would take all memory."""

_SUBLAYERS = {
    "encoder": {
        "self_attn.{q,k,v,out}_proj": "self_attn.{q,k,v,out}_proj",
        "self_attn_layer_norm": "norm1",
        "fc{n}": "feed_forward.linear{n}",
        "final_layer_norm": "norm2",
    },
    "decoder": {
        "self_attn.{q,k,v,out}_proj": "self_attn.{q,k,v,out}_proj",
        "self_attn_layer_norm": "norm1",
        "encoder_attn.{q,k,v,out}_proj": "cross_attn.{q,k,v,out}_proj",
        "encoder_attn_layer_norm": "norm2",
        "fc{n}": "feed_forward.linear{n}",
        "final_layer_norm": "norm3",
    },
}


def layer_rules(prefix: str) -> list[Rule]:
    """Of both stacks, whose names begin with `prefix`: attention, norms, feed-forward."""
    return [
        Rule(f"{prefix}{stack}.layers.{{i}}.{theirs}.{kind}", f"{stack}.layers.{{i}}.{ours}.{kind}")
        for stack, sublayers in _SUBLAYERS.items()
        for theirs, ours in sublayers.items()
        for kind in ("weight", "bias")
    ]


def final_norm_rules(prefix: str) -> list[Rule]:
    """Of the norms after the stacks."""
    return [
        Rule(f"{prefix}{stack}.layer_norm.{kind}", f"{stack}.final_norm.{kind}")
        for stack in ("encoder", "decoder")
        for kind in ("weight", "bias")
    ]


def read_shape(fields: Fields) -> dict[str, Any]:
    """What the configs of `transformers` call by the same names, as fields of ours."""
    fields.same("decoder_attention_heads", "encoder_attention_heads")
    fields.same("decoder_ffn_dim", "encoder_ffn_dim")
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        fields.ignore([name], "layers are left out in training alone, and not in ours")
    return {
        "d_model": fields.integer("d_model", least=1),
        "d_ff": fields.integer("encoder_ffn_dim", least=1),
        "num_heads": fields.integer("encoder_attention_heads", least=1),
        "num_encoder_layers": fields.integer("encoder_layers", least=1),
        "num_decoder_layers": fields.integer("decoder_layers", least=1),
        "activation": fields.choice("activation_function", ACTIVATIONS),
        "dropout": fields.number("dropout"),
        "attention_dropout": fields.number("attention_dropout"),
        "activation_dropout": fields.number("activation_dropout"),
        "embedding_scale": fields.flag("scale_embedding"),
        "freeze_padding": True,
        "pad_id": fields.integer("pad_token_id"),
        "bos_id": fields.integer("decoder_start_token_id"),
        "eos_id": fields.integer("eos_token_id"),
    }


def write_shape(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `read_shape`."""
    activation = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}[config.activation]
    return {
        "is_encoder_decoder": True,
        "d_model": config.d_model,
        "encoder_layers": config.num_encoder_layers,
        "decoder_layers": config.num_decoder_layers,
        "encoder_attention_heads": config.num_heads,
        "decoder_attention_heads": config.num_heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "activation_function": activation,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "scale_embedding": config.embedding_scale,
        "pad_token_id": config.pad_id,
        "decoder_start_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
    }


def half_minus_1_table(config: TransformerConfig) -> np.ndarray:
    """fairseq's table of positions, float32, as torch computes it there: a row for each up to the last that the config
    has, zeros in padding's.

    By torch itself, because its float32 sines differ from numpy's in the last bit. Raises ImportError without torch,
    ValueError for a width of less than 4.
    """
    import torch

    if config.d_model < 4:
        raise ValueError(f"d_model: expected at least 4, for a divisor of d_model/2 - 1, got {config.d_model}")
    rows, d_model = config.position_offset + config.max_len, config.d_model
    half = d_model // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10_000) / (half - 1)))
    angles = torch.arange(rows).float().unsqueeze(1) * frequencies.unsqueeze(0)
    table = torch.zeros(rows, d_model)
    table[:, :half], table[:, half : 2 * half] = angles.sin(), angles.cos()
    table[config.pad_id] = 0.0
    return table.numpy()
