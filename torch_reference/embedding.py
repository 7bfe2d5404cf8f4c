"""Embeddings, scaled and tied (paper 3.4), and positions (3.5)."""

import math

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from torch_reference.primitives import torch_dtype, wide
from transformer_config import TransformerConfig


class Embedding(nn.Module):
    """A table of vectors, one an id, drawn from N(0, 1/√d_model) and multiplied by √d_model where it is read.

    The 1/√d_model is a standard deviation. That of padding is drawn like any other; where it is read it is trained
    like any other, unless `freeze_padding` says no. Without the scale if so configured.
    """

    def __init__(self, vocab_size: int, config: TransformerConfig, *, generator: torch.Generator):
        super().__init__()
        self.scale = math.sqrt(config.d_model) if config.embedding_scale else 1.0
        self.frozen_id = config.pad_id if config.freeze_padding else None
        self.dtype = torch_dtype(config.dtype)
        self.weight = nn.Parameter(_normal_table(vocab_size, config, generator=generator))

    def forward(self, ids: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length d_model"]:
        """The scaled vectors of `ids`."""
        return F.embedding(ids, self.weight, padding_idx=self.frozen_id).to(self.dtype) * self.scale

    def logits(self, x: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length vocab"]:
        """x Eᵀ: the table as an output projection, without the scale (paper 3.4)."""
        return F.linear(x, self.weight.to(self.dtype))


class Positions(nn.Module):
    """What is added to the embedding of a position: a sinusoid, or a row of a table.

    A table that is learned is drawn; one that is fixed is zero until it is given with the weights.
    """

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator):
        super().__init__()
        self.config = config
        rows = config.position_offset + config.max_len
        self.table: Tensor | None
        if config.positions == "learned":
            self.table = nn.Parameter(_normal_table(rows, config, generator=generator))
        elif config.positions == "fixed":
            zeros = torch.zeros(rows, config.d_model, dtype=torch_dtype(config.param_dtype))
            self.register_buffer("table", zeros)
        else:
            self.table = None
        # Neither a parameter nor a buffer: `.to(dtype)` would round a buffer for good, and state_dict would carry it.
        computed = not config.has_position_table
        self.host_table = _host_table(config.interpolated_len or config.max_len, config) if computed else None

    def forward(self, length: int, *, device: torch.device | None = None) -> Float[Tensor, "length d_model"]:
        """Positions 0 .. length-1. Raises ValueError beyond a table."""
        config, dtype = self.config, torch_dtype(self.config.dtype)
        limit = config.sequence_limit
        if limit is not None and length > limit:
            raise ValueError(f"expected at most {limit} positions, the table's, got a sequence of {length}")
        if self.host_table is not None:
            long_enough = length <= self.host_table.shape[0]
            host_table = self.host_table[:length] if long_enough else _host_table(length, config)
            return host_table.to(device=device, dtype=dtype)
        assert self.table is not None
        if config.interpolated_len is None:
            return self.table[config.position_offset :][:length].to(dtype)
        # Between two rows of the table.
        positions = torch.from_numpy(position_numbers(length, config)).to(self.table.device)
        below = positions.floor().long().clamp(max=self.table.shape[0] - 1)
        above = (below + 1).clamp(max=self.table.shape[0] - 1)
        rows = wide(self.table)
        return torch.lerp(rows[below], rows[above], (positions - below).to(rows.dtype).unsqueeze(-1)).to(dtype)


def position_numbers(length: int, config: TransformerConfig) -> Float64[np.ndarray, " length"]:
    """The numbers that stand for positions 0 .. length-1: offset, and squeezed into the trained range if so configured.

    Linear interpolation of positions: Chen et al. 2023.
    """
    positions = np.arange(length, dtype=np.float64)
    if config.interpolated_len is not None:
        positions = positions / (config.interpolated_len - 1) * (config.max_len - 1)
    return config.position_offset + positions


def sinusoids(
    positions: Float64[np.ndarray, " length"], config: TransformerConfig
) -> Float64[np.ndarray, "length d_model"]:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(...) (paper 3.5), or another arrangement.

    In numpy float64 on the host and cast last: the frameworks' own sines differ by 9e-13 at position 5,000.
    """
    pairs = config.d_model // 2
    last_exponent = pairs - 1 if config.positions == "concatenated_half_minus_1" else pairs
    angles = np.outer(positions, 10_000.0 ** -(np.arange(pairs) / last_exponent))
    table = np.empty((len(positions), config.d_model))
    interleaved = config.positions == "interleaved"
    sines, cosines = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(pairs), slice(pairs, None))
    table[:, sines] = np.sin(angles)
    table[:, cosines] = np.cos(angles)
    return table


@torch.compiler.disable
def _host_table(length: int, config: TransformerConfig) -> Float64[Tensor, "length d_model"]:
    # Not compiled: the compiler would turn numpy's sines into torch's.
    return torch.from_numpy(sinusoids(position_numbers(length, config), config))


def _normal_table(rows: int, config: TransformerConfig, *, generator: torch.Generator) -> Float[Tensor, "rows d_model"]:
    table = torch.empty(rows, config.d_model, dtype=torch_dtype(config.param_dtype))
    return nn.init.normal_(table, std=config.d_model**-0.5, generator=generator)
