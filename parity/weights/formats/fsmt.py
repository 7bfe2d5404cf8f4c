"""FSMT (`FSMTForConditionalGeneration` of `transformers`): fairseq's WMT19 models, a vocabulary a side."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.weights.formats import fairseq_layers
from parity.weights.formats.fields import Fields
from parity.weights.formats.format import Format
from parity.weights.formats.transformers_fields import account_for_the_usual
from parity.weights.lazy import OneArray
from parity.weights.mapping import Rule, WeightMapping
from transformer_config import TransformerConfig

DEFAULTS: dict[str, Any] = {
    **fairseq_layers.DEFAULTS,
    "langs": ("en", "de"),
    "src_vocab_size": 42024,
    "tgt_vocab_size": 42024,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "activation_function": "relu",
    "attention_dropout": 0.0,
    "decoder_start_token_id": 2,
    "scale_embedding": True,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
"""What FSMTConfig has for fields that a file leaves out."""

_SIDES = {"src": "model.encoder", "tgt": "model.decoder"}


class Fsmt(Format):
    """Post-norm; the table of positions is a parameter like any other there, and skips padding."""

    name = "fsmt"
    title = "transformers' FSMTForConditionalGeneration (fairseq's WMT19 models)"

    def read(self, fields: Fields) -> TransformerConfig:
        """See `Format.read`."""
        fields.expect("model_type", "fsmt")
        account_for_the_usual(fields)
        fields.ignore(["langs"], "names the languages")
        fields.ignore(["decoder"], "the class drops it")
        if "vocab_size" in fields.values:
            fields.same("vocab_size", "tgt_vocab_size")
        tied = fields.flag("tie_word_embeddings")
        if tied:
            fields.same("tgt_vocab_size", "src_vocab_size")
        shape = fairseq_layers.read_shape(fields)
        config = TransformerConfig(
            **shape,
            src_vocab_size=fields.integer("src_vocab_size", least=1),
            tgt_vocab_size=fields.integer("tgt_vocab_size", least=1),
            tie_embeddings="all" if tied else "none",
            output_bias="never",
            positions="learned",
            positions_skip_padding=True,
            position_offset=shape["pad_id"] + 1,
            max_len=fields.integer("max_position_embeddings", least=1, most=fairseq_layers.MOST_POSITIONS),
        )
        fields.finish()
        return config

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """See `Format.write`."""
        return {
            "model_type": "fsmt",
            "architectures": ["FSMTForConditionalGeneration"],
            **fairseq_layers.write_shape(config),
            "langs": ["src", "tgt"],
            "src_vocab_size": config.src_vocab_size,
            "tgt_vocab_size": config.tgt_vocab_size,
            "tie_word_embeddings": config.tie_embeddings == "all",
            "max_position_embeddings": config.max_len,
        }

    def mapping(self, config: TransformerConfig) -> WeightMapping:
        """See `Format.mapping`."""
        rules = fairseq_layers.layer_rules("model.")
        rules += [
            Rule(f"{theirs}.embed_positions.weight", f"{ours}_positions.table") for ours, theirs in _SIDES.items()
        ]
        if config.tie_embeddings == "all":
            name = "model.decoder.embed_tokens.weight"
            again = ("model.encoder.embed_tokens.weight", "model.decoder.output_projection.weight")
            return WeightMapping(
                [*rules, Rule(name, "src_embedding.weight")],
                source_aliases=dict.fromkeys(again, name),
                target_aliases={"tgt_embedding.weight": "src_embedding.weight"},
            )
        rules += [Rule(f"{theirs}.embed_tokens.weight", f"{ours}_embedding.weight") for ours, theirs in _SIDES.items()]
        return WeightMapping([*rules, Rule("model.decoder.output_projection.weight", "output_projection.weight")])

    def computed(self, config: TransformerConfig) -> Mapping[str, np.ndarray]:
        """The table, where a file leaves it out."""
        names = [f"{side}.embed_positions.weight" for side in _SIDES.values()]
        return OneArray(names, lambda: fairseq_layers.half_minus_1_table(config))
