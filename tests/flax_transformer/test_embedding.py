import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_transformer import TransformerConfig
from flax_transformer.embedding import Embedding, Positions, position_numbers, sinusoids


def positions(length, **changes):
    config = TransformerConfig.tiny(dtype="float64", param_dtype="float64", **changes)
    return np.asarray(Positions(config, rngs=nnx.Rngs(0))(length))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("scheme", ["interleaved", "concatenated", "concatenated_half_minus_1"])
@pytest.mark.parametrize("offset", [0, 2])
def test_sinusoids_element_by_element(scheme, offset):
    """P12. Also beyond max_len, where sinusoids are computed on."""
    got = positions(40, positions=scheme, position_offset=offset)
    assert got.shape == (40, 30)
    assert got.dtype == np.float64
    for pos in range(40):
        for i in range(15):
            angle = (pos + offset) / 10_000 ** (i / (14 if scheme == "concatenated_half_minus_1" else 15))
            sine, cosine = (2 * i, 2 * i + 1) if scheme == "interleaved" else (i, 15 + i)
            assert abs(got[pos, sine] - math.sin(angle)) < 1e-13
            assert abs(got[pos, cosine] - math.cos(angle)) < 1e-13


def test_interpolated_positions_are_squeezed_into_the_trained_range():
    config = TransformerConfig.tiny(interpolated_len=65, position_offset=3)  # max_len is 33
    numbers = position_numbers(65, config)
    np.testing.assert_allclose(numbers, 3 + np.arange(65) / 2)
    table = sinusoids(numbers, config)
    trained = sinusoids(position_numbers(33, TransformerConfig.tiny(position_offset=3)), config)
    np.testing.assert_allclose(table[::2], trained, atol=1e-15)


@pytest.mark.usefixtures("x64")
def test_learned_positions_are_rows_of_the_table():
    config = TransformerConfig.tiny(positions="learned", position_offset=2, dtype="float64", param_dtype="float64")
    module = Positions(config, rngs=nnx.Rngs(0))
    table = np.asarray(module.table[...])
    assert table.shape == (35, 30)
    assert (np.asarray(module(33)) == table[2:]).all()
    assert (np.asarray(module(4)) == table[2:6]).all()


@pytest.mark.usefixtures("x64")
def test_interpolated_learned_positions_lie_between_rows():
    config = TransformerConfig.tiny(
        positions="learned", position_offset=2, interpolated_len=65, dtype="float64", param_dtype="float64"
    )
    module = Positions(config, rngs=nnx.Rngs(0))
    table, got = np.asarray(module.table[...]), np.asarray(module(65))
    np.testing.assert_allclose(got[::2], table[2:], atol=1e-15)
    np.testing.assert_allclose(got[1::2], (table[2:-1] + table[3:]) / 2, atol=1e-15)


@pytest.mark.parametrize(("changes", "limit"), [({}, 33), ({"interpolated_len": 65}, 65)])
def test_a_learned_table_refuses_longer_sequences(changes, limit):
    """T9: jax's gather would clamp without a word."""
    module = Positions(TransformerConfig.tiny(positions="learned", **changes), rngs=nnx.Rngs(0))
    assert module(limit).shape == (limit, 30)
    with pytest.raises(ValueError, match=f"at most {limit} positions, .* sequence of {limit + 1}"):
        module(limit + 1)


def test_embeddings_are_scaled_where_read_and_not_where_tied():
    """P14."""
    embedding = Embedding(71, TransformerConfig.tiny(), rngs=nnx.Rngs(0))
    table = np.asarray(embedding.weight[...])
    ids = jnp.asarray([[4, 70, 0]])
    np.testing.assert_allclose(embedding(ids)[0], table[[4, 70, 0]] * math.sqrt(30), rtol=1e-6)
    x = np.random.default_rng(0).normal(size=(1, 2, 30)).astype(np.float32)
    np.testing.assert_allclose(embedding.logits(jnp.asarray(x)), x @ table.T, atol=1e-5)
