"""To CTranslate2: a folder that its `Translator` loads. There is no way back, because it merges and renames for speed.

CTranslate2 is given token strings, which here are the pieces of the vocabulary. It adds nothing to a source: whoever
calls it puts the end at the end.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parity.weights.checkpoint import StoreError
from parity.weights.formats import FORMATS
from parity.weights.formats.express import Sinusoids
from transformer_config import TransformerConfig

Weights = Mapping[str, np.ndarray]
"""By the names of the torch reference."""

_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}
_FEWEST_POSITIONS = 512
"""Rows of the table, where ours could be computed on."""


def write_ctranslate2(
    folder: Path, config: TransformerConfig, weights: Weights, *, pieces: Sequence[str], sinusoids: Sinusoids
) -> None:
    """Writes the folder, in float32. `pieces` name the ids of both vocabularies.

    Raises FieldError for what CTranslate2 cannot express, StoreError where it is not installed.
    """
    FORMATS["ctranslate2"].write(config)
    try:
        from ctranslate2.specs import common_spec, transformer_spec
    except ImportError as error:
        raise StoreError(
            f"ctranslate2: expected it to be installed, which writes its files (pip install ctranslate2), got {error}"
        ) from error
    weights = _InFloat32(weights)
    spec = transformer_spec.TransformerSpec.from_config(
        (config.num_encoder_layers, config.num_decoder_layers),
        config.num_heads,
        pre_norm=config.norm_order == "pre",
        activation=getattr(common_spec.Activation, _ACTIVATIONS[config.activation]),
    )
    write = _Writer(weights, config)
    tied = config.tie_embeddings == "all"
    spec.encoder.embeddings[0].weight = weights["src_embedding.weight"]
    spec.decoder.embeddings.weight = spec.encoder.embeddings[0].weight if tied else weights["tgt_embedding.weight"]
    for stack, side in (("encoder", "src"), ("decoder", "tgt")):
        of_stack = getattr(spec, stack)
        of_stack.scale_embeddings = config.d_model**0.5 if config.embedding_scale else 1.0
        of_stack.position_encodings.encodings = _table(config, weights, side, sinusoids)
        if config.has_final_norm:
            write.norm(of_stack.layer_norm, f"{stack}.final_norm")
        for i, layer in enumerate(of_stack.layer):
            write.layer(layer, f"{stack}.layers.{i}", decoder=stack == "decoder")
    untied = config.tie_embeddings == "none"
    spec.decoder.projection.weight = weights["output_projection.weight"] if untied else spec.decoder.embeddings.weight
    for name in ("output_bias", "output_projection.bias"):
        if name in weights:
            spec.decoder.projection.bias = weights[name]
    _name_pieces(spec, config, pieces)
    spec.validate()
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))


def log_probabilities(folder: Path, config: TransformerConfig, src: np.ndarray, tgt: np.ndarray) -> np.ndarray:
    """What the folder's `Translator` gives each piece of `tgt`, ends included, row after row without padding.

    (pieces,), float32. Both are ids, padded on the right. Raises ImportError where CTranslate2 is not installed.
    """
    import ctranslate2

    translator = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32")
    sources, targets = _in_words(folder, "source", src, config.pad_id), _in_words(folder, "target", tgt, config.pad_id)
    scored = translator.score_batch(sources, [target[:-1] for target in targets])  # it ends them by itself
    return np.concatenate([np.array(each.log_probs, np.float32) for each in scored])


def _in_words(folder: Path, side: str, rows: np.ndarray, pad_id: int) -> list[list[str]]:
    shared = folder / "shared_vocabulary.json"
    file = shared if shared.is_file() else folder / f"{side}_vocabulary.json"
    pieces = json.loads(file.read_text(encoding="utf-8"))
    return [[pieces[number] for number in row if number != pad_id] for row in rows.tolist()]


class _InFloat32(Mapping[str, np.ndarray]):
    """CTranslate2 has neither float64 nor numpy's bfloat16; to narrower types it converts when it loads."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> np.ndarray:
        return np.ascontiguousarray(self._weights[name], np.float32)

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class _Writer:
    """Puts our tensors into the places of CTranslate2."""

    def __init__(self, weights: Weights, config: TransformerConfig) -> None:
        self._weights, self._config = weights, config

    def norm(self, target: Any, name: str) -> None:
        target.gamma = self._weights[f"{name}.weight"]
        target.beta = self._bias(name, target.gamma)

    def layer(self, target: Any, name: str, *, decoder: bool) -> None:
        self._attention(target.self_attention, f"{name}.self_attn", fused=("qkv",))
        self.norm(target.self_attention.layer_norm, f"{name}.norm1")
        if decoder:
            self._attention(target.attention, f"{name}.cross_attn", fused=("q", "kv"))
            self.norm(target.attention.layer_norm, f"{name}.norm2")
        self._linear(target.ffn.linear_0, f"{name}.feed_forward.linear1")
        self._linear(target.ffn.linear_1, f"{name}.feed_forward.linear2")
        self.norm(target.ffn.layer_norm, f"{name}.norm{3 if decoder else 2}")

    def _attention(self, target: Any, name: str, *, fused: tuple[str, ...]) -> None:
        for place, projections in zip(target.linear, fused, strict=False):
            names = [f"{name}.{projection}_proj" for projection in projections]
            place.weight = np.concatenate([self._weights[f"{each}.weight"] for each in names])
            place.bias = np.concatenate([self._bias(each, self._weights[f"{each}.weight"]) for each in names])
        self._linear(target.linear[-1], f"{name}.out_proj")

    def _linear(self, target: Any, name: str) -> None:
        target.weight = self._weights[f"{name}.weight"]
        target.bias = self._bias(name, target.weight)

    def _bias(self, name: str, weight: np.ndarray) -> np.ndarray:
        """Zeros where ours has none."""
        if self._config.use_bias:
            return self._weights[f"{name}.bias"]
        return np.zeros(weight.shape[0], weight.dtype)


def _table(config: TransformerConfig, weights: Weights, side: str, sinusoids: Sinusoids) -> np.ndarray:
    """The positions from the first one on."""
    if config.has_position_table:
        return weights[f"{side}_positions.table"][config.position_offset :]
    return sinusoids(config, max(config.max_len, _FEWEST_POSITIONS)).astype(np.float32)


def _name_pieces(spec: Any, config: TransformerConfig, pieces: Sequence[str]) -> None:
    if len(pieces) < max(config.src_vocab_size, config.tgt_vocab_size):
        raise ValueError(
            f"expected names of {max(config.src_vocab_size, config.tgt_vocab_size)} pieces, got {len(pieces)}"
        )
    spec.register_source_vocabulary(list(pieces[: config.src_vocab_size]))
    spec.register_target_vocabulary(list(pieces[: config.tgt_vocab_size]))
    start, end = pieces[config.bos_id], pieces[config.eos_id]
    spec.config.bos_token, spec.config.eos_token, spec.config.decoder_start_token = start, end, start
    # What stands for a token that is not in the vocabulary; of ours there is none.
    spec.config.unk_token = pieces[config.pad_id]
    spec.config.add_source_bos, spec.config.add_source_eos = False, False
    spec.config.layer_norm_epsilon = config.norm_eps
