"""Embeddings, scaled and tied (paper 3.4), and positions (3.5)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float64, Int

from flax_transformer.primitives import Fixed, by_rows, wide
from transformer_config import TransformerConfig


class Embedding(nnx.Module):
    """A table of vectors, one an id, multiplied by √d_model where it is read; initial standard deviation 1/√d_model.

    Without the scale, or without a gradient for the vector of padding, if so configured.
    """

    def __init__(self, vocab_size: int, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.scale = math.sqrt(config.d_model) if config.embedding_scale else 1.0
        self.frozen_id = config.pad_id if config.freeze_padding else None
        self.dtype = jnp.dtype(config.dtype)
        self.weight = nnx.Param(_normal_table(vocab_size, config, rngs=rngs))

    def __call__(self, ids: Int[Array, "batch length"]) -> Float[Array, "batch length d_model"]:
        """The scaled vectors of `ids`."""
        rows = self.weight[...][ids].astype(self.dtype)
        if self.frozen_id is not None:
            rows = jnp.where((ids == self.frozen_id)[..., None], jax.lax.stop_gradient(rows), rows)
        return (wide(rows) * self.scale).astype(self.dtype)

    def logits(self, x: Float[Array, "batch length d_model"]) -> Float[Array, "batch length vocab"]:
        """x Eᵀ: the table as an output projection, without the scale (paper 3.4)."""
        return by_rows(x, self.weight[...].astype(self.dtype), (((x.ndim - 1,), (1,)), ((), ())))


class Positions(nnx.Module):
    """What is added to the embedding of a position: a sinusoid, or a row of a table.

    A table that is learned is drawn; one that is fixed is zero until it is given with the weights.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        rows = config.position_offset + config.max_len
        self.table: nnx.Variable | None
        if config.positions == "learned":
            self.table = nnx.Param(_normal_table(rows, config, rngs=rngs))
        elif config.positions == "fixed":
            self.table = Fixed(jnp.zeros((rows, config.d_model), jnp.dtype(config.param_dtype)))
        else:
            self.table = None

    def __call__(self, length: int) -> Float[Array, "length d_model"]:
        """Positions 0 .. length-1. Raises ValueError beyond a table."""
        config = self.config
        limit = config.sequence_limit
        if limit is not None and length > limit:
            raise ValueError(f"expected at most {limit} positions, the table's, got a sequence of {length}")
        positions = position_numbers(length, config)
        if self.table is None:
            return jnp.asarray(sinusoids(positions, config), config.dtype)
        # Between two rows of the table where positions are interpolated, on a row where they are not.
        below = np.minimum(np.floor(positions).astype(np.int32), self.table.shape[0] - 1)
        above = np.minimum(below + 1, self.table.shape[0] - 1)
        rows = self.table[...]
        share = jnp.asarray((positions - below)[:, None], wide(rows).dtype)
        return (rows[below] * (1 - share) + rows[above] * share).astype(config.dtype)


def position_numbers(length: int, config: TransformerConfig) -> Float64[np.ndarray, " length"]:
    """The numbers that stand for positions 0 .. length-1: offset, and squeezed into the trained range if so configured.

    Linear interpolation of positions: Chen et al. 2023.
    """
    positions = np.arange(length, dtype=np.float64)
    if config.interpolated_len is not None:
        positions *= (config.max_len - 1) / (config.interpolated_len - 1)
    return positions + config.position_offset


def sinusoids(
    positions: Float64[np.ndarray, " length"], config: TransformerConfig
) -> Float64[np.ndarray, "length d_model"]:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(...) (paper 3.5), or another arrangement.

    In numpy float64 on the host and cast last: the frameworks' own sines differ by 9e-13 at position 5,000.
    """
    half = config.d_model // 2
    divisor = half - 1 if config.positions == "concatenated_half_minus_1" else half
    frequencies = np.exp(np.arange(half) * (-math.log(10_000.0) / divisor))
    angles = positions[:, None] * frequencies[None, :]
    if config.positions == "interleaved":
        return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(positions), config.d_model)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def _normal_table(rows: int, config: TransformerConfig, *, rngs: nnx.Rngs) -> Float[Array, "rows d_model"]:
    initialiser = nnx.initializers.normal(stddev=config.d_model**-0.5)
    return initialiser(rngs.params(), (rows, config.d_model), jnp.dtype(config.param_dtype))
