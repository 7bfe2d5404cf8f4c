"""The same trained weights in the hands of `transformers` and of CTranslate2."""

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from torch_reference.embedding import Positions
from transformer_config import BOS_ID, EOS_ID, PAD_ID, UNK_ID, TransformerConfig

Weights = Mapping[str, np.ndarray]
"""By the names of the torch reference."""


def expect_expressible(config: TransformerConfig) -> None:
    """Raises ValueError for a model that neither of the two could be."""
    fields = {"activation": "relu", "tie_embeddings": "all", "use_bias": True, "window": None}
    for name, expected in fields.items():
        if getattr(config, name) != expected:
            raise ValueError(f"{name}: expected {expected!r} for a model of either, got {getattr(config, name)!r}")


def position_table(config: TransformerConfig, length: int) -> np.ndarray:
    """(length, d_model), float32."""
    with torch.no_grad():
        return Positions(config, generator=torch.Generator()).forward(length).numpy().astype(np.float32)


_SUBLAYERS = {
    "encoder": {"self_attn": "norm1", "feed_forward": "norm2"},
    "decoder": {"self_attn": "norm1", "cross_attn": "norm2", "feed_forward": "norm3"},
}


def transformers_model(config: TransformerConfig, weights: Weights, *, positions: int = 512) -> torch.nn.Module:
    """A model of `transformers` with these weights, and with our table of positions in the place of its own.

    Marian where norms come after, M2M100 where they come first.
    """
    from transformers import M2M100Config, M2M100ForConditionalGeneration, MarianConfig, MarianMTModel

    expect_expressible(config)
    post = config.norm_order == "post"
    shape = {
        "vocab_size": config.tgt_vocab_size,
        "d_model": config.d_model,
        "encoder_layers": config.num_encoder_layers,
        "decoder_layers": config.num_decoder_layers,
        "encoder_attention_heads": config.num_heads,
        "decoder_attention_heads": config.num_heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "max_position_embeddings": positions,
        "activation_function": "relu",
        "scale_embedding": True,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "forced_eos_token_id": None,
        "decoder_start_token_id": BOS_ID,
    }
    model = (
        MarianMTModel(MarianConfig(**shape)) if post else M2M100ForConditionalGeneration(M2M100Config(**shape))
    ).eval()
    table = position_table(config, positions)
    state = {"model.shared.weight": weights["src_embedding.weight"], "lm_head.weight": weights["src_embedding.weight"]}
    state |= _of_layers(config, weights)
    for side in _SUBLAYERS:
        state[f"model.{side}.embed_tokens.weight"] = weights["src_embedding.weight"]
        if post:
            state[f"model.{side}.embed_positions.weight"] = table
        else:
            # Rows are counted from the one after padding's.
            getattr(model.model, side).embed_positions.weights[PAD_ID + 1 : PAD_ID + 1 + positions] = torch.tensor(
                table
            )
            for kind in ("weight", "bias"):
                state[f"model.{side}.layer_norm.{kind}"] = weights[f"{side}.final_norm.{kind}"]
    missing, unexpected = model.load_state_dict({k: torch.tensor(v) for k, v in state.items()}, strict=False)
    if unexpected or set(missing) - {"final_logits_bias"}:
        raise ValueError(f"expected the names of the model, got missing {missing} and unexpected {unexpected}")
    return model


def _of_layers(config: TransformerConfig, weights: Weights) -> dict[str, np.ndarray]:
    state = {}
    for side, sublayers in _SUBLAYERS.items():
        layers = config.num_encoder_layers if side == "encoder" else config.num_decoder_layers
        for i, (sublayer, norm), kind in itertools.product(range(layers), sublayers.items(), ("weight", "bias")):
            ours, theirs = f"{side}.layers.{i}", f"model.{side}.layers.{i}"
            name = {"self_attn": "self_attn", "cross_attn": "encoder_attn", "feed_forward": "final"}[sublayer]
            state[f"{theirs}.{name}_layer_norm.{kind}"] = weights[f"{ours}.{norm}.{kind}"]
            if sublayer == "feed_forward":
                for n in (1, 2):
                    state[f"{theirs}.fc{n}.{kind}"] = weights[f"{ours}.feed_forward.linear{n}.{kind}"]
            else:
                for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    state[f"{theirs}.{name}.{projection}.{kind}"] = weights[f"{ours}.{sublayer}.{projection}.{kind}"]
    return state


def ctranslate2_folder(config: TransformerConfig, weights: Weights, folder: Path, *, positions: int = 512) -> None:
    """Writes a model that `ctranslate2.Translator` loads. Its pieces are named by their ids."""
    from ctranslate2.converters import utils
    from ctranslate2.specs import common_spec, transformer_spec

    expect_expressible(config)
    spec = transformer_spec.TransformerSpec.from_config(
        (config.num_encoder_layers, config.num_decoder_layers),
        config.num_heads,
        pre_norm=config.norm_order == "pre",
        activation=common_spec.Activation.RELU,
    )

    def linear(target: common_spec.LinearSpec, name: str) -> common_spec.LinearSpec:
        target.weight, target.bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return target

    def norm(target: common_spec.LayerNormSpec, name: str) -> None:
        target.gamma, target.beta = weights[f"{name}.weight"], weights[f"{name}.bias"]

    def fused(target: common_spec.LinearSpec, name: str, projections: str) -> None:
        utils.fuse_linear(target, [linear(common_spec.LinearSpec(), f"{name}.{p}_proj") for p in projections])

    for side, sublayers in _SUBLAYERS.items():
        of_side = getattr(spec, side)
        of_side.scale_embeddings = config.d_model**0.5
        of_side.position_encodings.encodings = position_table(config, positions)
        embeddings = of_side.embeddings[0] if side == "encoder" else of_side.embeddings
        embeddings.weight = weights["src_embedding.weight"]
        if config.norm_order == "pre":
            norm(of_side.layer_norm, f"{side}.final_norm")
        for i, layer in enumerate(of_side.layer):
            ours = f"{side}.layers.{i}"
            fused(layer.self_attention.linear[0], f"{ours}.self_attn", "qkv")
            linear(layer.self_attention.linear[1], f"{ours}.self_attn.out_proj")
            norm(layer.self_attention.layer_norm, f"{ours}.{sublayers['self_attn']}")
            if side == "decoder":
                fused(layer.attention.linear[0], f"{ours}.cross_attn", "q")
                fused(layer.attention.linear[1], f"{ours}.cross_attn", "kv")
                linear(layer.attention.linear[2], f"{ours}.cross_attn.out_proj")
                norm(layer.attention.layer_norm, f"{ours}.{sublayers['cross_attn']}")
            linear(layer.ffn.linear_0, f"{ours}.feed_forward.linear1")
            linear(layer.ffn.linear_1, f"{ours}.feed_forward.linear2")
            norm(layer.ffn.layer_norm, f"{ours}.{sublayers['feed_forward']}")
    spec.decoder.projection.weight = weights["src_embedding.weight"]
    pieces = [str(i) for i in range(config.tgt_vocab_size)]
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = str(BOS_ID), str(EOS_ID), str(UNK_ID)
    spec.config.decoder_start_token = str(BOS_ID)
    spec.config.add_source_bos, spec.config.add_source_eos = False, False
    spec.validate()
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))
