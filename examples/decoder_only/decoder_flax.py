"""The port: other names, three projections where PyTorch had one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array


def linear(in_features: int, out_features: int, *, use_bias: bool = True, rngs: nnx.Rngs) -> nnx.Linear:
    """Drawn as torch draws: weights and biases uniformly within 1/√in_features."""
    limit = in_features**-0.5

    def uniform(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return nnx.Linear(in_features, out_features, use_bias=use_bias, kernel_init=uniform, bias_init=uniform, rngs=rngs)


def rotate(x: Array) -> Array:
    """Rotary positions on (batch, heads, length, head_dim)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    frequencies = 10000.0 ** (-np.arange(half) / half)
    angles = np.arange(length)[:, None] * frequencies
    cos, sin = jnp.asarray(np.cos(angles), x.dtype), jnp.asarray(np.sin(angles), x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    """Causal, every head at once."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.heads = heads
        self.q = linear(width, width, rngs=rngs)
        self.k = linear(width, width, rngs=rngs)
        self.v = linear(width, width, rngs=rngs)
        self.out = linear(width, width, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        batch, length, width = x.shape

        def split(y: Array) -> Array:
            return y.reshape(batch, length, self.heads, -1).swapaxes(1, 2)

        q, k, v = rotate(split(self.q(x))), rotate(split(self.k(x))), split(self.v(x))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        return self.out((weights @ v).swapaxes(1, 2).reshape(batch, length, width))


class FeedForward(nnx.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs):
        self.gate = linear(width, hidden, use_bias=False, rngs=rngs)
        self.up = linear(width, hidden, use_bias=False, rngs=rngs)
        self.down = linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """Pre-norm."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, *, rngs: nnx.Rngs):
        self.norm1 = nnx.RMSNorm(width, epsilon=1e-6, rngs=rngs)
        self.attention = Attention(width, heads, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, epsilon=1e-6, rngs=rngs)
        self.feed_forward = FeedForward(width, hidden, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.feed_forward(self.norm2(x))


class LanguageModel(nnx.Module):
    """Logits of the next token."""

    def __init__(
        self, vocab: int = 53, width: int = 24, heads: int = 4, hidden: int = 40, depth: int = 3, *, rngs: nnx.Rngs
    ):
        self.embedding = nnx.Embed(vocab, width, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.layers = nnx.List([Layer(width, heads, hidden, 0.1, rngs=rngs) for _ in range(depth)])
        self.final_norm = nnx.RMSNorm(width, epsilon=1e-6, rngs=rngs)
        self.head = linear(width, vocab, use_bias=False, rngs=rngs)

    def __call__(self, ids: Array) -> Array:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.final_norm(x))
