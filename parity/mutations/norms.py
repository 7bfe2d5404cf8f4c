"""Faults of layer norms, and of where they stand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from parity.mutations.planting import Kind, Method, class_is, in_method, in_modules, wide

NORM = class_is("LayerNorm")


def _affine(norm: Any, normalised: Any) -> Any:
    scaled = normalised * wide(norm.scale[...])
    return (scaled if norm.bias is None else scaled + wide(norm.bias[...])).astype(norm.dtype)


def _by(normalise: Callable[[Any, Any], Any]) -> Callable[[Method], Method]:
    """A norm that computes `normalise(norm, x)` before it scales and shifts."""

    def make(original: Method) -> Method:
        return lambda self, x: _affine(self, normalise(self, wide(x)))

    return make


def _moments(x: Any, axis: int = -1) -> tuple[Any, Any]:
    centred = x - x.mean(axis=axis, keepdims=True)
    return centred, jnp.square(centred).mean(axis=axis, keepdims=True)


def _fast(norm: Any, x: Any) -> Any:
    mean = x.mean(axis=-1, keepdims=True)
    variance = jnp.square(x).mean(axis=-1, keepdims=True) - jnp.square(mean)
    return (x - mean) * jax.lax.rsqrt(jnp.maximum(variance, 0.0) + norm.eps)


def _unbiased(norm: Any, x: Any) -> Any:
    centred, variance = _moments(x)
    return centred * jax.lax.rsqrt(variance * x.shape[-1] / (x.shape[-1] - 1) + norm.eps)


def _eps_outside(norm: Any, x: Any) -> Any:
    centred, variance = _moments(x)
    return centred / (jnp.sqrt(variance) + norm.eps)


def _no_mean(norm: Any, x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + norm.eps)


def _over_length(norm: Any, x: Any) -> Any:
    centred, variance = _moments(x, axis=-2)
    return centred * jax.lax.rsqrt(variance + norm.eps)


def _one_more(original: Method) -> Method:
    """(1 + scale), the convention of some model families, with a scale that is not around 0."""
    return lambda self, x: original(self, x) + _normalised(self, x).astype(self.dtype)


def _no_bias(original: Method) -> Method:
    return lambda self, x: original(self, x) - self.bias[...].astype(self.dtype)


def _normalised(norm: Any, x: Any) -> Any:
    centred, variance = _moments(wide(x))
    return centred * jax.lax.rsqrt(variance + norm.eps)


def _set_eps(norm: Any) -> None:
    norm.eps = norm.eps / 10


def _narrow(original: Method) -> Method:
    """Statistics in bfloat16 where the model computes in bfloat16."""

    def call(self: Any, x: Any) -> Any:
        if x.dtype != jnp.bfloat16:
            return original(self, x)
        centred, variance = _moments(x)
        normalised = centred * jax.lax.rsqrt(variance + jnp.bfloat16(self.eps))
        return (normalised * self.scale[...].astype(x.dtype) + self.bias[...].astype(x.dtype)).astype(x.dtype)

    return call


KINDS: tuple[Kind, ...] = (
    in_modules("norm eps", "eps a tenth of the reference's", NORM, _set_eps, cases=("P1",)),
    in_method("norm fast variance", "variance as E[x²] - E[x]²", NORM, _by(_fast), cases=("P1",)),
    in_method("norm unbiased variance", "divides by n - 1", NORM, _by(_unbiased)),
    in_method("norm eps outside the root", "√variance + eps", NORM, _by(_eps_outside)),
    in_method("norm keeps the mean", "an RMS norm", NORM, _by(_no_mean)),
    in_method("norm over the wrong axis", "over positions", NORM, _by(_over_length)),
    in_method("norm scale plus one", "multiplies by 1 + scale", NORM, _one_more),
    in_method("norm bias left out", "no bias is added", NORM, _no_bias),
    in_method(
        "norm statistics in bfloat16",
        "not widened in a bfloat16 run",
        NORM,
        _narrow,
        cases=("P6",),
        beyond="2.0 half-units from the answer instead of 0.9, no more than nnx.GroupNorm, which is right, has (2.2)",
    ),
)
