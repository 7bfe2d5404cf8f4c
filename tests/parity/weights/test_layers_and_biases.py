"""Operations on kernels that are flipped, layers that are stacked, and two biases of which one sum is kept."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from parity.weights.biases import SplitBias, SumBiases
from parity.weights.flips import Flip
from parity.weights.rules import Kind, Op, Split, Transpose
from parity.weights.stacks import Stack, Unstack

KINDS: tuple[Kind, ...] = ("value", "gradient", "first_moment", "second_moment")


def numbered(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(1, np.prod(shape) + 1).reshape(shape).astype(dtype)


def equal(first: tuple[np.ndarray, ...], second: tuple[np.ndarray, ...]) -> bool:
    return len(first) == len(second) and all(map(np.array_equal, first, second))


@pytest.mark.parametrize("kind", KINDS)
def test_flip_is_its_own_inverse(kind: Kind) -> None:
    array = numbered(2, 3, 4)
    flip = Flip((0, 2))
    (flipped,) = flip((array,), kind=kind)
    assert np.array_equal(flipped, array[::-1, :, ::-1])
    assert equal(flip.inverse()((flipped,), kind=kind), (array,))


@pytest.mark.parametrize("axes", [(), (0, 0), (-1,)])
def test_flip_refuses(axes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="Flip"):
        Flip(axes)


def test_flip_refuses_an_axis_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="axis 2"):
        Flip((2,))((numbered(2, 3),))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_stacked_after_what_is_done_to_each(kind: Kind) -> None:
    stack = Stack(2, (Split(3), Transpose()))
    assert stack.count_outputs(2) == 3
    layers = (numbered(6, 5), 100 + numbered(6, 5))
    stacked = stack(layers, kind=kind)
    assert [array.shape for array in stacked] == [(2, 5, 2)] * 3
    assert np.array_equal(stacked[1][1], layers[1][2:4].T)
    assert equal(stack.inverse()(stacked, kind=kind), layers)
    assert stack.inverse().inverse() == stack


def test_layers_of_several_tensors_stay_together() -> None:
    stack = Stack(2, (SumBiases(),))
    first, second, third, fourth = (n * numbered(3) for n in (1, 10, 100, 1000))
    (stacked,) = stack((first, second, third, fourth))
    assert equal(tuple(stacked), (11 * numbered(3), 1100 * numbered(3)))


@pytest.mark.parametrize(
    ("make", "arrays", "text"),
    [
        (lambda: Stack(0), (), "at least one layer"),
        (lambda: Unstack(0), (), "at least one layer"),
        (lambda: Stack(2), (numbered(2),) * 3, "a multiple of 2"),
        (lambda: Stack(2), (numbered(2), numbered(3)), "one shape"),
        (lambda: Unstack(2), (numbered(3, 2),), "first axis of 2"),
    ],
)
def test_layers_that_do_not_fit(make: Any, arrays: tuple[np.ndarray, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()(arrays)


def test_sum_of_biases() -> None:
    first, second = numbered(6), 10 * numbered(6)
    (total,) = SumBiases()((first, second))
    assert np.array_equal(total, first + second)
    assert equal(SumBiases().inverse()((total,)), (total, np.zeros(6)))


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_the_gradient_of_a_sum_is_that_of_either(kind: Kind, dtype: Any) -> None:
    gradient = numbered(6, dtype=dtype)
    assert equal(SumBiases()((gradient, gradient.copy()), kind=kind), (gradient,))
    assert equal(SplitBias()((gradient,), kind=kind), (gradient, gradient))
    other = gradient.copy()
    other[3] *= 2
    with pytest.raises(ValueError, match="to be equal"):
        SumBiases()((gradient, other), kind=kind)
    other[3] = np.nan
    with pytest.raises(ValueError, match="to be equal"):
        SumBiases()((gradient, other), kind=kind)


def test_a_gate_whose_second_bias_has_no_place() -> None:
    op = SumBiases(3, apart=(2,))
    first, second = numbered(6), np.array([1, 1, 1, 1, 0, 0], np.float32)
    assert equal(op((first, second)), (first + second,))
    with pytest.raises(ValueError, match=r"expected 0 in gate\(s\) \(2,\)"):
        op((first, numbered(6)))
    # Its gradient may be anything; of the other gates it must be that of the first.
    gradient = np.array([*first[:4], 7, 8], np.float32)
    assert equal(op((first, gradient), kind="gradient"), (first,))
    with pytest.raises(ValueError, match="is not known"):
        op.inverse()((first,), kind="gradient")


def test_folding_keeps_what_is_computed() -> None:
    op = SumBiases(3, apart=(2,))
    first, second = numbered(6), 10 * numbered(6)
    folded = op.fold(first, second)
    assert equal(folded, (np.array([11, 22, 33, 44, 5, 6]), np.zeros(6)))
    assert equal(op.inverse()(op(folded)), folded)


@pytest.mark.parametrize(
    ("op", "arrays", "text"),
    [
        (SumBiases(), (numbered(6),), "expected 2"),
        (SumBiases(), (numbered(6), numbered(5)), "one size"),
        (SumBiases(), (numbered(2, 3), numbered(2, 3)), "two vectors"),
        (SumBiases(4), (numbered(6), numbered(6)), "a multiple of 4"),
        (SumBiases(), (numbered(6, dtype=np.int32),) * 2, "a floating type"),
    ],
)
def test_biases_that_do_not_fit(op: Op, arrays: tuple[np.ndarray, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        op(arrays)


def test_gates_that_are_not_there() -> None:
    with pytest.raises(ValueError, match=r"gates among 0\.\.2"):
        SumBiases(3, apart=(3,))
