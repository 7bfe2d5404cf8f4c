"""Marian as `transformers` has it (`MarianMTModel`): OPUS-MT, 1,400 translation models of Helsinki-NLP."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.weights.formats import fairseq_layers
from parity.weights.formats.fields import Fields
from parity.weights.formats.format import Format
from parity.weights.formats.transformers_fields import account_for_the_usual
from parity.weights.lazy import OneArray
from parity.weights.mapping import Rule, WeightMapping
from parity.weights.rules import MergeHeads
from transformer_config import TransformerConfig

DEFAULTS: dict[str, Any] = {
    **fairseq_layers.DEFAULTS,
    "vocab_size": 58101,
    "decoder_vocab_size": None,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "activation_function": "gelu",
    "attention_dropout": 0.0,
    "decoder_start_token_id": 58100,
    "scale_embedding": False,
    "pad_token_id": 58100,
    "eos_token_id": 0,
    "share_encoder_decoder_embeddings": True,
    "is_decoder": False,
    "tie_word_embeddings": True,
}
"""What MarianConfig has for fields that a file leaves out."""

_EMBEDDINGS = {"src_embedding.weight": "model.encoder", "tgt_embedding.weight": "model.decoder"}


class Marian(Format):
    """Post-norm; a table of concatenated sinusoids, rounded to float32; a bias of the logits that is not trained."""

    name = "marian"
    title = "transformers' MarianMTModel (OPUS-MT)"

    def read(self, fields: Fields) -> TransformerConfig:
        """See `Format.read`."""
        fields.expect("model_type", "marian")
        account_for_the_usual(fields)
        tied, shared = fields.flag("tie_word_embeddings"), fields.flag("share_encoder_decoder_embeddings")
        if shared and not tied:
            raise fields.error("tie_word_embeddings", "true with share_encoder_decoder_embeddings")
        vocab_size = fields.integer("vocab_size", least=1)
        tgt_vocab_size = fields.get("decoder_vocab_size")
        tgt_vocab_size = vocab_size if tgt_vocab_size is None else fields.integer("decoder_vocab_size", least=1)
        if shared:
            fields.expect("decoder_vocab_size", None, vocab_size, why="one matrix of embeddings is shared")
        config = TransformerConfig(
            **fairseq_layers.read_shape(fields),
            src_vocab_size=vocab_size,
            tgt_vocab_size=tgt_vocab_size,
            tie_embeddings=("all" if shared else "output") if tied else "none",
            output_bias="fixed",
            positions="fixed",
            max_len=fields.integer("max_position_embeddings", least=1, most=fairseq_layers.MOST_POSITIONS),
        )
        fields.finish()
        return config

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """See `Format.write`."""
        return {
            "model_type": "marian",
            "architectures": ["MarianMTModel"],
            **fairseq_layers.write_shape(config),
            "vocab_size": config.src_vocab_size,
            "decoder_vocab_size": config.tgt_vocab_size,
            "share_encoder_decoder_embeddings": config.tie_embeddings == "all",
            "tie_word_embeddings": config.tie_embeddings != "none",
            "max_position_embeddings": config.max_len,
        }

    def mapping(self, config: TransformerConfig) -> WeightMapping:
        """See `Format.mapping`."""
        tie = config.tie_embeddings
        rules = [
            *fairseq_layers.layer_rules("model."),
            Rule("model.encoder.embed_positions.weight", "src_positions.table"),
            Rule("model.decoder.embed_positions.weight", "tgt_positions.table"),
            Rule("final_logits_bias", "output_bias", (MergeHeads(1, 0),)),
        ]
        if tie == "all":
            rules.append(Rule("model.shared.weight", "src_embedding.weight"))
            again = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
            aliases = dict.fromkeys(again, "model.shared.weight")
        else:
            rules += [Rule(f"{theirs}.embed_tokens.weight", ours) for ours, theirs in _EMBEDDINGS.items()]
            aliases = {"lm_head.weight": "model.decoder.embed_tokens.weight"} if tie == "output" else {}
        if tie == "none":
            rules.append(Rule("lm_head.weight", "output_projection.weight"))
        return WeightMapping(
            rules,
            source_aliases=aliases,
            target_aliases={"tgt_embedding.weight": "src_embedding.weight"} if tie == "all" else None,
        )

    def computed(self, config: TransformerConfig) -> Mapping[str, np.ndarray]:
        """The table, where a file leaves it out."""
        names = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
        return OneArray(names, lambda: sinusoids(config.max_len, config.d_model))


def sinusoids(rows: int, d_model: int) -> np.ndarray:
    """All sines, then all cosines, computed in float64 and rounded to float32; of an odd width one sine more."""
    width = np.arange(d_model)
    angles = np.arange(rows)[:, None] / np.power(10_000, 2 * (width // 2) / d_model)
    return np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], axis=1).astype(np.float32)
