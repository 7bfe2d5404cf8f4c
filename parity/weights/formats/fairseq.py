"""fairseq's own checkpoints of its architecture `transformer`: a `.pt` with `args` beside the weights."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.weights.formats import fairseq_layers
from parity.weights.formats.fields import Fields
from parity.weights.formats.format import Format
from parity.weights.lazy import OneArray
from parity.weights.mapping import Rule, WeightMapping
from transformer_config import TransformerConfig
from transformer_config.config import Activation

DEFAULTS: dict[str, Any] = {
    "activation_fn": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_normalize_before": False,
    "decoder_normalize_before": False,
    "encoder_learned_pos": False,
    "decoder_learned_pos": False,
    "share_decoder_input_output_embed": False,
    "share_all_embeddings": False,
    "no_scale_embedding": False,
    "max_source_positions": 1024,
    "max_target_positions": 1024,
}
"""What the architecture has for arguments that a checkpoint leaves out."""

PAD, BOS, EOS = 1, 0, 2
"""Ids that fairseq's dictionaries have. A target begins with the end of the one before."""

_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "swish": "silu",
}
_OTHERWISE = {
    "adaptive_input": (None, False),
    "adaptive_softmax_cutoff": (None,),
    "character_embeddings": (None, False),
    "cross_self_attention": (None, False),
    "decoder_layers_to_keep": (None,),
    "encoder_layers_to_keep": (None,),
    "layernorm_embedding": (None, False),
    "no_cross_attention": (None, False),
    "no_decoder_final_norm": (None, False),
    "no_token_positional_embeddings": (None, False),
    "tie_adaptive_weights": (None, False),
}
"""Arguments that make another architecture, with the values that do not."""
_ONLY_TRAINING = (
    *("encoder_layerdrop", "decoder_layerdrop", "encoder_embed_path", "decoder_embed_path", "checkpoint_activations"),
    *("adaptive_softmax_dropout", "adaptive_softmax_factor", "relu_dropout"),
    *("quant_noise_pq", "quant_noise_pq_block_size", "quant_noise_scalar"),
)
_NEUTRAL: dict[str, Any] = {
    **{name: neutral[-1] for name, neutral in _OTHERWISE.items()},
    **dict.fromkeys(("encoder_embed_path", "decoder_embed_path")),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "adaptive_softmax_dropout"), 0.0),
    **dict.fromkeys(("quant_noise_pq", "quant_noise_scalar"), 0.0),
    **dict.fromkeys(("checkpoint_activations", "offload_activations", "merge_src_tgt_embed"), False),
    "adaptive_softmax_factor": 4.0,
    "quant_noise_pq_block_size": 8,
    "min_params_to_wrap": 100_000_000,
}
"""Arguments that fairseq asks for when it builds the model, as they are where they do nothing."""
VERSIONS = ("encoder.version", "decoder.version")
"""Buffers that say which release has written the file; below 3, fairseq leaves out the norms after the stacks."""
DUMMIES = ("encoder.embed_positions._float_tensor", "decoder.embed_positions._float_tensor")
"""Buffers of sinusoids in older releases, which say the dtype; newer ones read past them."""
UNUSED = (*VERSIONS, *DUMMIES)
"""Tensors that say nothing of the model."""
SIZES = ("src_vocab_size", "tgt_vocab_size")
"""Fields that stand in no argument: they are the dictionaries'."""


class Fairseq(Format):
    """Post-norm or pre-norm; positions count from the row after padding's, skip padding, and are not stored unless
    they are learned."""

    name = "fairseq"
    title = "fairseq's transformer (a checkpoint with its args)"
    stores_computed = False

    def read(self, fields: Fields) -> TransformerConfig:
        """See `Format.read`. Arguments of tasks, training and data, which are not the architecture's, are ignored."""
        for name, neutral in _OTHERWISE.items():
            fields.expect(name, *neutral, why="it makes another architecture")
        fields.ignore(_ONLY_TRAINING, "changes training alone")
        for name in ("embed_dim", "ffn_embed_dim", "attention_heads", "normalize_before", "learned_pos"):
            fields.same(f"decoder_{name}", f"encoder_{name}")
        fields.same("max_target_positions", "max_source_positions")
        for name in ("decoder_output_dim", "decoder_input_dim"):
            fields.expect(name, None, fields.get("decoder_embed_dim"), why="embeddings are not projected")
        every, output = fields.flag("share_all_embeddings"), fields.flag("share_decoder_input_output_embed")
        config = TransformerConfig(
            src_vocab_size=fields.integer("src_vocab_size", least=1),
            tgt_vocab_size=fields.integer("tgt_vocab_size", least=1),
            d_model=fields.integer("encoder_embed_dim", least=1),
            d_ff=fields.integer("encoder_ffn_embed_dim", least=1),
            num_heads=fields.integer("encoder_attention_heads", least=1),
            num_encoder_layers=fields.integer("encoder_layers", least=1),
            num_decoder_layers=fields.integer("decoder_layers", least=1),
            activation=fields.choice("activation_fn", _ACTIVATIONS),
            norm_order="pre" if fields.flag("encoder_normalize_before") else "post",
            tie_embeddings="all" if every else "output" if output else "none",
            output_bias="never",
            embedding_scale=not fields.flag("no_scale_embedding"),
            freeze_padding=True,
            positions="learned" if fields.flag("encoder_learned_pos") else "fixed",
            positions_skip_padding=True,
            position_offset=PAD + 1,
            max_len=fields.integer("max_source_positions", least=1, most=fairseq_layers.MOST_POSITIONS),
            dropout=fields.number("dropout"),
            attention_dropout=fields.number("attention_dropout"),
            activation_dropout=fields.number("activation_dropout"),
            pad_id=PAD,
            bos_id=EOS,
            eos_id=EOS,
        )
        rest = fields.values.keys() - fields.used.keys()
        fields.ignore(sorted(rest), "no argument of the architecture")
        return config

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """See `Format.write`."""
        pre, learned = config.norm_order == "pre", config.positions == "learned"
        activations = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items()) if theirs != "swish"}
        values: dict[str, Any] = {
            **_NEUTRAL,
            "arch": "transformer",
            "src_vocab_size": config.src_vocab_size,
            "tgt_vocab_size": config.tgt_vocab_size,
            # fairseq lists no swish, and where it is named it would call a class in the place of a function.
            "activation_fn": activations.get(config.activation, "relu"),
            "dropout": config.dropout,
            "attention_dropout": config.attention_dropout,
            "activation_dropout": config.activation_dropout,
            "share_all_embeddings": config.tie_embeddings == "all",
            "share_decoder_input_output_embed": config.tie_embeddings != "none",
            "no_scale_embedding": not config.embedding_scale,
            "max_source_positions": config.max_len,
            "max_target_positions": config.max_len,
            "decoder_input_dim": config.d_model,
            "decoder_output_dim": config.d_model,
        }
        for stack, layers in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
            values |= {
                f"{stack}_layers": layers,
                f"{stack}_embed_dim": config.d_model,
                f"{stack}_ffn_embed_dim": config.d_ff,
                f"{stack}_attention_heads": config.num_heads,
                f"{stack}_normalize_before": pre,
                f"{stack}_learned_pos": learned,
            }
        return values

    def mapping(self, config: TransformerConfig) -> WeightMapping:
        """See `Format.mapping`."""
        stored = config.positions == "learned"
        table = "weight" if stored else "weights"
        rules = [
            *fairseq_layers.layer_rules(""),
            *fairseq_layers.final_norm_rules(""),
            *(
                Rule(f"{stack}.embed_positions.{table}", f"{side}_positions.table")
                for stack, side in (("encoder", "src"), ("decoder", "tgt"))
            ),
            Rule("encoder.embed_tokens.weight", "src_embedding.weight"),
        ]
        aliases: dict[str, str] = {}
        if config.tie_embeddings == "all":
            again = ("decoder.embed_tokens.weight", "decoder.output_projection.weight")
            aliases = dict.fromkeys(again, "encoder.embed_tokens.weight")
        else:
            rules.append(Rule("decoder.embed_tokens.weight", "tgt_embedding.weight"))
            if config.tie_embeddings == "output":
                aliases = {"decoder.output_projection.weight": "decoder.embed_tokens.weight"}
            else:
                rules.append(Rule("decoder.output_projection.weight", "output_projection.weight"))
        target_aliases = {"tgt_embedding.weight": "src_embedding.weight"} if config.tie_embeddings == "all" else None
        return WeightMapping(rules, source_aliases=aliases, target_aliases=target_aliases)

    def computed(self, config: TransformerConfig) -> Mapping[str, np.ndarray]:
        """The table, which is never stored."""
        if config.positions == "learned":
            return {}
        names = [f"{stack}.embed_positions.weights" for stack in ("encoder", "decoder")]
        return OneArray(names, lambda: fairseq_layers.half_minus_1_table(config))
