"""The leaf operation on kernels that one framework lays over the input in the other direction."""

import dataclasses

import numpy as np

from parity.weights.rules import Kind, Leafwise, expect_front_axis


@dataclasses.dataclass(frozen=True)
class Flip(Leafwise):
    """Elements along `axes`, counted from the front, in reverse order; gradients and moments too. Its own inverse."""

    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.axes or len(set(self.axes)) < len(self.axes):
            raise ValueError(f"Flip: expected different axes, at least one, got {self.axes}")
        for axis in self.axes:
            expect_front_axis(self, axis)

    def _one(self, array: np.ndarray, kind: Kind) -> np.ndarray:
        for axis in self.axes:
            self._expect_axis(array, axis)
        return np.ascontiguousarray(np.flip(array, self.axes))

    def inverse(self) -> "Flip":
        """The same again."""
        return self
