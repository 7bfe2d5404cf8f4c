"""Elementwise functions and softmaxes by name, in float64."""

import math
from collections.abc import Callable

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -x))


def gelu(x: np.ndarray) -> np.ndarray:
    """x Φ(x), by the error function."""
    return np.asarray(0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """Its tanh approximation (Hendrycks and Gimpel 2016)."""
    return np.asarray(0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))))


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    """exp(x) over its sum along an axis."""
    exponentials = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=axis, keepdims=True))


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": gelu,
    "gelu (tanh approximation)": gelu_tanh,
    "gelu (x · sigmoid(1.702 x))": lambda x: x * _sigmoid(1.702 * x),
    "silu": lambda x: x * _sigmoid(x),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "softplus": lambda x: np.logaddexp(0.0, x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0.0))),
    "leaky relu (slope 0.01)": lambda x: np.where(x > 0, x, 0.01 * x),
    "leaky relu (slope 0.1)": lambda x: np.where(x > 0, x, 0.1 * x),
    "leaky relu (slope 0.2)": lambda x: np.where(x > 0, x, 0.2 * x),
    "relu6": lambda x: np.clip(x, 0.0, 6.0),
    "hard tanh": lambda x: np.clip(x, -1.0, 1.0),
    "hard sigmoid": lambda x: np.clip(x / 6.0 + 0.5, 0.0, 1.0),
    "hard silu": lambda x: x * np.clip(x / 6.0 + 0.5, 0.0, 1.0),
    "mish": lambda x: x * np.tanh(np.logaddexp(0.0, x)),
    "selu": lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0.0))),
    "squared relu": lambda x: np.maximum(x, 0.0) ** 2,
    "abs": np.abs,
    "sin": np.sin,
    "exp": np.exp,
}
"""All but the identity."""

FIXES = {
    "gelu": "jax.nn.gelu(x, approximate=False)",
    "gelu (tanh approximation)": "jax.nn.gelu(x, approximate=True)",
    "gelu (x · sigmoid(1.702 x))": "x * jax.nn.sigmoid(1.702 * x)",
    "relu": "jax.nn.relu(x)",
    "silu": "jax.nn.silu(x)",
    "tanh": "jnp.tanh(x)",
    "sigmoid": "jax.nn.sigmoid(x)",
    "softplus": "jax.nn.softplus(x)",
    "elu": "jax.nn.elu(x)",
    "leaky relu (slope 0.01)": "jax.nn.leaky_relu(x, 0.01)",
    "leaky relu (slope 0.1)": "jax.nn.leaky_relu(x, 0.1)",
    "leaky relu (slope 0.2)": "jax.nn.leaky_relu(x, 0.2)",
    "relu6": "jax.nn.relu6(x)",
    "mish": "jax.nn.mish(x)",
    "selu": "jax.nn.selu(x)",
}
"""How a port gets them."""
