"""Linear and layer norm with the compute dtype apart from the parameters' dtype."""

import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from jaxtyping import Float
from torch import Tensor, nn

from transformer_config import TransformerConfig


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that the config calls `name`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def wide(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`x` in float32, or as it is where that is wider: softmax, norms and loss do not run in half width."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Linear(nn.Linear):
    """x Wᵀ + b with Xavier-uniform W and zero b; W is (out_features, in_features), the transpose of Flax's.

    `use_bias`: by default as the config says.
    """

    def __init__(
        self,
        config: TransformerConfig,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool | None = None,
        generator: torch.Generator,
    ):
        bias = config.use_bias if use_bias is None else use_bias
        super().__init__(in_features, out_features, bias=bias, dtype=torch_dtype(config.param_dtype))
        self.dtype = torch_dtype(config.dtype)
        nn.init.xavier_uniform_(self.weight, generator=generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def reset_parameters(self) -> None:
        """Nothing: torch calls this while it constructs, and would draw from its global random numbers."""

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        """In the compute dtype, whatever the parameters are stored in."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return F.linear(x.to(self.dtype), self.weight.to(self.dtype), bias)


class LayerNorm(nn.Module):
    """(x - mean) / √(variance + eps) · weight + bias over the last axis (Ba et al. 2016).

    The variance is the mean of (x - mean)², not E[x²] - E[x]², which loses everything where the mean is large (P1).
    Or, if so configured, (x - mean) / (unbiased standard deviation + eps) · weight + bias.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        param_dtype = torch_dtype(config.param_dtype)
        self.eps = config.norm_eps
        self.formula = config.norm_formula
        self.dtype = torch_dtype(config.dtype)
        self.weight = nn.Parameter(torch.ones(config.d_model, dtype=param_dtype))
        self.bias = nn.Parameter(torch.zeros(config.d_model, dtype=param_dtype)) if config.use_bias else None

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Normalises each vector on its own."""
        x = wide(x)
        centred = x - x.mean(dim=-1, keepdim=True)
        if self.formula == "variance":
            divisor = torch.sqrt(centred.square().mean(dim=-1, keepdim=True) + self.eps)
        else:
            divisor = x.std(dim=-1, keepdim=True, correction=1) + self.eps
        normalised = centred / divisor * wide(self.weight)
        if self.bias is not None:
            normalised = normalised + wide(self.bias)
        return normalised.to(self.dtype)
