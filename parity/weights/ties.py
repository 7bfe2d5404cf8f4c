"""Leaf operations on tensors that share, or whose rows do not all exist on the other side.

Alias and Tie look alike and are not. An alias is a second name of one tensor: it has one gradient, seen twice. Tied
tensors were separate before: their gradients add up when they become one, and cannot be told apart afterwards.
"""

import dataclasses

import numpy as np

from parity.weights.rules import Arrays, Kind, Op, as_bits, bits_equal, expect_float, round_from_float64


@dataclasses.dataclass(frozen=True)
class _Several(Op):
    """`count` arrays of one shape and dtype -> one."""

    count: int

    def __post_init__(self) -> None:
        _expect_count_of_names(self, self.count)

    def count_outputs(self, num_inputs: int) -> int:
        """One, out of `count`."""
        self._expect_count(num_inputs, self.count)
        return 1

    def _expect_equal(self, arrays: Arrays, kind: Kind) -> None:
        for position, array in enumerate(arrays[1:], start=1):
            if not bits_equal(arrays[0], array):
                raise ValueError(
                    f"{self}: expected {self.count} {kind}s with equal bits, got {_difference(arrays[0], array)} "
                    f"between numbers 0 and {position}"
                )


@dataclasses.dataclass(frozen=True)
class _One(Op):
    """One array -> `count`."""

    count: int

    def __post_init__(self) -> None:
        _expect_count_of_names(self, self.count)

    def count_outputs(self, num_inputs: int) -> int:
        """`count`, out of one."""
        self._expect_count(num_inputs, 1)
        return self.count


@dataclasses.dataclass(frozen=True)
class Alias(_Several):
    """`count` names of ONE tensor -> that tensor. Values, gradients and moments are all the same array seen again, so
    all must be equal bit by bit; the first is taken.
    """

    def _apply(self, arrays: Arrays, kind: Kind) -> Arrays:
        self._expect_equal(arrays, kind)
        return arrays[:1]

    def inverse(self) -> "Unalias":
        """The one tensor under all its names."""
        return Unalias(self.count)


@dataclasses.dataclass(frozen=True)
class Unalias(_One):
    """One tensor -> the same tensor (the same memory) under `count` names, of whatever kind."""

    def _apply(self, arrays: Arrays, kind: Kind) -> Arrays:
        return arrays * self.count

    def inverse(self) -> "Alias":
        """All names one tensor again."""
        return Alias(self.count)


@dataclasses.dataclass(frozen=True)
class Tie(_Several):
    """`count` separate tensors -> one that takes the place of all.

    Values must be equal bit by bit. The gradient of the one is the sum of the gradients (the chain rule), and a first
    moment, being linear in gradients, is summed too; sums are taken in float64 and rounded once. Raises ValueError for
    a second moment: the running mean of (g1 + g2)^2 cannot be known from those of g1^2 and g2^2.
    """

    def _apply(self, arrays: Arrays, kind: Kind) -> Arrays:
        if kind == "second_moment":
            raise ValueError(
                f"{self}: expected a value, gradient or first moment, got a second moment: the mean of (g1 + g2)^2 "
                "cannot be known from the means of g1^2 and g2^2"
            )
        if kind == "value":
            self._expect_equal(arrays, kind)
            return arrays[:1]
        alike = {(array.shape, str(array.dtype)) for array in arrays}
        if len(alike) > 1:
            shapes = ", ".join(f"{array.shape} {array.dtype}" for array in arrays)
            raise ValueError(f"{self}: expected {self.count} arrays of one shape and dtype, got {shapes}")
        expect_float(self, arrays)
        with np.errstate(over="ignore", invalid="ignore"):
            total = arrays[0].astype(np.float64)
            for array in arrays[1:]:
                total = total + array.astype(np.float64)
        finite = np.logical_and.reduce([np.isfinite(array) for array in arrays])
        if bool(np.any(np.isinf(total) & finite)):
            raise ValueError(f"{self}: expected sums within the range of float64, got overflow")
        return (round_from_float64(self, total, arrays[0].dtype, nonzero=np.zeros((), bool)),)

    def inverse(self) -> "Untie":
        """Separate tensors again."""
        return Untie(self.count)


@dataclasses.dataclass(frozen=True)
class Untie(_One):
    """One tensor -> `count` separate ones (copies) of equal value.

    Raises ValueError for a gradient or a moment: the one gradient is a sum, and how much each place contributed to it
    is not known.
    """

    def _apply(self, arrays: Arrays, kind: Kind) -> Arrays:
        if kind != "value":
            raise ValueError(
                f"{self}: expected a value, got a {kind}: the gradient of a tied tensor is the sum over its places, "
                "and a sum cannot be split"
            )
        return tuple(arrays[0].copy() for _ in range(self.count))

    def inverse(self) -> "Tie":
        """One tensor in the place of all."""
        return Tie(self.count)


def _expect_count_of_names(op: Op, count: int) -> None:
    if count < 2:
        raise ValueError(f"{op}: expected a count of at least 2, got {count}")


def _difference(first: np.ndarray, second: np.ndarray) -> str:
    if first.shape != second.shape or first.dtype != second.dtype:
        return f"{first.shape} {first.dtype} and {second.shape} {second.dtype}"
    return f"{np.count_nonzero(as_bits(first) != as_bits(second))} different element(s)"
