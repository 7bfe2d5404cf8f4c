import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_transformer import TransformerConfig
from flax_transformer.feed_forward import ACTIVATIONS
from flax_transformer.primitives import LayerNorm, wide


def norm_by_hand(x, eps):
    x = np.asarray(x, np.float64)
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)


def norm(**changes):
    return LayerNorm(TransformerConfig.tiny(**changes))


@pytest.mark.parametrize("eps", [1e-5, 1e-3])
def test_layer_norm_where_eps_and_the_kind_of_variance_matter(eps):
    """P1: a variance near eps, and a mean of 1e4 (where E[x²] - E[x]² has nothing left in float32)."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 30)).astype(np.float32)
    x = np.stack([x, x * math.sqrt(eps), x + np.float32(1e4)])
    got = np.asarray(norm(norm_eps=eps)(jnp.asarray(x)))
    np.testing.assert_allclose(got[:2], norm_by_hand(x[:2], eps), atol=2e-6)
    np.testing.assert_allclose(got[2], norm_by_hand(x[2], eps), atol=2e-3)  # the mean itself is rounded


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_layer_norm_computes_in_float32_and_rounds_once(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 30)) * 300, dtype)
    got = norm(dtype=dtype)(x)
    assert got.dtype == dtype
    once = jnp.asarray(norm_by_hand(x, 1e-5), dtype)
    assert (np.asarray(got) != np.asarray(once)).mean() < 0.02  # near ties of rounding
    assert np.isfinite(np.asarray(got, np.float32)).all()


def test_layer_norm_without_bias():
    assert norm(use_bias=False).bias is None


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float32")]
)
def test_wide(dtype, expected):
    assert wide(jnp.zeros(1, dtype)).dtype == expected


@pytest.mark.usefixtures("x64")
def test_activations_against_their_formulas():
    """P2: gelu is the erf form."""
    x = np.linspace(-4, 4, 33)
    tanh = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    expected = {
        "relu": np.maximum(x, 0),
        "gelu": np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x]),
        "gelu_tanh": tanh,
        "silu": x / (1 + np.exp(-x)),
    }
    assert expected.keys() == ACTIVATIONS.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(jax.jit(ACTIVATIONS[name])(jnp.asarray(x)), values, atol=1e-14, err_msg=name)
