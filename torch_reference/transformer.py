"""Encoder, decoder and the whole model (paper 3.1, figure 1)."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_reference.dropout import NO_DROPOUT, DropoutSource, apply_dropout
from torch_reference.embedding import Embedding, Positions
from torch_reference.layers import DecoderLayer, EncoderLayer, LayerOutput
from torch_reference.masks import AttentionMask, Packing, padding_mask, segment_positions
from torch_reference.primitives import LayerNorm, Linear, torch_dtype
from transformer_config import TransformerConfig


class Encoder(nn.Module):
    """A stack of encoder layers, and a norm at the end if there is one (`TransformerConfig.final_norm`)."""

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator):
        super().__init__()
        self.gradient_checkpointing = config.gradient_checkpointing
        self.layers = nn.ModuleList(EncoderLayer(config, generator=generator) for _ in range(config.num_encoder_layers))
        self.final_norm = LayerNorm(config) if config.has_final_norm else None

    def forward(
        self,
        x: Float[Tensor, "batch src_len d_model"],
        *,
        mask: AttentionMask,
        dropout: DropoutSource = NO_DROPOUT,
        return_weights: bool = False,
    ) -> LayerOutput:
        """Runs the layers one after the other; weights are named `layers.0.self_attn` and so on."""
        run = _checkpointed if self.gradient_checkpointing else _plainly
        weights: dict[str, Tensor] = {}
        for i, layer in enumerate(self.layers):
            x, layer_weights = run(
                layer, x, mask=mask, dropout=dropout.at(f"layers.{i}"), return_weights=return_weights
            )
            weights |= _prefixed(f"layers.{i}", layer_weights)
        return LayerOutput(x if self.final_norm is None else self.final_norm(x), weights)


class Decoder(nn.Module):
    """A stack of decoder layers, and a norm at the end if there is one (`TransformerConfig.final_norm`)."""

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator):
        super().__init__()
        self.gradient_checkpointing = config.gradient_checkpointing
        self.layers = nn.ModuleList(DecoderLayer(config, generator=generator) for _ in range(config.num_decoder_layers))
        self.final_norm = LayerNorm(config) if config.has_final_norm else None

    def forward(
        self,
        x: Float[Tensor, "batch tgt_len d_model"],
        memory: Float[Tensor, "batch src_len d_model"],
        *,
        mask: AttentionMask,
        memory_mask: AttentionMask,
        dropout: DropoutSource = NO_DROPOUT,
        return_weights: bool = False,
    ) -> LayerOutput:
        """Runs the layers one after the other; weights are named `layers.0.self_attn`, `layers.0.cross_attn`, ..."""
        run = _checkpointed if self.gradient_checkpointing else _plainly
        weights: dict[str, Tensor] = {}
        for i, layer in enumerate(self.layers):
            x, layer_weights = run(
                layer,
                x,
                memory,
                mask=mask,
                memory_mask=memory_mask,
                dropout=dropout.at(f"layers.{i}"),
                return_weights=return_weights,
            )
            weights |= _prefixed(f"layers.{i}", layer_weights)
        return LayerOutput(x if self.final_norm is None else self.final_norm(x), weights)


class Transformer(nn.Module):
    """Attention Is All You Need, from ids to logits. The default config is the paper's base model.

    Every initial value is drawn from `generator`. Whether dropout is on is an argument, not a mode: `train()` and
    `eval()` change nothing.
    """

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator):
        super().__init__()
        self.config = config
        self.src_embedding = Embedding(config.src_vocab_size, config, generator=generator)
        self.tgt_embedding = (
            self.src_embedding
            if config.tie_embeddings == "all"
            else Embedding(config.tgt_vocab_size, config, generator=generator)
        )
        self.src_positions = Positions(config, generator=generator)
        self.tgt_positions = Positions(config, generator=generator)
        self.encoder = Encoder(config, generator=generator)
        self.decoder = Decoder(config, generator=generator)
        untied, bias = config.tie_embeddings == "none", config.trains_output_bias
        self.output_projection = (
            Linear(config, config.d_model, config.tgt_vocab_size, use_bias=bias, generator=generator)
            if untied
            else None
        )
        self.output_bias: Tensor | None
        zeros = torch.zeros(config.tgt_vocab_size, dtype=torch_dtype(config.param_dtype))
        if config.output_bias == "fixed":
            self.register_buffer("output_bias", zeros)
        else:
            self.output_bias = nn.Parameter(zeros) if bias and not untied else None

    def forward(
        self,
        src: Int[Tensor, "batch src_len"],
        tgt: Int[Tensor, "batch tgt_len"],
        *,
        dropout: DropoutSource = NO_DROPOUT,
        packing: Packing | None = None,
    ) -> Float[Tensor, "batch tgt_len tgt_vocab"]:
        """Logits of the token after each position of `tgt`, which starts with bos_id. Padding is pad_id.

        With `packing` a row holds several pairs of sentences, each of which gives the logits it would give alone; what
        is padding is said by the segments then.

        Raises ValueError for ids outside the vocabulary (unless compiled) and for sequences longer than a
        position table.
        """
        return self.logits(self.hidden(src, tgt, dropout=dropout, packing=packing))

    def hidden(
        self,
        src: Int[Tensor, "batch src_len"],
        tgt: Int[Tensor, "batch tgt_len"],
        *,
        dropout: DropoutSource = NO_DROPOUT,
        packing: Packing | None = None,
    ) -> Float[Tensor, "batch tgt_len d_model"]:
        """What the logits are projected from: `forward` without its last product."""
        src_mask = self._real(src, None if packing is None else packing.src_segments)
        memory = self.encode(src, src_mask=src_mask, dropout=dropout, packing=packing)
        return self._decode(tgt, memory, src_mask, None, dropout, packing, return_weights=False).hidden

    def encode(
        self,
        src: Int[Tensor, "batch src_len"],
        *,
        src_mask: Bool[Tensor, "batch src_len"] | None = None,
        dropout: DropoutSource = NO_DROPOUT,
        packing: Packing | None = None,
    ) -> Float[Tensor, "batch src_len d_model"]:
        """The encoder's output, the memory. `src_mask` is True for real tokens, by default all but pad_id."""
        return self._encode(src, src_mask, dropout, packing, return_weights=False).hidden

    def decode(
        self,
        tgt: Int[Tensor, "batch tgt_len"],
        memory: Float[Tensor, "batch src_len d_model"],
        *,
        src_mask: Bool[Tensor, "batch src_len"],
        tgt_mask: Bool[Tensor, "batch tgt_len"] | None = None,
        dropout: DropoutSource = NO_DROPOUT,
        packing: Packing | None = None,
    ) -> Float[Tensor, "batch tgt_len tgt_vocab"]:
        """Logits of the token after each position of `tgt`, given the memory and which of its positions are real."""
        decoded = self._decode(tgt, memory, src_mask, tgt_mask, dropout, packing, return_weights=False)
        return self.logits(decoded.hidden)

    def attention_weights(
        self, src: Int[Tensor, "batch src_len"], tgt: Int[Tensor, "batch tgt_len"]
    ) -> dict[str, Float[Tensor, "batch heads queries keys"]]:
        """The weights of every attention, before dropout, by name: `decoder.layers.0.cross_attn` and so on."""
        src_mask = padding_mask(src, pad_id=self.config.pad_id)
        memory, weights = self._encode(src, src_mask, NO_DROPOUT, None, return_weights=True)
        _, decoder_weights = self._decode(tgt, memory, src_mask, None, NO_DROPOUT, None, return_weights=True)
        return _prefixed("encoder", weights) | _prefixed("decoder", decoder_weights)

    def logits(self, hidden: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length tgt_vocab"]:
        """The output projection, tied or not (paper 3.4), and its bias, if there is one."""
        project = self.tgt_embedding.logits if self.output_projection is None else self.output_projection
        logits = project(hidden)
        return logits if self.output_bias is None else logits + self.output_bias.to(logits.dtype)

    def self_mask(
        self, keys: Bool[Tensor, "batch keys"] | None, segments: Int[Tensor, "batch keys"] | None = None
    ) -> AttentionMask:
        """Which target positions attend to which: the past, within the window and the segment."""
        return AttentionMask(
            keys=keys, causal=True, window=self.config.window, query_segments=segments, key_segments=segments
        )

    def _real(
        self, ids: Int[Tensor, "batch length"], segments: Int[Tensor, "batch length"] | None, *, target: bool = False
    ) -> Bool[Tensor, "batch length"]:
        if segments is not None:
            return segments != 0
        real = padding_mask(ids, pad_id=self.config.pad_id)
        if target and self.config.bos_id == self.config.pad_id:
            real[:, 0] = True
        return real

    def _of_tokens(
        self,
        positions: Float[Tensor, "length d_model"],
        real: Bool[Tensor, "batch length"],
        segments: Int[Tensor, "batch length"] | None,
    ) -> Float[Tensor, "*batch length d_model"]:
        """The positions of a row, of packed rows, in which they start anew with every segment, or of real tokens."""
        if segments is not None:
            rows = positions[segment_positions(segments)]
        elif self.config.positions_skip_padding:
            rows = positions[real.cumsum(dim=1) - 1]
        else:
            return positions
        return rows * real.unsqueeze(-1) if self.config.positions_skip_padding else rows

    def _encode(
        self,
        src: Tensor,
        src_mask: Tensor | None,
        dropout: DropoutSource,
        packing: Packing | None,
        *,
        return_weights: bool,
    ) -> LayerOutput:
        check_ids(src, name="src", vocab_size=self.config.src_vocab_size)
        segments = None if packing is None else packing.src_segments
        keys = self._real(src, segments) if src_mask is None else src_mask
        positions = self.src_positions(src.shape[1], device=src.device)
        x = self.src_embedding(src) + self._of_tokens(positions, keys, segments)
        x = apply_dropout(x, dropout.at("src_dropout"), rate=self.config.dropout)
        mask = AttentionMask(keys=keys, window=self.config.window, query_segments=segments, key_segments=segments)
        return self.encoder(x, mask=mask, dropout=dropout.at("encoder"), return_weights=return_weights)

    def _decode(
        self,
        tgt: Tensor,
        memory: Tensor,
        src_mask: Tensor,
        tgt_mask: Tensor | None,
        dropout: DropoutSource,
        packing: Packing | None,
        *,
        return_weights: bool,
    ) -> LayerOutput:
        check_ids(tgt, name="tgt", vocab_size=self.config.tgt_vocab_size)
        src_segments, segments = (None, None) if packing is None else packing
        keys = self._real(tgt, segments, target=True) if tgt_mask is None else tgt_mask
        positions = self.tgt_positions(tgt.shape[1], device=tgt.device)
        x = self.tgt_embedding(tgt) + self._of_tokens(positions, keys, segments)
        x = apply_dropout(x, dropout.at("tgt_dropout"), rate=self.config.dropout)
        return self.decoder(
            x,
            memory,
            mask=self.self_mask(keys, segments),
            memory_mask=AttentionMask(keys=src_mask, query_segments=segments, key_segments=src_segments),
            dropout=dropout.at("decoder"),
            return_weights=return_weights,
        )


def check_ids(ids: Int[Tensor, "..."], *, name: str, vocab_size: int) -> None:
    """Raises ValueError if an id is outside 0 .. vocab_size-1.

    torch's own check on a GPU leaves the process unable to use it again. While a model is compiled the values cannot
    be seen; whoever makes the batches checks them there.
    """
    if torch.compiler.is_compiling() or ids.numel() == 0:
        return
    lowest, highest = (int(extreme) for extreme in torch.aminmax(ids))
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(f"{name}: expected ids in [0, {vocab_size}), got {lowest if lowest < 0 else highest}")


def _plainly(layer: nn.Module, *args: Tensor, **kwargs: Any) -> LayerOutput:
    return layer(*args, **kwargs)


def _checkpointed(layer: nn.Module, *args: Tensor, **kwargs: Any) -> LayerOutput:
    # No state of random numbers to restore: dropout masks are functions of their seed.
    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _prefixed(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": value for name, value in weights.items()}
