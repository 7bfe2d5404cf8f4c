"""Position-wise feed-forward network (paper 3.3)."""

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from flax_transformer.dropout import NO_DROPOUT, DropoutSource, apply_dropout
from flax_transformer.primitives import linear
from transformer_config import TransformerConfig


def _gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    # jax's default is the tanh approximation, torch's is erf (P2).
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS: dict[str, Callable[[Float[Array, "..."]], Float[Array, "..."]]] = {
    "relu": jax.nn.relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": jax.nn.silu,
}


class FeedForward(nnx.Module):
    """FFN(x) = max(0, xW₁ + b₁) W₂ + b₂, or another activation in place of the maximum."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.activation = config.activation
        self.rate = config.activation_dropout
        self.linear1 = linear(config, config.d_model, config.d_ff, rngs=rngs)
        self.linear2 = linear(config, config.d_ff, config.d_model, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch length d_model"], *, dropout: DropoutSource = NO_DROPOUT
    ) -> Float[Array, "batch length d_model"]:
        """Applies the same network at every position."""
        inner = ACTIVATIONS[self.activation](self.linear1(x))
        return self.linear2(apply_dropout(inner, dropout.at("activation"), rate=self.rate))
