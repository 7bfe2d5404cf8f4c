import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_transformer import NO_DROPOUT, AttentionMask, DropoutKey, DropoutMasks
from flax_transformer.blockwise import blockwise_attention
from flax_transformer.dropout import apply_dropout

N = 2**21


def drawn(rate, *, seed=0, site="encoder", shape=(N,)):
    return np.asarray(DropoutKey(jax.random.key(seed)).at(site).keep(shape, rate=rate))


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.75])
def test_rate_is_honest(rate):
    """Five standard deviations of the binomial; the rate itself is rounded to 1/65536. Not 26/256 for 0.1."""
    got = 1 - drawn(rate).mean()
    assert abs(got - rate) < 5 * math.sqrt(rate * (1 - rate) / N) + 0.5 / 65536
    if rate == 0.1:
        assert abs(got - 26 / 256) > 5 * math.sqrt(rate * (1 - rate) / N)


def test_same_key_and_site_same_mask_otherwise_another():
    mask = drawn(0.5, shape=(64, 3))
    assert (mask == drawn(0.5, shape=(64, 3))).all()
    others = [drawn(0.5, shape=(64, 3), seed=1), drawn(0.5, shape=(64, 3), site="decoder")]
    key = DropoutKey(jax.random.key(0))
    others += [key.at("encoder").at("encoder").keep((64, 3), rate=0.5), key.keep((64, 3), rate=0.5)]
    for i, first in enumerate([mask, *others]):
        for second in others[i:]:
            assert 0.3 < (first != np.asarray(second)).mean() < 0.7


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7)])
def test_odd_sizes(shape):
    """Two elements share a drawn word; the last may be left over."""
    assert drawn(0.5, shape=shape).shape == shape


def test_kept_elements_are_scaled_so_that_the_expectation_stays():
    source = DropoutKey(jax.random.key(0))
    x = np.asarray(apply_dropout(jnp.ones(N, jnp.float32), source, rate=0.25))
    assert set(np.unique(x)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(x.mean(dtype=np.float64) - 1) < 5 * math.sqrt(0.25 / 0.75 / N) + 1e-5


def test_without_dropout_the_very_same_array():
    x = jnp.arange(3.0)
    assert apply_dropout(x, NO_DROPOUT.at("encoder"), rate=0.5) is x
    assert apply_dropout(x, DropoutKey(jax.random.key(0)), rate=0.0) is x


def test_attention_weights_by_tiles_drop_at_the_honest_rate():
    """With the identity for values and equal scores, the output of blockwise attention shows its mask."""
    length, rate = 128, 0.3
    query = jnp.zeros((4, 2, length, length), jnp.float32)
    value = jnp.broadcast_to(jnp.eye(length, dtype=jnp.float32), query.shape)
    source = DropoutKey(jax.random.key(0))
    output = blockwise_attention(query, query, value, AttentionMask(), block_size=32, source=source, rate=rate)
    keep = np.asarray(output) > 0
    assert abs(1 - keep.mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / keep.size)
    np.testing.assert_allclose(np.asarray(output)[keep], 1 / length / (1 - rate), rtol=1e-5)
    tiles = keep.reshape(-1, length, 4, 32)
    assert (tiles[:, :, 0] != tiles[:, :, 1]).any()  # a fresh tile at every step
    assert (keep[0] != keep[1]).any()  # not shared over the batch (P21)


def test_handed_in_masks_go_to_their_sites():
    mask = jnp.asarray([[True, False, True]])
    source = DropoutMasks({"encoder.layers.0": mask}).at("encoder").at("layers.0")
    assert np.asarray(apply_dropout(jnp.ones((1, 3)), source, rate=0.5)).tolist() == [[2.0, 0.0, 2.0]]


def test_a_missing_or_misshapen_mask_names_its_site():
    source = DropoutMasks({"encoder.dropout1": jnp.ones((2, 3), bool)}).at("encoder")
    with pytest.raises(ValueError, match=r"shape \(2, 3\) for encoder\.dropout2, got none"):
        source.at("dropout2").keep((2, 3), rate=0.1)
    with pytest.raises(ValueError, match=r"shape \(2, 4\) for encoder\.dropout1, got \(2, 3\)"):
        source.at("dropout1").keep((2, 4), rate=0.1)
    index, step = jnp.zeros((1, 1), jnp.int32), jnp.zeros((), jnp.int32)
    for site, got in (("dropout1", r"\(2, 3\)"), ("weights", "None")):
        with pytest.raises(ValueError, match=rf"shape \(2, 5, 'queries', 'keys'\) for encoder\.{site}, got {got}"):
            source.at(site).keep_tile((2, 5), index, index, rate=0.1, step=step)


@pytest.mark.parametrize("source", [DropoutKey(jax.random.key(0)), DropoutMasks({"a": jnp.ones(2, bool)}, "a")])
def test_sources_are_pytrees(source):
    leaves, structure = jax.tree.flatten(source)
    again = jax.tree.unflatten(structure, leaves)
    assert type(again) is type(source)
    assert (again.keep((2,), rate=0.5) == source.keep((2,), rate=0.5)).all()
    jax.tree.unflatten(structure, [object()] * len(leaves))  # jax does so
