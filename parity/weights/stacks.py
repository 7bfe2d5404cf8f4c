"""Leaf operations on layers that one framework keeps apart and the other stacks along a new first axis (nnx.scan)."""

import dataclasses

import numpy as np

from parity.weights.rules import Arrays, Kind, Op


@dataclasses.dataclass(frozen=True)
class Stack(Op):
    """The tensors of `count` layers -> those of one, each with a new first axis of that size.

    Layer after layer, and within a layer in the order of the names; `ops` convert one layer's. Whatever an operation
    does to a gradient or a moment it does to each layer's.
    """

    count: int
    ops: tuple[Op, ...] = ()

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"Stack: expected at least one layer, got {self.count}")

    def count_outputs(self, num_inputs: int) -> int:
        """What one layer gives."""
        if num_inputs % self.count:
            raise ValueError(f"{self}: expected a multiple of {self.count} arrays, got {num_inputs}")
        each = num_inputs // self.count
        for op in self.ops:
            each = op.count_outputs(each)
        return each

    def _apply(self, arrays: Arrays, kind: Kind) -> Arrays:
        each = len(arrays) // self.count
        layers = []
        for start in range(0, len(arrays), each):
            layer = arrays[start : start + each]
            for op in self.ops:
                layer = op(layer, kind=kind)
            layers.append(layer)
        alike = {tuple((array.shape, str(array.dtype)) for array in layer) for layer in layers}
        if len(alike) > 1:
            raise ValueError(f"{self}: expected layers of one shape and dtype, got {sorted(alike)}")
        return tuple(np.stack(parts) for parts in zip(*layers, strict=True))

    def inverse(self) -> "Unstack":
        """The same layers apart."""
        return Unstack(self.count, tuple(op.inverse() for op in reversed(self.ops)))


@dataclasses.dataclass(frozen=True)
class Unstack(Op):
    """Tensors with a first axis of size `count` -> those of so many layers, one layer after the other."""

    count: int
    ops: tuple[Op, ...] = ()

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"Unstack: expected at least one layer, got {self.count}")

    def count_outputs(self, num_inputs: int) -> int:
        """`count` times what one layer gives."""
        each = num_inputs
        for op in self.ops:
            each = op.count_outputs(each)
        return each * self.count

    def _apply(self, arrays: Arrays, kind: Kind) -> Arrays:
        for array in arrays:
            if array.ndim == 0 or array.shape[0] != self.count:
                raise ValueError(f"{self}: expected a first axis of {self.count} layers, got shape {array.shape}")
        every: list[np.ndarray] = []
        for number in range(self.count):
            layer: Arrays = tuple(array[number] for array in arrays)
            for op in self.ops:
                layer = op(layer, kind=kind)
            every += layer
        return tuple(every)

    def inverse(self) -> "Stack":
        """The same layers stacked."""
        return Stack(self.count, tuple(op.inverse() for op in reversed(self.ops)))
