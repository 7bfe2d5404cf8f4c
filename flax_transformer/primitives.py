"""Linear and layer norm with the compute dtype apart from the parameters' dtype."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from transformer_config import TransformerConfig


def wide(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x` in float32, or as it is where that is wider: softmax, norms and loss do not run in half width."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class Fixed(nnx.Variable):
    """An array that is carried with the weights and not trained."""


def linear(
    config: TransformerConfig, in_features: int, out_features: int, *, use_bias: bool | None = None, rngs: nnx.Rngs
) -> nnx.Linear:
    """x W + b with Xavier-uniform W and zero b; W is (in_features, out_features), the transpose of torch's.

    `use_bias`: by default as the config says.
    """
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=config.use_bias if use_bias is None else use_bias,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        kernel_init=nnx.initializers.xavier_uniform(),
        bias_init=nnx.initializers.zeros_init(),
        dot_general=by_rows,
        rngs=rngs,
    )


def by_rows(
    x: Float[Array, "..."], weights: Float[Array, "..."], dimensions: Any, **options: Any
) -> Float[Array, "..."]:
    """`jax.lax.dot_general` of vectors with a matrix, all vectors of `x` stacked up as rows.

    With two or more axes of rows, XLA's gradient of the matrix first makes a transposed copy of what comes in, which on
    a CPU takes as long as the product (measured: 190 ms instead of 115 for 2,496 rows of logits).
    """
    (contracted, of_weights), no_batch = dimensions
    if contracted != (x.ndim - 1,):
        raise ValueError(f"expected a product over the last axis of {x.shape}, got one over {contracted}")
    rows = jax.lax.dot_general(x.reshape(-1, x.shape[-1]), weights, (((1,), of_weights), no_batch), **options)
    return rows.reshape(*x.shape[:-1], rows.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(
    a: Float[Array, "batch heads rows _"], b: Float[Array, "batch heads _ _"], transposed: bool = False
) -> Float[Array, "batch heads rows _"]:
    """`a @ b` of many small matrices, or `a @ bᵀ` of a `b` that lies transposed.

    The gradient of `b` is a product over rows. On a CPU XLA takes twice the time for that, so there one factor is
    transposed beforehand (a training step of 3+3 layers at length 20: 3 to 4% faster); an accelerator needs no such
    copy.
    """
    return jnp.matmul(a, jnp.swapaxes(b, 2, 3) if transposed else b)


def _matmul_forward(a: Array, b: Array, transposed: bool) -> tuple[Array, tuple[Array, Array]]:
    return matmul(a, b, transposed), (a, b)


def _matmul_backward(transposed: bool, factors: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    a, b = factors
    over_rows, other = (gradient, a) if transposed else (a, gradient)
    over_rows = jax.lax.platform_dependent(
        jnp.swapaxes(over_rows, 2, 3), cpu=jax.lax.optimization_barrier, default=lambda array: array
    )
    return matmul(gradient, b, not transposed), jnp.matmul(over_rows, other)


matmul.defvjp(_matmul_forward, _matmul_backward)


class LayerNorm(nnx.Module):
    """(x - mean) / √(variance + eps) · scale + bias over the last axis (Ba et al. 2016).

    The variance is the mean of (x - mean)², not E[x²] - E[x]², which loses everything where the mean is large (P1).
    Or, if so configured, (x - mean) / (unbiased standard deviation + eps) · scale + bias.
    """

    def __init__(self, config: TransformerConfig):
        param_dtype = jnp.dtype(config.param_dtype)
        self.eps = config.norm_eps
        self.formula = config.norm_formula
        self.dtype = jnp.dtype(config.dtype)
        self.scale = nnx.Param(jnp.ones(config.d_model, param_dtype))
        self.bias = nnx.Param(jnp.zeros(config.d_model, param_dtype)) if config.use_bias else None

    def __call__(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch d_model"]:
        """Normalises each vector on its own."""
        x = wide(x)
        centred = x - x.mean(axis=-1, keepdims=True)
        if self.formula == "variance":
            variance = jnp.square(centred).mean(axis=-1, keepdims=True)
            normalised = centred * jax.lax.rsqrt(variance + self.eps)
        else:
            variance = jnp.square(centred).sum(axis=-1, keepdims=True) / (x.shape[-1] - 1)
            normalised = centred / (jnp.sqrt(variance) + self.eps)
        normalised *= wide(self.scale[...])
        if self.bias is not None:
            normalised += wide(self.bias[...])
        return normalised.astype(self.dtype)
