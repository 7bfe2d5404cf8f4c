import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from flax_transformer import NO_DROPOUT, AttentionMask, DropoutKey, DropoutMasks
from flax_transformer.blockwise import blockwise_attention
from flax_transformer.dropout import _keep_rows, apply_dropout, threefry

ROWS, LENGTH = 2**11, 2**10
N = ROWS * LENGTH


def drawn(rate, *, seed=0, site="encoder", shape=(ROWS, LENGTH)):
    return np.asarray(DropoutKey(jax.random.key(seed)).at(site).keep(shape, rate=rate))


def standard_deviation(rate, count):
    return math.sqrt(rate * (1 - rate) / count)


@pytest.mark.parametrize("rate", [0.1, 1 / 3, 0.5, 0.75, 3e-5])
def test_rate_is_honest(rate):
    """Five standard deviations of the binomial, of all and of every place within a row. Not 26/256 for 0.1."""
    dropped = 1 - drawn(rate)
    assert abs(dropped.mean() - rate) < 5 * standard_deviation(rate, N)
    if rate == 0.1:
        assert abs(dropped.mean() - 26 / 256) > 5 * standard_deviation(rate, N)
    if rate > 0.01:  # the largest of 1,024 places and of 2,048 rows
        assert np.abs(dropped.mean(axis=0) - rate).max() < 6 * standard_deviation(rate, ROWS)
        assert np.abs(dropped.mean(axis=1) - rate).max() < 7 * standard_deviation(rate, LENGTH)


def test_rate_is_no_multiple_of_1_in_65536():
    """Half a step above a multiple: half of the rows drop one value of 16 bits more than the others."""
    key, rows = jnp.asarray([1, 2], jnp.uint32), jnp.arange(2**14, dtype=jnp.uint32)
    low, between, high = (np.asarray(_keep_rows(key, rows, (64,), n / 65536)) for n in (8, 8.5, 9))
    more = (low & ~high).any(axis=1)
    assert more.sum() > 10
    assert ((between == low).all(axis=1) | (between == high).all(axis=1)).all()
    share = (between == high).all(axis=1)[more].mean()
    assert abs(share - 0.5) < 5 * standard_deviation(0.5, more.sum())


@pytest.mark.parametrize("distance", [1, 2, 256, 512, 1023])
def test_elements_and_rows_are_independent(distance):
    """Correlations between places of a row, and between rows, are those of chance: 1/√N."""
    x = drawn(0.3) - 0.7
    for first, second in ((x[:, distance:], x[:, :-distance]), (x[distance:], x[:-distance])):
        assert abs((first * second).mean() / 0.21) < 5 / math.sqrt(first.size)


def test_same_key_and_site_same_mask_otherwise_another():
    mask = drawn(0.5, shape=(64, 3))
    assert (mask == drawn(0.5, shape=(64, 3))).all()
    others = [drawn(0.5, shape=(64, 3), seed=1), drawn(0.5, shape=(64, 3), site="decoder")]
    key = DropoutKey(jax.random.key(0))
    others += [key.at("encoder").at("encoder").keep((64, 3), rate=0.5), key.keep((64, 3), rate=0.5)]
    for i, first in enumerate([mask, *others]):
        for second in others[i:]:
            assert 0.3 < (first != np.asarray(second)).mean() < 0.7


@pytest.mark.parametrize("shape", [(1,), (3,), (5, 7), (2, 3, 1, 2), (4, 0)])
def test_odd_sizes(shape):
    """Four elements share a drawn block; the last ones may be left over."""
    assert drawn(0.5, shape=shape).shape == shape


@pytest.mark.parametrize("rounds", [13, 20])
def test_threefry_against_jax_and_known_answers(rounds):
    """jax's, of 20 rounds; Random123's published vectors for counters and keys of 0 and of all ones (kat_vectors)."""
    known = {
        13: [(0x9D1C5EC6, 0x8BD50731), (0xFD36D048, 0x2D17272C)],
        20: [(0x6B200159, 0x99BA4EFE), (0x1CB996FC, 0xBB002BE7)],
    }
    for word, expected in zip((0, 0xFFFFFFFF), known[rounds], strict=True):
        words = jnp.full(2, word, jnp.uint32)
        assert tuple(map(int, threefry(words, words[0], words[1], rounds=rounds))) == expected
    if rounds == 20:
        rng = np.random.default_rng(0)
        key, first, second = (jnp.asarray(rng.integers(2**32, size=n, dtype=np.uint32)) for n in (2, 50, 50))
        theirs = threefry_2x32(key, jnp.concatenate([first, second]))
        assert (jnp.concatenate(threefry(key, first, second, rounds=20)) == theirs).all()


def test_a_row_keeps_its_mask_whatever_the_batch():
    """In micro-batches, in another order, with rows appended; masks and tiles. Also the last row that there can be."""
    source = DropoutKey(jax.random.key(0)).at("encoder")
    index, step = jnp.zeros((2, 5), jnp.int32), jnp.int32(3)
    draws = (
        lambda source, batch: source.keep((batch, 3, 7), rate=0.5),
        lambda source, batch: source.keep_tile((batch, 2), index, index, rate=0.5, step=step),
    )
    for draw in draws:
        whole = np.asarray(draw(source, 9))
        assert (np.asarray(draw(source, 6)) == whole[:6]).all()
        rows = jnp.array([3, 7])
        assert (np.asarray(draw(source.for_rows(rows), 2)) == whole[[3, 7]]).all()
        assert (np.asarray(draw(source.for_rows(rows).at("x"), 2)) == np.asarray(draw(source.at("x"), 9))[[3, 7]]).all()
        assert (np.asarray(draw(source.for_rows(rows).for_rows(jnp.array([1])), 1)) == whole[[7]]).all()
        last = np.asarray(draw(source.for_rows(jnp.array([0, 2**31 - 1, 2**31 - 2])), 3))
        assert (last[0] == whole[0]).all()
        assert (last[0] != last[1]).any()
        assert (last[1] != last[2]).any()
    assert NO_DROPOUT.for_rows(jnp.array([3])) is NO_DROPOUT


def test_rows_of_masks_handed_in():
    mask = np.arange(12).reshape(4, 3) % 5 > 1
    source = DropoutMasks({"a": jnp.asarray(mask)}).for_rows(jnp.array([3, 1])).at("a")
    assert (np.asarray(source.keep((2, 3), rate=0.5)) == mask[[3, 1]]).all()


def test_a_mask_that_cannot_be_drawn_is_refused():
    key = DropoutKey(jax.random.key(0))
    with pytest.raises(ValueError, match=r"at least one axis, got the shape \(\)"):
        key.keep((), rate=0.5)
    with pytest.raises(ValueError, match=r"2 rows, got the shape \(3, 4\)"):
        key.for_rows(jnp.array([0, 1])).keep((3, 4), rate=0.5)
    with pytest.raises(ValueError, match="dropout key of threefry2x32, got rbg"):
        DropoutKey(jax.random.key(0, impl="rbg")).keep((3, 4), rate=0.5)


def test_devices_draw_their_rows_without_talking_to_each_other():
    """A batch spread over eight devices: the same mask, forward and backward without a collective."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    by_rows, everywhere = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*p)) for p in (("data",), ()))

    def dropped(x, source):
        return jnp.sin(apply_dropout(x, source, rate=0.3))

    def both(x, source):
        output, vjp = jax.vjp(lambda x: dropped(x, source), x)
        return output, vjp(output)[0]

    x = jax.random.normal(jax.random.key(1), (16, 3, 10))
    source = DropoutKey(jax.random.key(0)).at("encoder")
    sharded = jax.jit(both, in_shardings=(by_rows, everywhere), out_shardings=by_rows).lower(x, source).compile()
    collectives = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    assert not [name for name in collectives if name in sharded.as_text()]
    got = sharded(jax.device_put(x, by_rows), jax.device_put(source, everywhere))
    for one, other in zip(got, jax.jit(both)(x, source), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_kept_elements_are_scaled_so_that_the_expectation_stays():
    source = DropoutKey(jax.random.key(0))
    x = np.asarray(apply_dropout(jnp.ones((ROWS, LENGTH), jnp.float32), source, rate=0.25))
    assert set(np.unique(x)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(x.mean(dtype=np.float64) - 1) < 5 * math.sqrt(0.25 / 0.75 / N) + 1e-7


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


@pytest.mark.parametrize(
    "source",
    [
        DropoutKey(jax.random.key(0)),
        DropoutKey(jax.random.key(0), jnp.array([5, 3])),
        DropoutMasks({"a": jnp.ones(2, bool)}, "a"),
    ],
)
def test_sources_are_pytrees(source):
    leaves, structure = jax.tree.flatten(source)
    again = jax.tree.unflatten(structure, leaves)
    assert type(again) is type(source)
    assert (again.keep((2,), rate=0.5) == source.keep((2,), rate=0.5)).all()
    jax.tree.unflatten(structure, [object()] * len(leaves))  # jax does so
