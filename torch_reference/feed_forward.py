"""Position-wise feed-forward network (paper 3.3)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from jaxtyping import Float
from torch import Tensor, nn

from torch_reference.dropout import NO_DROPOUT, DropoutSource, apply_dropout
from torch_reference.primitives import Linear
from transformer_config import TransformerConfig


def _gelu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    # torch's default is the erf form, jax's the tanh approximation (P2).
    return F.gelu(x, approximate="none")


def _gelu_tanh(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Float[Tensor, "..."]], Float[Tensor, "..."]]] = {
    "relu": F.relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """FFN(x) = max(0, xW₁ + b₁) W₂ + b₂, or another activation in place of the maximum."""

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator):
        super().__init__()
        self.activation = config.activation
        self.rate = config.activation_dropout
        self.linear1 = Linear(config, config.d_model, config.d_ff, generator=generator)
        self.linear2 = Linear(config, config.d_ff, config.d_model, generator=generator)

    def forward(
        self, x: Float[Tensor, "batch length d_model"], *, dropout: DropoutSource = NO_DROPOUT
    ) -> Float[Tensor, "batch length d_model"]:
        """Applies the same network at every position."""
        inner = ACTIVATIONS[self.activation](self.linear1(x))
        return self.linear2(apply_dropout(inner, dropout.at("activation"), rate=self.rate))
