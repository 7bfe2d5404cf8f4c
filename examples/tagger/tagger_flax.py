"""The port: the same names."""

import jax.numpy as jnp
from flax import nnx
from jax import Array


class Tagger(nnx.Module):
    """Scores (batch, length, tags) of token ids (batch, length)."""

    def __init__(self, vocab: int = 41, width: int = 11, hidden: int = 13, tags: int = 5, *, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(vocab, width, rngs=rngs)
        self.forwards = nnx.RNN(nnx.LSTMCell(width, hidden, rngs=rngs))
        self.backwards = nnx.RNN(nnx.LSTMCell(width, hidden, rngs=rngs))
        # Not E[x²] - E[x]², which loses everything where the mean is large.
        self.norm = nnx.LayerNorm(2 * hidden, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.scores = nnx.Linear(2 * hidden, tags, rngs=rngs)

    def __call__(self, ids: Array) -> Array:
        x = self.embedding(ids)
        ahead = self.forwards(x)
        back = jnp.flip(self.backwards(jnp.flip(x, 1)), 1)
        return self.scores(self.norm(jnp.concatenate([ahead, back], axis=-1)))
