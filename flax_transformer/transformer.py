"""Encoder, decoder and the whole model (paper 3.1, figure 1)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from flax_transformer.attention import CachedKeyValue
from flax_transformer.dropout import NO_DROPOUT, DropoutSource, apply_dropout
from flax_transformer.embedding import Embedding, Positions
from flax_transformer.layers import DecoderLayer, EncoderLayer, LayerCache, LayerOutput
from flax_transformer.masks import (
    AttentionMask,
    Packing,
    causal_mask,
    padding_mask,
    segment_positions,
    window_mask,
)
from flax_transformer.primitives import Fixed, LayerNorm, linear
from transformer_config import TransformerConfig


class Encoder(nnx.Module):
    """A stack of encoder layers, and a norm at the end if there is one (`TransformerConfig.final_norm`)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.gradient_checkpointing = config.gradient_checkpointing
        self.layers = nnx.List([EncoderLayer(config, rngs=rngs) for _ in range(config.num_encoder_layers)])
        self.final_norm = LayerNorm(config) if config.has_final_norm else None

    def __call__(
        self,
        x: Float[Array, "batch src_len d_model"],
        *,
        mask: AttentionMask,
        dropout: DropoutSource = NO_DROPOUT,
        return_weights: bool = False,
    ) -> LayerOutput:
        """Runs the layers one after the other; weights are named `layers.0.self_attn` and so on."""

        def run(layer: EncoderLayer, x: Array, mask: AttentionMask, dropout: DropoutSource) -> LayerOutput:
            return layer(x, mask=mask, dropout=dropout, return_weights=return_weights)

        run = nnx.remat(run) if self.gradient_checkpointing else run
        weights: dict[str, Array] = {}
        for i, layer in enumerate(self.layers):
            x, layer_weights = run(layer, x, mask, dropout.at(f"layers.{i}"))
            weights |= _prefixed(f"layers.{i}", layer_weights)
        return LayerOutput(x if self.final_norm is None else self.final_norm(x), weights)


class Decoder(nnx.Module):
    """A stack of decoder layers, and a norm at the end if there is one (`TransformerConfig.final_norm`)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.gradient_checkpointing = config.gradient_checkpointing
        self.layers = nnx.List([DecoderLayer(config, rngs=rngs) for _ in range(config.num_decoder_layers)])
        self.final_norm = LayerNorm(config) if config.has_final_norm else None

    def __call__(
        self,
        x: Float[Array, "batch tgt_len d_model"],
        memory: Float[Array, "batch src_len d_model"],
        *,
        mask: AttentionMask,
        memory_mask: AttentionMask,
        dropout: DropoutSource = NO_DROPOUT,
        return_weights: bool = False,
    ) -> LayerOutput:
        """Runs the layers one after the other; weights are named `layers.0.self_attn`, `layers.0.cross_attn`, ..."""

        def run(
            layer: DecoderLayer,
            x: Array,
            memory: Array,
            mask: AttentionMask,
            memory_mask: AttentionMask,
            dropout: DropoutSource,
        ) -> LayerOutput:
            return layer(x, memory, mask=mask, memory_mask=memory_mask, dropout=dropout, return_weights=return_weights)

        run = nnx.remat(run) if self.gradient_checkpointing else run
        weights: dict[str, Array] = {}
        for i, layer in enumerate(self.layers):
            x, layer_weights = run(layer, x, memory, mask, memory_mask, dropout.at(f"layers.{i}"))
            weights |= _prefixed(f"layers.{i}", layer_weights)
        return LayerOutput(x if self.final_norm is None else self.final_norm(x), weights)

    def step(
        self,
        x: Float[Array, "batch beams d_model"],
        caches: tuple[LayerCache, ...],
        *,
        slot: Int[Array, ""],
        allowed: Bool[Array, "#batch 1 #beams slots"],
        memory_allowed: Bool[Array, "#batch 1 1 src_len"],
    ) -> tuple[Float[Array, "batch beams d_model"], tuple[LayerCache, ...]]:
        """`__call__` for one new position of every beam; see `DecoderLayer.step`."""
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, new_cache = layer.step(x, cache, slot=slot, allowed=allowed, memory_allowed=memory_allowed)
            new_caches.append(new_cache)
        return x if self.final_norm is None else self.final_norm(x), tuple(new_caches)


class Transformer(nnx.Module):
    """Attention Is All You Need, from ids to logits. The default config is the paper's base model."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.src_embedding = Embedding(config.src_vocab_size, config, rngs=rngs)
        self.tgt_embedding = (
            self.src_embedding
            if config.tie_embeddings == "all"
            else Embedding(config.tgt_vocab_size, config, rngs=rngs)
        )
        self.src_positions = Positions(config, rngs=rngs)
        self.tgt_positions = Positions(config, rngs=rngs)
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)
        untied, bias = config.tie_embeddings == "none", config.trains_output_bias
        self.output_projection = (
            linear(config, config.d_model, config.tgt_vocab_size, use_bias=bias, rngs=rngs) if untied else None
        )
        self.output_bias: nnx.Variable | None
        zeros = jnp.zeros(config.tgt_vocab_size, jnp.dtype(config.param_dtype))
        if config.output_bias == "fixed":
            self.output_bias = Fixed(zeros)
        else:
            self.output_bias = nnx.Param(zeros) if bias and not untied else None

    def __call__(
        self,
        src: Int[Array, "batch src_len"],
        tgt: Int[Array, "batch tgt_len"],
        *,
        dropout: DropoutSource = NO_DROPOUT,
        packing: Packing | None = None,
    ) -> Float[Array, "batch tgt_len tgt_vocab"]:
        """Logits of the token after each position of `tgt`, which starts with bos_id. Padding is pad_id.

        With `packing` a row holds several pairs of sentences, each of which gives the logits it would give alone; what
        is padding is said by the segments then.

        Raises ValueError for ids outside the vocabulary (outside jit, where they can be seen) and for sequences
        longer than a position table.
        """
        return self.logits(self.hidden(src, tgt, dropout=dropout, packing=packing))

    def hidden(
        self,
        src: Int[Array, "batch src_len"],
        tgt: Int[Array, "batch tgt_len"],
        *,
        dropout: DropoutSource = NO_DROPOUT,
        packing: Packing | None = None,
    ) -> Float[Array, "batch tgt_len d_model"]:
        """What the logits are projected from: `__call__` without its last product."""
        src_mask = self._real(src, None if packing is None else packing.src_segments)
        memory = self.encode(src, src_mask=src_mask, dropout=dropout, packing=packing)
        return self._decode(tgt, memory, src_mask, None, dropout, packing, return_weights=False).hidden

    def encode(
        self,
        src: Int[Array, "batch src_len"],
        *,
        src_mask: Bool[Array, "batch src_len"] | None = None,
        dropout: DropoutSource = NO_DROPOUT,
        packing: Packing | None = None,
    ) -> Float[Array, "batch src_len d_model"]:
        """The memory: the encoder's output. `src_mask` is True for real tokens; by default all but pad_id."""
        return self._encode(src, src_mask, dropout, packing, return_weights=False).hidden

    def decode(
        self,
        tgt: Int[Array, "batch tgt_len"],
        memory: Float[Array, "batch src_len d_model"],
        *,
        src_mask: Bool[Array, "batch src_len"],
        tgt_mask: Bool[Array, "batch tgt_len"] | None = None,
        dropout: DropoutSource = NO_DROPOUT,
        packing: Packing | None = None,
    ) -> Float[Array, "batch tgt_len tgt_vocab"]:
        """Logits of the token after each position of `tgt`, given the memory and which of its positions are real."""
        decoded = self._decode(tgt, memory, src_mask, tgt_mask, dropout, packing, return_weights=False)
        return self.logits(decoded.hidden)

    def attention_weights(
        self, src: Int[Array, "batch src_len"], tgt: Int[Array, "batch tgt_len"]
    ) -> dict[str, Float[Array, "batch heads queries keys"]]:
        """The weights of every attention, before dropout, by name: `decoder.layers.0.cross_attn` and so on."""
        src_mask = padding_mask(src, pad_id=self.config.pad_id)
        memory, weights = self._encode(src, src_mask, NO_DROPOUT, None, return_weights=True)
        _, decoder_weights = self._decode(tgt, memory, src_mask, None, NO_DROPOUT, None, return_weights=True)
        return _prefixed("encoder", weights) | _prefixed("decoder", decoder_weights)

    def logits(self, hidden: Float[Array, "batch length d_model"]) -> Float[Array, "batch length tgt_vocab"]:
        """The output projection, tied or not (paper 3.4), and its bias, if there is one."""
        project = self.tgt_embedding.logits if self.output_projection is None else self.output_projection
        logits = project(hidden)
        return logits if self.output_bias is None else logits + self.output_bias[...].astype(logits.dtype)

    def new_caches(
        self, memory: Float[Array, "batch src_len d_model"], *, max_len: int, beams: int = 1
    ) -> tuple[LayerCache, ...]:
        """What `decode_step` starts from: room for `max_len` target positions of every beam."""
        return tuple(layer.new_cache(memory, slots=max_len * beams) for layer in self.decoder.layers)

    def memory_caches(self, memory: Float[Array, "batch src_len d_model"]) -> tuple[CachedKeyValue, ...]:
        """Of each decoder layer what its attention to `memory` reads."""
        return tuple(layer.cross_attn.key_value(memory).cached() for layer in self.decoder.layers)

    def decode_step(
        self,
        ids: Int[Array, "batch beams"],
        caches: tuple[LayerCache, ...],
        *,
        positions: Int[Array, " batch"],
        key_positions: Int[Array, "batch columns"],
        column: Int[Array, ""],
        lineage: Int[Array, "batch beams columns"],
        src_mask: Bool[Array, "batch src_len"],
    ) -> tuple[Float[Array, "batch beams tgt_vocab"], tuple[LayerCache, ...]]:
        """`decode` for the one position at which `ids` stand: the logits after it, and the caches for the next.

        The caches are columns of a slot a beam. This position is written to `column`; `key_positions` says which
        position of the sentence stands in each column, with less than 0 where none does, and `lineage` in the slot of
        which beam a beam finds it.
        """
        beams, columns = lineage.shape[1:]
        past = (key_positions >= 0)[:, None] & causal_mask(positions[:, None], key_positions)
        if self.config.window is not None:
            past &= window_mask(positions[:, None], key_positions, window=self.config.window)
        own = past[..., None] & (lineage[..., None] == jnp.arange(beams))
        x, caches = self.decoder.step(
            self.tgt_embedding(ids) + self.tgt_positions(columns)[positions][:, None],
            caches,
            slot=column * beams,
            allowed=own.reshape(-1, 1, beams, columns * beams),
            memory_allowed=src_mask[:, None, None, :],
        )
        return self.logits(x), caches

    def _real(
        self, ids: Int[Array, "batch length"], segments: Int[Array, "batch length"] | None, *, target: bool = False
    ) -> Bool[Array, "batch length"]:
        if segments is not None:
            return segments != 0
        real = padding_mask(ids, pad_id=self.config.pad_id)
        if target and self.config.bos_id == self.config.pad_id:
            return real | (jnp.arange(ids.shape[1]) == 0)
        return real

    def _of_tokens(
        self,
        positions: Float[Array, "length d_model"],
        real: Bool[Array, "batch length"],
        segments: Int[Array, "batch length"] | None,
    ) -> Float[Array, "*batch length d_model"]:
        """The positions of a row, of packed rows, in which they start anew with every segment, or of real tokens."""
        skip_padding = self.config.positions_skip_padding
        if segments is not None:
            rows = positions[segment_positions(segments)]
        elif skip_padding:
            rows = positions[jnp.cumsum(real, axis=1) - 1]
        else:
            return positions
        return jnp.where(real[..., None], rows, 0) if skip_padding else rows

    def _encode(
        self,
        src: Array,
        src_mask: Array | None,
        dropout: DropoutSource,
        packing: Packing | None,
        *,
        return_weights: bool,
    ) -> LayerOutput:
        check_ids(src, name="src", vocab_size=self.config.src_vocab_size)
        segments = None if packing is None else packing.src_segments
        keys = self._real(src, segments) if src_mask is None else src_mask
        x = self.src_embedding(src) + self._of_tokens(self.src_positions(src.shape[1]), keys, segments)
        x = apply_dropout(x, dropout.at("src_dropout"), rate=self.config.dropout)
        mask = AttentionMask(keys=keys, window=self.config.window, query_segments=segments, key_segments=segments)
        return self.encoder(x, mask=mask, dropout=dropout.at("encoder"), return_weights=return_weights)

    def _decode(
        self,
        tgt: Array,
        memory: Array,
        src_mask: Array,
        tgt_mask: Array | None,
        dropout: DropoutSource,
        packing: Packing | None,
        *,
        return_weights: bool,
    ) -> LayerOutput:
        check_ids(tgt, name="tgt", vocab_size=self.config.tgt_vocab_size)
        src_segments, segments = (None, None) if packing is None else packing
        keys = self._real(tgt, segments, target=True) if tgt_mask is None else tgt_mask
        x = self.tgt_embedding(tgt) + self._of_tokens(self.tgt_positions(tgt.shape[1]), keys, segments)
        x = apply_dropout(x, dropout.at("tgt_dropout"), rate=self.config.dropout)
        return self.decoder(
            x,
            memory,
            mask=AttentionMask(
                keys=keys,
                causal=True,
                window=self.config.window,
                query_segments=segments,
                key_segments=segments,
            ),
            memory_mask=AttentionMask(keys=src_mask, query_segments=segments, key_segments=src_segments),
            dropout=dropout.at("decoder"),
            return_weights=return_weights,
        )


def check_ids(ids: Int[Array | np.ndarray, "..."], *, name: str, vocab_size: int) -> None:
    """Raises ValueError if an id is outside 0 .. vocab_size-1: jax's gather would clamp it without a word.

    Under a jax transformation the values cannot be seen; whoever makes the batches checks them there.
    """
    if isinstance(ids, jax.core.Tracer):
        return
    values = np.asarray(ids)
    if values.size and (values.min() < 0 or values.max() >= vocab_size):
        worst = values.min() if values.min() < 0 else values.max()
        raise ValueError(f"{name}: expected ids in [0, {vocab_size}), got {worst}")


def _prefixed(prefix: str, weights: Mapping[str, Array]) -> dict[str, Array]:
    return {f"{prefix}.{name}": value for name, value in weights.items()}
