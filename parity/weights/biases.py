"""Two biases that are only ever added, of which the other framework keeps the sum."""

import dataclasses

import ml_dtypes
import numpy as np

from parity.tolerances import EQUAL_GRADIENTS
from parity.weights.rules import Arrays, Kind, Op, expect_float, round_from_float64


@dataclasses.dataclass(frozen=True)
class SumBiases(Op):
    """Two biases b and c -> b + c: torch's `bias_ih` and `bias_hh` of an LSTM.

    The sum's gradient is the gradient of either: they must be equal up to rounding, and the first is taken; so are the
    moments. With `gates` parts, those in `apart` (a GRU's third) are not added to b in the other framework and have no
    place there: c must be 0 in them, and what their gradient is, is lost.

    The inverse gives (sum, 0): other biases with this sum cannot be told from it.
    """

    gates: int = 1
    apart: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.gates < 1 or any(not 0 <= gate < self.gates for gate in self.apart):
            raise ValueError(f"SumBiases: expected gates among 0..{self.gates - 1}, got {self.apart}")

    def count_outputs(self, num_inputs: int) -> int:
        """One, out of two."""
        self._expect_count(num_inputs, 2)
        return 1

    def added(self, size: int) -> np.ndarray:
        """Which elements of c are added to b: all but those of the gates that are apart."""
        if size % self.gates:
            raise ValueError(f"{self}: expected a multiple of {self.gates} elements, got {size}")
        return ~np.isin(np.arange(size) // (size // self.gates), self.apart)

    def fold(self, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(b, c) -> (b + c, 0), rounded once; gates that are apart lose their c."""
        expect_float(self, (first, second))
        added = self.added(first.size)
        total = first.astype(np.float64) + np.where(added, second, 0).astype(np.float64)
        return round_from_float64(self, total, first.dtype, nonzero=np.zeros((), bool)), np.zeros_like(second)

    def _apply(self, arrays: Arrays, kind: Kind) -> Arrays:
        first, second = arrays
        if first.ndim != 1 or first.shape != second.shape or first.dtype != second.dtype:
            shapes = f"{first.shape} {first.dtype} and {second.shape} {second.dtype}"
            raise ValueError(f"{self}: expected two vectors of one size and dtype, got {shapes}")
        expect_float(self, arrays)
        added = self.added(first.size)
        if kind == "value":
            if np.any(second[~added] != 0):
                raise ValueError(f"{self}: expected 0 in gate(s) {self.apart} of the second bias: it has no place")
            return self.fold(first, second)[:1]
        difference = np.abs(first[added].astype(np.float64) - second[added].astype(np.float64))
        scale = np.abs(first.astype(np.float64)).max(initial=0.0)
        # `not <=`, so that NaN is refused.
        if not bool(np.all(difference <= EQUAL_GRADIENTS * float(ml_dtypes.finfo(first.dtype).eps) * scale)):
            raise ValueError(f"{self}: expected the {kind}s of two biases that are only added to be equal")
        return (first,)

    def inverse(self) -> "SplitBias":
        """All of it in the first, 0 in the second."""
        return SplitBias(self.gates, self.apart)


@dataclasses.dataclass(frozen=True)
class SplitBias(Op):
    """One bias -> (the same, 0); its gradient and moments -> those of both, 0 where the second has no place."""

    gates: int = 1
    apart: tuple[int, ...] = ()

    def count_outputs(self, num_inputs: int) -> int:
        """Two, out of one."""
        self._expect_count(num_inputs, 1)
        return 2

    def _apply(self, arrays: Arrays, kind: Kind) -> Arrays:
        (bias,) = arrays
        if kind == "value":
            return bias, np.zeros_like(bias)
        if self.apart:
            raise ValueError(f"{self}: expected a value, got a {kind}: that of gate(s) {self.apart} is not known")
        return bias, bias.copy()

    def inverse(self) -> "SumBiases":
        """The sum again."""
        return SumBiases(self.gates, self.apart)
