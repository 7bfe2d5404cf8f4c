"""Ports of the models in generic_reference.py, tensor for tensor in torch's own layouts, and the pairs of the two.

Written out instead of taken from flax.nnx, so that every fault can be planted by replacing one method.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from parity.pair import Pair
from parity.weights.mapping import Rule, WeightMapping


def _uniform(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int) -> nnx.Param:
    """Within 1/√fan_in of 0, as torch draws weights and biases of linear maps, convolutions and cells."""
    bound = fan_in**-0.5
    return nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound))


class Linear(nnx.Module):
    """x Wᵀ + b, W as torch stores it."""

    def __init__(self, width_in: int, width_out: int, rngs: nnx.Rngs, *, bias: bool = True):
        self.weight = _uniform(rngs, (width_out, width_in), width_in)
        self.bias = _uniform(rngs, (width_out,), width_in) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Over the last axis."""
        y = x @ self.weight[...].T
        return y if self.bias is None else y + self.bias[...]


class Convolution(nnx.Module):
    """A two-dimensional cross-correlation, (batch, channels, height, width)."""

    def __init__(self, shape: tuple[int, ...], rngs: nnx.Rngs, *, stride: tuple[int, int], groups: int):
        self.stride, self.groups = stride, groups
        self.padding = ((1, 1), (1, 1))
        fan_in = shape[1] * shape[2] * shape[3]
        self.weight, self.bias = _uniform(rngs, shape, fan_in), _uniform(rngs, shape[:1], fan_in)

    def __call__(self, x: jax.Array) -> jax.Array:
        """With zeros around."""
        return self.convolve(x, self.weight[...]) + self.bias[...][:, None, None]

    def convolve(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Without the bias."""
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            self.stride,
            self.padding,
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
            feature_group_count=self.groups,
        )


class ChannelNorm(nnx.Module):
    """By running statistics in evaluation; in training by the batch's, which move the running ones."""

    def __init__(self, channels: int):
        self.eps, self.momentum = 1e-5, 0.1
        self.use_running_average = False
        self.weight, self.bias = nnx.Param(jnp.ones(channels)), nnx.Param(jnp.zeros(channels))
        self.running_mean, self.running_var = nnx.BatchStat(jnp.zeros(channels)), nnx.BatchStat(jnp.ones(channels))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Over batch, height and width."""
        mean, variance = self.running_mean[...], self.running_var[...]
        if not self.use_running_average:
            mean, variance = x.mean(axis=(0, 2, 3)), x.var(axis=(0, 2, 3))
            unbiased = variance * (count := x.size // x.shape[1]) / (count - 1)
            self.running_mean[...] += self.momentum * (mean - self.running_mean[...])
            self.running_var[...] += self.momentum * (unbiased - self.running_var[...])
        return self.normalised(x, mean, variance)

    def normalised(self, x: jax.Array, mean: jax.Array, variance: jax.Array) -> jax.Array:
        """By these statistics, then scaled and shifted."""
        centred = (x - mean[:, None, None]) * jax.lax.rsqrt(variance + self.eps)[:, None, None]
        return centred * self.weight[...][:, None, None] + self.bias[...][:, None, None]


class GroupedNorm(nnx.Module):
    """Over each group of neighbouring channels."""

    def __init__(self, groups: int, channels: int):
        self.eps, self.groups = 1e-5, groups
        self.weight, self.bias = nnx.Param(jnp.ones(channels)), nnx.Param(jnp.zeros(channels))

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, channels, height, width) -> the same."""
        grouped = x.reshape(len(x), self.groups, -1)
        centred = grouped - grouped.mean(axis=-1, keepdims=True)
        normalised = centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + self.eps)
        return normalised.reshape(x.shape) * self.weight[...][:, None, None] + self.bias[...][:, None, None]


class Pool(nnx.Module):
    """Average of 2 by 2, padding counted."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """With zeros around."""
        return self.summed(x) / 4

    def summed(self, x: jax.Array) -> jax.Array:
        """Sums of the windows."""
        padded = jnp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        height, width = padded.shape[2] // 2, padded.shape[3] // 2
        windows = padded[:, :, : 2 * height, : 2 * width].reshape(*x.shape[:2], height, 2, width, 2)
        return windows.sum(axis=(3, 5))


class Convolutional(nnx.Module):
    """See generic_reference."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = Convolution((4, 3, 3, 3), rngs, stride=(2, 1), groups=1)
        self.norm1 = ChannelNorm(4)
        self.conv2 = Convolution((6, 2, 3, 3), rngs, stride=(1, 1), groups=2)
        self.norm2 = GroupedNorm(3, 6)
        self.pool = Pool()
        self.norm3 = ChannelNorm(6)
        self.linear = Linear(6 * 3 * 5, 5, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, 3, 9, 8) -> (batch, 5)."""
        x = jax.nn.relu(self.norm1(self.conv1(x)))
        x = jax.nn.relu(self.norm2(self.conv2(x)))
        return self.linear(self.flattened(self.norm3(self.pool(x))))

    def flattened(self, x: jax.Array) -> jax.Array:
        """Channels first."""
        return x.reshape(len(x), -1)


class Cell(nnx.Module):
    """The weights of a recurrent cell: two matrices and two biases, the gates below each other."""

    def __init__(self, width_in: int, width: int, gates: int, rngs: nnx.Rngs):
        self.weight_ih = _uniform(rngs, (gates * width, width_in), width)
        self.weight_hh = _uniform(rngs, (gates * width, width), width)
        self.bias_ih = _uniform(rngs, (gates * width,), width)
        self.bias_hh = _uniform(rngs, (gates * width,), width)

    def of_input(self, x: jax.Array) -> jax.Array:
        """What the input brings to every gate."""
        return x @ self.weight_ih[...].T + self.bias_ih[...]

    def of_state(self, hidden: jax.Array) -> jax.Array:
        """What the state brings."""
        return hidden @ self.weight_hh[...].T + self.bias_hh[...]


class LSTMCell(Cell):
    """Gates in the order input, forget, cell, output."""

    def __init__(self, width_in: int, width: int, rngs: nnx.Rngs):
        super().__init__(width_in, width, 4, rngs)

    def __call__(self, x: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """(input, (hidden, cell)) -> (hidden, cell)."""
        i, f, g, o = self.gates(self.of_input(x) + self.of_state(state[0]))
        cell = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(cell), cell

    def gates(self, summed: jax.Array) -> list[jax.Array]:
        """Before their activations, in the order input, forget, cell, output."""
        return list(jnp.split(summed, 4, axis=-1))


class GRUCell(Cell):
    """Gates in the order reset, update, new; the reset is applied behind the product with the state."""

    def __init__(self, width_in: int, width: int, rngs: nnx.Rngs):
        super().__init__(width_in, width, 3, rngs)

    def __call__(self, x: jax.Array, state: jax.Array) -> jax.Array:
        """(input, state) -> state."""
        (r, z, n), (hr, hz, hn) = self.gates(self.of_input(x)), self.gates(self.of_state(state))
        update = jax.nn.sigmoid(z + hz)
        return (1 - update) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + update * state

    def gates(self, summed: jax.Array) -> list[jax.Array]:
        """In the order reset, update, new."""
        return list(jnp.split(summed, 3, axis=-1))


class Embedding(nnx.Module):
    """Rows of a table; that of padding gets no gradient if there is a `padding_idx`."""

    def __init__(self, rows: int, width: int, rngs: nnx.Rngs, *, padding_idx: int | None = None):
        self.padding_idx = padding_idx
        table = jax.random.normal(rngs.params(), (rows, width))
        self.weight = nnx.Param(table if padding_idx is None else table.at[padding_idx].set(0.0))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """The rows of `ids`."""
        rows = self.weight[...][ids]
        if self.padding_idx is None:
            return rows
        return jnp.where((ids == self.padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)


class Recurrent(nnx.Module):
    """See generic_reference."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedding = Embedding(11, 6, rngs, padding_idx=0)
        self.lstm = LSTMCell(6, 5, rngs)
        self.gru = GRUCell(5, 7, rngs)
        self.head = Linear(7, 4, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """(batch, length) -> (batch, length, 4)."""
        embedded = self.embedding(ids)
        hidden = cell = jnp.zeros((len(ids), 5), embedded.dtype)
        state = jnp.zeros((len(ids), 7), embedded.dtype)
        states = []
        for position in range(ids.shape[1]):
            hidden, cell = self.lstm(embedded[:, position], (hidden, cell))
            state = self.gru(hidden, state)
            states.append(state)
        return self.head(jnp.stack(states, axis=1))


class RMSNorm(nnx.Module):
    """x / √(mean(x²) + eps) · weight."""

    def __init__(self, width: int):
        self.eps = 1e-5
        self.weight = nnx.Param(jnp.ones(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Over the last axis."""
        return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + self.eps) * self.weight[...]


class Rotary(nnx.Module):
    """See generic_reference."""

    def __init__(self, rngs: nnx.Rngs):
        self.q_proj = Linear(12, 16, rngs, bias=False)
        self.k_proj = Linear(12, 8, rngs, bias=False)
        self.v_proj = Linear(12, 8, rngs, bias=False)
        self.o_proj = Linear(16, 12, rngs, bias=False)
        self.base = 10_000.0

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, length, 12) -> the same."""
        batch, length, _ = x.shape
        query = self.rotate(self.heads(self.q_proj(x), 4))
        key = self.shared(self.rotate(self.heads(self.k_proj(x), 2)))
        value = self.shared(self.heads(self.v_proj(x), 2))
        allowed = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(allowed, query @ jnp.swapaxes(key, -1, -2) / 2.0, jnp.finfo(x.dtype).min)
        attended = jax.nn.softmax(scores, axis=-1) @ value
        return self.o_proj(jnp.swapaxes(attended, 1, 2).reshape(batch, length, -1))

    def heads(self, x: jax.Array, count: int) -> jax.Array:
        """(batch, length, heads · d) -> (batch, heads, length, d)."""
        return jnp.swapaxes(x.reshape(*x.shape[:2], count, -1), 1, 2)

    def shared(self, x: jax.Array) -> jax.Array:
        """Each head of keys or values for two neighbouring query heads."""
        return jnp.repeat(x, 2, axis=1)

    def rotate(self, x: jax.Array) -> jax.Array:
        """Pairs (i, i + d/2), turned."""
        sine, cosine = self.turns(x)
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

    def turns(self, x: jax.Array, start: int = 0) -> tuple[jax.Array, jax.Array]:
        """Sines and cosines of the angles, (length, d/2)."""
        half = x.shape[-1] // 2
        angles = np.arange(start, start + x.shape[-2])[:, None] * self.base ** (-np.arange(half) / half)
        return jnp.asarray(np.sin(angles), x.dtype), jnp.asarray(np.cos(angles), x.dtype)


class Gated(nnx.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, rngs: nnx.Rngs):
        self.gate = Linear(12, 10, rngs, bias=False)
        self.up = Linear(12, 10, rngs, bias=False)
        self.down = Linear(10, 12, rngs, bias=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """At every position."""
        return self.down(self.gated(self.gate(x), self.up(x)))

    def gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Element by element."""
        return jax.nn.silu(gate) * up


class Block(nnx.Module):
    """See generic_reference."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = RMSNorm(12)
        self.attention = Rotary(rngs)
        self.norm2 = RMSNorm(12)
        self.feed_forward = Gated(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, length, 12) -> the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Fused(nnx.Module):
    """Attention whose three projections are one matrix: queries, keys, values."""

    def __init__(self, rngs: nnx.Rngs):
        self.in_proj_weight = nnx.Param(nnx.initializers.xavier_uniform()(rngs.params(), (36, 12)))
        self.in_proj_bias = nnx.Param(jnp.zeros(36))
        self.out_proj = Linear(12, 12, rngs)
        self.out_proj.bias = nnx.Param(jnp.zeros(12))

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """(batch, length, 12) each -> the same."""
        parts = zip(jnp.split(self.in_proj_weight[...], 3), jnp.split(self.in_proj_bias[...], 3), strict=True)
        projected = [x @ weight.T + bias for x, (weight, bias) in zip((query, key, value), parts, strict=True)]
        x = query
        query, key, value = self.projections(jnp.concatenate(projected, axis=-1))
        weights = jax.nn.softmax(query @ jnp.swapaxes(key, -1, -2) / 2.0, axis=-1)
        attended = jnp.swapaxes(weights @ value, 1, 2).reshape(x.shape)
        projection: Any = self.out_proj
        return attended @ projection.weight[...].T + projection.bias[...]

    def projections(self, fused: jax.Array) -> list[jax.Array]:
        """Queries, keys and values by head, (batch, heads, length, d) each."""
        batch, length, _ = fused.shape
        return [jnp.swapaxes(x.reshape(batch, length, 3, 4), 1, 2) for x in jnp.split(fused, 3, axis=-1)]


class DecoderOnly(nnx.Module):
    """See generic_reference."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedding = Embedding(13, 12, rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])
        self.fused = Fused(rngs)
        self.head = Linear(12, 13, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """(batch, length) -> (batch, length, 13)."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.fused(x, x, x))


PORTS: dict[str, Any] = {"convolutional": Convolutional, "recurrent": Recurrent, "decoder-only": DecoderOnly}


def generic_pair(name: str, *, seed: int = 0) -> Pair:
    """One of PORTS beside its reference, with seeded inputs; the weights are the reference's own. Needs torch."""
    import torch

    from parity.mutations import generic_reference

    rng = np.random.default_rng(seed)
    inputs: dict[str, np.ndarray]
    if name == "convolutional":
        inputs = {"x": rng.standard_normal((3, 3, 9, 8))}
    else:
        ids = rng.integers(1, 11, (3, 5), dtype=np.int32)
        ids[1, 3:] = 0
        inputs = {"ids": ids}

    # The first seed is that of the pair's own weights; the harness asks for others to see how they are drawn.
    def reference(seed: int = seed) -> Any:
        torch.manual_seed(seed)
        return getattr(generic_reference, PORTS[name].__name__)()

    def port(seed: int = seed) -> Any:
        return PORTS[name](nnx.Rngs(seed))

    rules = [Rule("{path*}", "{path*}")]
    return Pair(name=name, reference=reference, port=port, inputs=inputs, mapping=WeightMapping(rules))
