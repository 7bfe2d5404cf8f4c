"""Distances between arrays. None of them can be fooled by NaN, by cancellation or by an empty comparison."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One tensor on both sides, and the bound its error was judged by."""

    tensor: str
    error: float
    bound: float
    reference: float | None = None
    """The reference's own error, where the bound is a multiple of it."""
    detail: str = ""
    """What was expected and what was found, where a number does not say it."""

    @property
    def passed(self) -> bool:
        """Within the bound; False for NaN."""
        return self.error <= self.bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identical:
    """How many float64 values are the same bit pattern after rounding to float32."""

    count: int
    unequal: int
    max_units: int
    """Largest distance of the unequal ones, in float32 units in the last place."""

    @property
    def share(self) -> float:
        """Of the equal ones, 0 to 1."""
        return 1.0 - self.unequal / self.count if self.count else 0.0

    def __str__(self) -> str:
        line = f"{self.count - self.unequal:,} of {self.count:,} identical"
        return line + (f", the others at most {self.max_units:,} units apart" if self.unequal else "")

    def __add__(self, other: "Identical") -> "Identical":
        return Identical(
            count=self.count + other.count,
            unequal=self.unequal + other.unequal,
            max_units=max(self.max_units, other.max_units),
        )


NOTHING_COMPARED = Identical(count=0, unequal=0, max_units=0)


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """‖got - expected‖ / ‖expected‖, Euclidean. 0 if both are equal, zeros included.

    Infinite for different shapes, and where one has a NaN or an infinity that the other has not at that place. Those
    that both have are left out; if nothing finite remains, or there was nothing at all, that is no comparison, and
    infinite too.
    """
    if got.shape != expected.shape or expected.size == 0:
        return float("inf")
    finite = np.isfinite(expected)
    if not finite.all() or not np.isfinite(got).all():
        same = np.array_equal(got[~finite], expected[~finite], equal_nan=True)
        if not same or not np.isfinite(got[finite]).all() or not finite.any():
            return float("inf")
        got, expected = got[finite], expected[finite]
    difference = norm(got.astype(np.float64) - expected.astype(np.float64))
    if difference == 0.0:
        return 0.0
    scale = norm(expected)
    return difference / scale if scale > 0.0 else float("inf")


def norm(x: np.ndarray) -> float:
    """Euclidean norm in float64, of whatever size: squares neither overflow nor vanish."""
    largest = float(np.abs(x).max()) if x.size else 0.0
    if largest == 0.0 or not np.isfinite(largest):
        return largest
    return largest * float(np.linalg.norm(x.astype(np.float64, copy=False).ravel() / largest))


def identical_after_rounding(got: np.ndarray, expected: np.ndarray) -> Identical:
    """Rounds both to float32 and compares bit patterns; 0 and -0 are the same value."""
    if got.shape != expected.shape:
        return Identical(count=max(got.size, 1), unequal=max(got.size, 1), max_units=2**32)
    units = np.abs(_ordered(got) - _ordered(expected))
    return Identical(
        count=got.size, unequal=int(np.count_nonzero(units)), max_units=int(units.max()) if units.size else 0
    )


def _ordered(x: np.ndarray) -> np.ndarray:
    """float32 bit patterns as integers in the order of the values, so that a difference counts units."""
    with np.errstate(over="ignore"):
        bits = x.astype(np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
