"""M2M100 as `transformers` has it (`M2M100ForConditionalGeneration`): M2M100 and NLLB, 100 and 200 languages."""

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
    "vocab_size": 128112,
    "encoder_layerdrop": 0.05,
    "decoder_layerdrop": 0.05,
    "activation_function": "relu",
    "attention_dropout": 0.1,
    "decoder_start_token_id": 2,
    "scale_embedding": True,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
"""What M2M100Config has for fields that a file leaves out."""

SPARE_ROWS = 2
"""Rows of the table beyond max_position_embeddings, whatever the id of padding."""
_TABLES = {"src_positions.table": "encoder", "tgt_positions.table": "decoder"}


class M2M100(Format):
    """Pre-norm; positions count from the row after padding's, skip padding, and are not stored; all embeddings one."""

    name = "m2m_100"
    title = "transformers' M2M100ForConditionalGeneration (M2M100, NLLB)"
    stores_computed = False

    def read(self, fields: Fields) -> TransformerConfig:
        """See `Format.read`."""
        fields.expect("model_type", "m2m_100")
        account_for_the_usual(fields)
        fields.expect("tie_word_embeddings", True, why="the class then has an embedding that nothing reads")
        vocab_size = fields.integer("vocab_size", least=1)
        shape = fairseq_layers.read_shape(fields)
        offset = shape["pad_id"] + 1
        rows = fields.integer("max_position_embeddings", least=1, most=fairseq_layers.MOST_POSITIONS) + SPARE_ROWS
        if rows <= offset:
            raise fields.error("max_position_embeddings", f"at least {offset}, for positions beyond padding's")
        config = TransformerConfig(
            **shape,
            src_vocab_size=vocab_size,
            tgt_vocab_size=vocab_size,
            tie_embeddings="all",
            norm_order="pre",
            positions="fixed",
            positions_skip_padding=True,
            position_offset=offset,
            max_len=rows - offset,
        )
        fields.finish()
        return config

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """See `Format.write`."""
        return {
            "model_type": "m2m_100",
            "architectures": ["M2M100ForConditionalGeneration"],
            **fairseq_layers.write_shape(config),
            "vocab_size": config.src_vocab_size,
            "tie_word_embeddings": True,
            "max_position_embeddings": config.max_len + config.pad_id + 1 - SPARE_ROWS,
        }

    def mapping(self, config: TransformerConfig) -> WeightMapping:
        """See `Format.mapping`."""
        again = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
        return WeightMapping(
            [
                *fairseq_layers.layer_rules("model."),
                *fairseq_layers.final_norm_rules("model."),
                Rule("model.shared.weight", "src_embedding.weight"),
                *(Rule(f"model.{side}.embed_positions.weights", table) for table, side in _TABLES.items()),
            ],
            source_aliases=dict.fromkeys(again, "model.shared.weight"),
            target_aliases={"tgt_embedding.weight": "src_embedding.weight"},
        )

    def computed(self, config: TransformerConfig) -> Mapping[str, np.ndarray]:
        """The table, which is never stored."""
        names = [f"model.{side}.embed_positions.weights" for side in _TABLES.values()]
        return OneArray(names, lambda: fairseq_layers.half_minus_1_table(config))
