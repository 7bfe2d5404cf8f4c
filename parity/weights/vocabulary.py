"""Vocabularies padded to a round size on one side: rows that exist there and not here."""

import dataclasses

import numpy as np

from parity.weights.rules import Kind, Leafwise, Op, bits_equal, expect_front_axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class PadVocabulary(Leafwise):
    """Rows appended: a vocabulary of `rows_before` rows becomes one of `rows_after`, along `axis`.

    Both are sizes, before and after the operation, not numbers of new rows. The new rows of a value are `fill`; those
    of gradients and moments are zero. The inverse refuses to drop a row that is anything else.
    """

    rows_before: int
    rows_after: int
    fill: float = 0.0
    axis: int = 0

    def __post_init__(self) -> None:
        _expect_rows(self, self.rows_before, self.rows_after, self.axis)

    def _one(self, array: np.ndarray, kind: Kind) -> np.ndarray:
        _expect_size(self, array, self.axis, self.rows_before)
        fill = self.fill if kind == "value" else 0.0
        shape = list(array.shape)
        shape[self.axis] = self.rows_after - self.rows_before
        return np.concatenate([array, np.full(shape, fill, array.dtype)], axis=self.axis)

    def inverse(self) -> "TrimVocabulary":
        """The same rows taken away."""
        return TrimVocabulary(rows_before=self.rows_after, rows_after=self.rows_before, fill=self.fill, axis=self.axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrimVocabulary(Leafwise):
    """Last rows dropped: a vocabulary of `rows_before` becomes one of `rows_after`.

    Raises ValueError if a dropped row is not `fill` bit by bit (a value) or not zero (a gradient, a moment): then it
    has been trained, or was never padding.
    """

    rows_before: int
    rows_after: int
    fill: float = 0.0
    axis: int = 0

    def __post_init__(self) -> None:
        _expect_rows(self, self.rows_after, self.rows_before, self.axis)

    def _one(self, array: np.ndarray, kind: Kind) -> np.ndarray:
        _expect_size(self, array, self.axis, self.rows_before)
        kept, dropped = np.split(array, [self.rows_after], axis=self.axis)
        if kind == "value":
            same = bits_equal(dropped, np.full(dropped.shape, self.fill, array.dtype))
        else:
            same = not np.any(dropped != 0)
        if not same:
            expected = f"{self.fill}" if kind == "value" else "0"
            raise ValueError(
                f"{self}: expected rows of {expected} from {self.rows_after} on, got others: they would be lost"
            )
        return kept

    def inverse(self) -> "PadVocabulary":
        """The same rows put back."""
        return PadVocabulary(rows_before=self.rows_after, rows_after=self.rows_before, fill=self.fill, axis=self.axis)


def _expect_rows(op: Op, fewer: int, more: int, axis: int) -> None:
    if not 1 <= fewer <= more:
        raise ValueError(f"{op}: expected the smaller vocabulary in 1..{more}, got {fewer} rows")
    expect_front_axis(op, axis)


def _expect_size(op: Op, array: np.ndarray, axis: int, size: int) -> None:
    if axis >= array.ndim or array.shape[axis] != size:
        raise ValueError(f"{op}: expected {size} rows on axis {axis}, got shape {array.shape}")
