"""Leaf operations on weights: what one framework's tensors become in the other, and back.

A weight rule is three actions, not one: a gradient and an optimizer's moments do not always move as the value does.
If theta' = c theta, then dL/dtheta' = (dL/dtheta) / c, Adam's first moment (a mean of gradients) is divided by c too,
and its second (a mean of squared gradients) by c^2. Every operation here therefore takes a `kind`, and where the right
answer cannot be known it raises instead of guessing.

Whatever only moves elements is exact on bits: NaN payloads, signed zeros and bfloat16 survive. Results may share memory
with the arrays they came from.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any, Literal, get_args

import numpy as np

Kind = Literal["value", "gradient", "first_moment", "second_moment"]
"""What an array is: a parameter's value, its gradient, or Adam's running mean of gradients or of their squares."""

Arrays = tuple[np.ndarray, ...]

_BLOCKED_FROM = 1 << 18  # bytes; below this a plain copy stays within the cache and is faster
_BLOCK = (512, 64)  # rows and columns of the result. More columns are as many rows of the source, a power of two apart


class Op(ABC):
    """One reversible step on a tuple of arrays."""

    @abstractmethod
    def count_outputs(self, num_inputs: int) -> int:
        """How many arrays come out of `num_inputs`. Raises ValueError if the operation does not take that many."""

    @abstractmethod
    def inverse(self) -> "Op":
        """The operation that undoes this one."""

    @abstractmethod
    def _apply(self, arrays: Arrays, kind: Kind) -> Arrays: ...

    def __call__(self, arrays: Arrays, *, kind: Kind = "value") -> Arrays:
        """The transformed arrays. Raises ValueError on a wrong number, rank or shape, or a `kind` without an answer."""
        if kind not in get_args(Kind):
            raise ValueError(f"{self}: expected kind to be one of {', '.join(get_args(Kind))}, got {kind!r}")
        self.count_outputs(len(arrays))
        return self._apply(arrays, kind)

    def _expect_count(self, num_inputs: int, expected: int) -> None:
        if num_inputs != expected:
            raise ValueError(f"{self}: expected {expected} array(s), got {num_inputs}")

    def _expect_axis(self, array: np.ndarray, axis: int) -> None:
        if axis >= array.ndim:
            raise ValueError(f"{self}: expected an array with an axis {axis}, got shape {array.shape}")


class Leafwise(Op):
    """An operation on each array by itself, however many there are."""

    def count_outputs(self, num_inputs: int) -> int:
        """As many as went in."""
        return num_inputs

    def _apply(self, arrays: Arrays, kind: Kind) -> Arrays:
        return tuple(self._one(array, kind) for array in arrays)

    @abstractmethod
    def _one(self, array: np.ndarray, kind: Kind) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Transpose(Leafwise):
    """Axes in another order: a torch Linear's (out, in) is a Flax kernel's (in, out).

    Without `axes` the array must be a matrix, whose two axes change places; an array of another rank is refused, not
    reversed. The result is a contiguous copy.
    """

    axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.axes is not None and sorted(self.axes) != list(range(len(self.axes))):
            raise ValueError(f"Transpose: expected axes to be an order of 0..{len(self.axes) - 1}, got {self.axes}")

    def _one(self, array: np.ndarray, kind: Kind) -> np.ndarray:
        axes = (1, 0) if self.axes is None else self.axes
        if array.ndim != len(axes):
            raise ValueError(f"{self}: expected an array of rank {len(axes)}, got shape {array.shape}")
        return _copy_transposed(array, axes)

    def inverse(self) -> "Transpose":
        """The order that puts every axis back."""
        return self if self.axes is None else Transpose(tuple(int(axis) for axis in np.argsort(self.axes)))


@dataclasses.dataclass(frozen=True)
class SplitHeads(Leafwise):
    """(..., num_heads * head_dim, ...) -> (..., num_heads, head_dim, ...), at `axis` counted from the front."""

    num_heads: int
    axis: int

    def __post_init__(self) -> None:
        _expect_heads(self, self.num_heads, self.axis)

    def _one(self, array: np.ndarray, kind: Kind) -> np.ndarray:
        self._expect_axis(array, self.axis)
        width = array.shape[self.axis]
        if width % self.num_heads:
            raise ValueError(f"{self}: expected a multiple of {self.num_heads} on axis {self.axis}, got {array.shape}")
        heads = (self.num_heads, width // self.num_heads)
        return array.reshape(array.shape[: self.axis] + heads + array.shape[self.axis + 1 :])

    def inverse(self) -> "MergeHeads":
        """The same heads merged."""
        return MergeHeads(self.num_heads, self.axis)


@dataclasses.dataclass(frozen=True)
class MergeHeads(Leafwise):
    """(..., num_heads, head_dim, ...) -> (..., num_heads * head_dim, ...), heads at `axis` counted from the front."""

    num_heads: int
    axis: int

    def __post_init__(self) -> None:
        _expect_heads(self, self.num_heads, self.axis)

    def _one(self, array: np.ndarray, kind: Kind) -> np.ndarray:
        self._expect_axis(array, self.axis + 1)
        heads, width = array.shape[self.axis : self.axis + 2]
        if heads != self.num_heads:
            raise ValueError(f"{self}: expected {self.num_heads} heads on axis {self.axis}, got shape {array.shape}")
        return array.reshape((*array.shape[: self.axis], heads * width, *array.shape[self.axis + 2 :]))

    def inverse(self) -> "SplitHeads":
        """The same heads apart."""
        return SplitHeads(self.num_heads, self.axis)


@dataclasses.dataclass(frozen=True)
class Split(Op):
    """One array -> several along `axis`: `parts` is the number of equal ones, or the size of each."""

    parts: int | tuple[int, ...]
    axis: int = 0

    def __post_init__(self) -> None:
        _expect_parts(self, self.parts, self.axis)

    def count_outputs(self, num_inputs: int) -> int:
        """The number of parts, out of one array."""
        self._expect_count(num_inputs, 1)
        return self.parts if isinstance(self.parts, int) else len(self.parts)

    def _apply(self, arrays: Arrays, kind: Kind) -> Arrays:
        (array,) = arrays
        self._expect_axis(array, self.axis)
        width = array.shape[self.axis]
        if isinstance(self.parts, int):
            if width % self.parts:
                raise ValueError(f"{self}: expected a multiple of {self.parts} on axis {self.axis}, got {array.shape}")
            sizes: tuple[int, ...] = (width // self.parts,) * self.parts
        else:
            sizes = self.parts
        if sum(sizes) != width:
            raise ValueError(f"{self}: expected {sum(sizes)} elements on axis {self.axis}, got shape {array.shape}")
        return tuple(np.split(array, np.cumsum(sizes)[:-1], axis=self.axis))

    def inverse(self) -> "Fuse":
        """The same parts put together."""
        return Fuse(self.parts, self.axis)


@dataclasses.dataclass(frozen=True)
class Fuse(Op):
    """Several arrays -> one along `axis`: `parts` is the number of equal ones, or the size of each.

    The sizes are stated, not read off the arrays, because the inverse needs them.
    """

    parts: int | tuple[int, ...]
    axis: int = 0

    def __post_init__(self) -> None:
        _expect_parts(self, self.parts, self.axis)

    def count_outputs(self, num_inputs: int) -> int:
        """One, out of as many as there are parts."""
        self._expect_count(num_inputs, self.parts if isinstance(self.parts, int) else len(self.parts))
        return 1

    def _apply(self, arrays: Arrays, kind: Kind) -> Arrays:
        _expect_one_dtype(self, arrays)
        for array in arrays:
            self._expect_axis(array, self.axis)
        sizes = tuple(array.shape[self.axis] for array in arrays)
        expected = (sizes[0],) * self.parts if isinstance(self.parts, int) else self.parts
        others = {array.shape[: self.axis] + array.shape[self.axis + 1 :] for array in arrays}
        if sizes != expected or len(others) > 1:
            shapes = ", ".join(str(array.shape) for array in arrays)
            raise ValueError(f"{self}: expected sizes {expected} on axis {self.axis}, others alike, got {shapes}")
        return (np.concatenate(arrays, axis=self.axis),)

    def inverse(self) -> "Split":
        """The same parts taken apart."""
        return Split(self.parts, self.axis)


@dataclasses.dataclass(frozen=True)
class Permute(Op):
    """The arrays in another order: output n is input `order[n]`."""

    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))):
            raise ValueError(f"Permute: expected an order of 0..{len(self.order) - 1}, got {self.order}")

    def count_outputs(self, num_inputs: int) -> int:
        """As many as the order has places."""
        self._expect_count(num_inputs, len(self.order))
        return num_inputs

    def _apply(self, arrays: Arrays, kind: Kind) -> Arrays:
        return tuple(arrays[position] for position in self.order)

    def inverse(self) -> "Permute":
        """The order that puts every array back."""
        return Permute(tuple(int(position) for position in np.argsort(self.order)))


def bits_equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two arrays have the same dtype, shape and bit patterns: NaN equals itself, 0.0 and -0.0 differ."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return first is second or bool(np.array_equal(as_bits(first), as_bits(second)))


def as_bits(array: np.ndarray) -> np.ndarray:
    """The array's bit patterns as unsigned integers: the same shape, or (..., bytes) for elements above 8 bytes."""
    if array.dtype.itemsize in (1, 2, 4, 8):
        return array.view(f"u{array.dtype.itemsize}")
    return np.asarray(array, order="C").reshape(*array.shape, 1).view(np.uint8)


def round_from_float64(op: Op, result: np.ndarray, dtype: np.dtype, *, nonzero: np.ndarray) -> np.ndarray:
    """`result` (float64) rounded once to `dtype`. Raises ValueError if finite elements overflow or `nonzero` vanish."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.asarray(result).astype(dtype)
    if bool(np.any(np.isinf(rounded) & ~np.isinf(result))) or bool(np.any((rounded == 0) & nonzero)):
        raise ValueError(f"{op}: expected results within the range of {dtype}, got overflow or underflow")
    return rounded


def expect_float(op: Op, arrays: Arrays) -> None:
    """Raises ValueError unless every array is of a real floating type; bfloat16 is one."""
    for array in arrays:
        # By exclusion: numpy calls bfloat16 of kind "V", not "f".
        if array.dtype.kind in "biuc" or not np.can_cast(array.dtype, np.float64):
            raise ValueError(f"{op}: expected a floating type up to float64, got {array.dtype}")


@dataclasses.dataclass(frozen=True)
class Scale(Leafwise):
    """Multiplies (or, with `divide`, divides) a value by `factor`, a gradient and first moment by its reciprocal, a
    second moment by the square of that.

    Computed in float64 and rounded once: a power of two is undone exactly, another factor up to one rounding. The
    state moves with the parameter, but Adam's step does not grow with it: for equal trajectories the learning rate of
    this parameter must be multiplied by `factor` as well.
    """

    factor: float
    divide: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.factor) or self.factor == 0:
            raise ValueError(f"Scale: expected a factor that is finite and not 0, got {self.factor!r}")

    def _one(self, array: np.ndarray, kind: Kind) -> np.ndarray:
        expect_float(self, (array,))
        wide = array.astype(np.float64)
        factor = self.factor**2 if kind == "second_moment" else self.factor
        multiply = (kind == "value") != self.divide
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            scaled = wide * factor if multiply else wide / factor
        if bool(np.any(np.isinf(scaled) & ~np.isinf(wide))):
            raise ValueError(f"{self}: expected results within the range of float64, got overflow")
        return round_from_float64(self, scaled, array.dtype, nonzero=wide != 0)

    def inverse(self) -> "Scale":
        """The same factor, divided by: its reciprocal would be rounded."""
        return Scale(self.factor, not self.divide)


def _expect_one_dtype(op: Op, arrays: Arrays) -> None:
    dtypes = sorted({str(array.dtype) for array in arrays})
    if len(dtypes) > 1:
        raise ValueError(f"{op}: expected arrays of one dtype, got {', '.join(dtypes)}")


def _expect_heads(op: Op, num_heads: int, axis: int) -> None:
    if num_heads < 1:
        raise ValueError(f"{op}: expected num_heads to be at least 1, got {num_heads}")
    expect_front_axis(op, axis)


def _expect_parts(op: Op, parts: int | tuple[int, ...], axis: int) -> None:
    wrong = parts < 1 if isinstance(parts, int) else (not parts or min(parts) < 0)
    if wrong:
        raise ValueError(f"{op}: expected at least one part, none of a negative size, got {parts}")
    expect_front_axis(op, axis)


def expect_front_axis(op: Op, axis: int) -> None:
    """Raises ValueError for a negative axis."""
    # Counted from the back, an axis would mean another one after the operation has changed the rank.
    if axis < 0:
        raise ValueError(f"{op}: expected an axis counted from the front, 0 or more, got {axis}")


def _copy_transposed(array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """A contiguous copy with the axes in another order, in blocks where the array is large."""
    # As plain integers: numpy moves its own types faster than bfloat16, and no float can be touched on the way.
    bits = array.view(f"u{array.dtype.itemsize}") if array.dtype.itemsize in (1, 2, 4, 8) else array
    view = bits.transpose(axes)
    result = np.empty(view.shape, view.dtype)
    if array.nbytes < _BLOCKED_FROM or axes[-1] == len(axes) - 1:
        result[...] = view
        return result.view(array.dtype)
    fast = axes.index(len(axes) - 1)  # where the source's contiguous axis has gone
    for start in range(0, view.shape[fast], _BLOCK[0]):
        for column in range(0, view.shape[-1], _BLOCK[1]):
            rows, columns = slice(start, start + _BLOCK[0]), slice(column, column + _BLOCK[1])
            block: tuple[Any, ...] = (*(slice(None),) * fast, rows, ..., columns)
            result[block] = view[block]
    return result.view(array.dtype)
