import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from parity.weights.rules import Fuse, MergeHeads, Permute, Scale, Split, SplitHeads, Transpose, bits_equal
from parity.weights.ties import Alias, Tie, Unalias, Untie
from parity.weights.vocabulary import PadVocabulary, TrimVocabulary

KINDS = ("value", "gradient", "first_moment", "second_moment")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = {"float64": "u8", "float32": "u4", "float16": "u2", "bfloat16": "u2"}


@st.composite
def arrays(draw, shape):
    """Arrays of any bit pattern at all: NaN payloads, infinities, subnormals, signed zeros."""
    dtype = draw(st.sampled_from(sorted(INTEGERS)))
    return draw(hnp.arrays(INTEGERS[dtype], shape)).view(dtype)


def assert_undone(op, given_arrays, kind):
    there = op(given_arrays, kind=kind)
    back = op.inverse()(there, kind=kind)
    assert len(back) == len(given_arrays)
    for before, after in zip(given_arrays, back, strict=True):
        assert bits_equal(before, after)
    assert op.inverse().inverse() == op


dims = st.integers(0, 4)


@given(st.data(), st.sampled_from(KINDS))
def test_transpose_is_undone(data, kind):
    rank = data.draw(st.integers(0, 4))
    axes = tuple(data.draw(st.permutations(range(rank))))
    array = data.draw(arrays(tuple(data.draw(dims) for _ in range(rank))))
    assert_undone(Transpose(axes), (array,), kind)
    assert Transpose(axes)((array,))[0].shape == tuple(array.shape[axis] for axis in axes)


@given(st.data(), st.sampled_from(KINDS))
def test_heads_are_merged_again(data, kind):
    heads, width, before, after = (data.draw(st.integers(1, 3)) for _ in range(4))
    array = data.draw(arrays((before, heads * width, after)))
    assert_undone(SplitHeads(heads, 1), (array,), kind)
    assert SplitHeads(heads, 1)((array,))[0].shape == (before, heads, width, after)


@given(st.data(), st.sampled_from(KINDS), st.booleans())
def test_parts_are_fused_again(data, kind, equal):
    sizes = (2,) * data.draw(st.integers(1, 4)) if equal else tuple(data.draw(st.lists(dims, min_size=1, max_size=4)))
    array = data.draw(arrays((3, sum(sizes))))
    assert_undone(Split(len(sizes) if equal else sizes, 1), (array,), kind)
    assert [part.shape for part in Split(sizes, 1)((array,))] == [(3, size) for size in sizes]


@given(st.permutations(range(4)), st.sampled_from(KINDS))
def test_permutation_is_undone(order, kind):
    assert_undone(Permute(tuple(order)), tuple(np.full(place + 1, place) for place in range(4)), kind)


@given(st.data(), st.sampled_from(KINDS))
def test_padding_is_trimmed_again(data, kind):
    rows, more = data.draw(st.integers(1, 4)), data.draw(dims)
    array = data.draw(arrays((rows, 3)))
    op = PadVocabulary(rows_before=rows, rows_after=rows + more, fill=-math.inf)
    assert_undone(op, (array,), kind)
    padded = op((array,), kind=kind)[0]
    assert padded.shape == (rows + more, 3)
    assert padded.dtype == array.dtype
    assert bool(np.all(padded[rows:] == (-math.inf if kind == "value" else 0)))


@given(st.data(), st.sampled_from(KINDS), st.integers(2, 4))
def test_aliases_are_one_again(data, kind, count):
    assert_undone(Unalias(count), (data.draw(arrays((2, 3))),), kind)


@given(st.data(), st.integers(2, 4))
def test_untied_values_are_tied_again(data, count):
    array = data.draw(arrays((2, 3)))
    assert_undone(Untie(count), (array,), "value")
    copies = Untie(count)((array,))
    assert not any(np.shares_memory(array, copy) for copy in copies)


@given(st.sampled_from([0.25, -2.0, 1024.0]), st.sampled_from(KINDS), st.data())
def test_scale_by_a_power_of_two_is_undone(factor, kind, data):
    array = data.draw(hnp.arrays(np.float32, (3,), elements=st.floats(2**-80, 2**80, width=32)))
    assert_undone(Scale(factor), (array,), kind)


def test_transpose_in_blocks_equals_the_plain_one():
    source = np.random.default_rng(0)
    for shape, axes in [((700, 301), (1, 0)), ((11, 300, 5, 41), (3, 0, 2, 1)), ((11, 300, 5, 41), (1, 0, 2, 3))]:
        for dtype in ("float32", "bfloat16", "complex128"):
            array = source.standard_normal(shape).astype(dtype)
            (result,) = Transpose(axes)((array,))
            assert result.flags.c_contiguous
            assert result.dtype == array.dtype
            np.testing.assert_array_equal(result, array.transpose(axes))


def loss(weight, other):
    """Of a linear layer, in float64; any function would do."""
    return float(np.sum(np.tanh(other @ weight) ** 2))


def gradient(function, weight, step=1e-6):
    result = np.zeros_like(weight)
    for place in np.ndindex(*weight.shape):
        delta = np.zeros_like(weight)
        delta[place] = step
        result[place] = (function(weight + delta) - function(weight - delta)) / (2 * step)
    return result


def test_scale_moves_gradients_and_moments_as_differentiation_does():
    source, factor = np.random.default_rng(1), 5.48
    weight, other = source.standard_normal((3, 2)), source.standard_normal((4, 3))
    op = Scale(factor)
    scaled = op((weight,))[0]
    there = gradient(lambda w: loss(w / factor, other), scaled)  # the same function of the scaled parameter
    here = gradient(lambda w: loss(w, other), weight)
    np.testing.assert_allclose(op((here,), kind="gradient")[0], there, rtol=1e-7, atol=1e-9)
    # One Adam step from zero: m = 0.1 g, v = 0.001 g^2, on either side.
    np.testing.assert_allclose(op((0.1 * here,), kind="first_moment")[0], 0.1 * there, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(op((0.001 * here**2,), kind="second_moment")[0], 0.001 * there**2, rtol=1e-7, atol=1e-9)


def test_tie_sums_gradients_as_differentiation_does():
    source = np.random.default_rng(2)
    weight, first, second = (source.standard_normal(shape) for shape in ((3, 2), (4, 3), (5, 3)))
    one = gradient(lambda w: loss(w, first), weight)
    two = gradient(lambda w: loss(w, second), weight)
    both = gradient(lambda w: loss(w, first) + loss(w, second), weight)
    np.testing.assert_allclose(Tie(2)((one, two), kind="gradient")[0], both, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(Tie(2)((0.1 * one, 0.1 * two), kind="first_moment")[0], 0.1 * both, rtol=1e-7, atol=1e-8)


def test_tie_rounds_its_sum_once():
    parts = tuple(np.array([value], BFLOAT16) for value in (256.0, 1.0, 1.0))
    assert float(Tie(3)(parts, kind="gradient")[0][0]) == 258.0  # added in bfloat16, 256 + 1 + 1 stays 256


@pytest.mark.parametrize(
    ("op", "kind"), [(Tie(2), "second_moment")] + [(Untie(2), kind) for kind in KINDS if kind != "value"]
)
def test_what_cannot_be_known_is_refused(op, kind):
    array = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"cannot be (known|split)"):
        op((array,) * (2 if isinstance(op, Tie) else 1), kind=kind)


@pytest.mark.parametrize("op", [Alias(2), Tie(2)])
def test_equal_means_equal_bits(op):
    nan, other_nan = np.array([0x7FC00001, 0x7FC00002], "u4").view("f4").reshape(2, 1)
    assert bits_equal(op((nan, nan.copy()))[0], nan)
    with pytest.raises(ValueError, match="1 different element"):
        op((nan, other_nan))
    with pytest.raises(ValueError, match="1 different element"):
        op((np.float32([0.0]), np.float32([-0.0])))
    with pytest.raises(ValueError, match=r"float32 and \(1,\) int32"):
        op((np.float32([0.0]), np.int32([0])))


def test_trained_rows_are_not_dropped():
    op = TrimVocabulary(rows_before=5, rows_after=3)
    array = np.zeros((5, 2), np.float32)
    assert op((array,))[0].shape == (3, 2)
    for kind in KINDS:
        array[4, 1] = 1e-30
        with pytest.raises(ValueError, match="they would be lost"):
            op((array,), kind=kind)


def test_scale_refuses_what_leaves_the_range():
    for array, factor in [(np.float16([60000]), 2.0), (np.float16([6e-8]), 0.1), (np.float64([1e308]), 100.0)]:
        with pytest.raises(ValueError, match="range of"):
            Scale(factor)((array,))
    assert np.isinf(Scale(2.0)((np.float32([np.inf]),))[0]).all()


@pytest.mark.parametrize(
    ("op", "shapes", "message"),
    [
        (Transpose(), [(2, 3, 4)], r"expected an array of rank 2, got shape \(2, 3, 4\)"),
        (Transpose((0, 2, 1)), [(2, 3)], "expected an array of rank 3"),
        (SplitHeads(3, 0), [(10, 2)], "expected a multiple of 3 on axis 0"),
        (SplitHeads(3, 2), [(6, 2)], "expected an array with an axis 2"),
        (MergeHeads(3, 0), [(2, 5)], "expected 3 heads on axis 0"),
        (Split(3), [(10, 2)], "expected a multiple of 3 on axis 0"),
        (Split((2, 3)), [(6, 2)], "expected 5 elements on axis 0"),
        (Split(2), [(4,), (4,)], r"expected 1 array\(s\), got 2"),
        (Fuse(2), [(2, 3), (4, 3)], "expected sizes"),
        (Fuse((2, 4)), [(4, 3), (2, 3)], "expected sizes"),
        (Fuse(2), [(2, 3), (2, 4)], "others alike"),
        (Fuse(3), [(2, 3), (2, 3)], r"expected 3 array\(s\), got 2"),
        (Permute((1, 0)), [(1,)], r"expected 2 array\(s\), got 1"),
        (PadVocabulary(rows_before=4, rows_after=6), [(5, 2)], "expected 4 rows on axis 0"),
        (TrimVocabulary(rows_before=6, rows_after=4), [(4, 2)], "expected 6 rows on axis 0"),
    ],
)
def test_wrong_shapes_are_refused(op, shapes, message):
    with pytest.raises(ValueError, match=message):
        op(tuple(np.zeros(shape, np.float32) for shape in shapes))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Transpose((0, 0)),
        lambda: SplitHeads(0, 1),
        lambda: SplitHeads(2, -1),
        lambda: Split(0),
        lambda: Split((2, -1)),
        lambda: Fuse(()),
        lambda: Permute((0, 2)),
        lambda: Scale(0.0),
        lambda: Scale(math.nan),
        lambda: Alias(1),
        lambda: Untie(0),
        lambda: PadVocabulary(rows_before=5, rows_after=4),
        lambda: Transpose()((np.zeros((2, 3)),), kind="moment"),
        lambda: Scale(2.0)((np.int32([1]),)),
        lambda: Fuse(2)((np.zeros(1, np.float32), np.zeros(1))),
        lambda: Tie(2)((np.zeros(1), np.zeros(2)), kind="gradient"),
    ],
)
def test_wrong_arguments_are_refused(make):
    with pytest.raises(ValueError, match="expected"):
        make()
