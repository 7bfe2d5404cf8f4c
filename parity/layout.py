"""Axes: torch keeps channels behind the batch, Flax keeps them last. Arrays of a reference's run in the port's order.

Which modules that concerns is known from their types, never guessed from a shape (P3); for a user's own modules that
pass feature maps on, the pair says it: `layouts={"blocks.{i}": (0, 2, 3, 1)}`.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from parity.facts import Facts
from parity.trace import Trace, module_of
from parity.weights.patterns import Pattern

_OF_DIMENSIONS = ("Conv", "ConvTranspose", "BatchNorm", "InstanceNorm", "MaxPool", "AvgPool", "AdaptiveAvgPool")

CHANNELS_FIRST = frozenset(f"{kind}{n}d" for n in (1, 2, 3) for kind in _OF_DIMENSIONS) | {
    "Dropout2d",
    "Dropout3d",
    "GroupNorm",
}
"""torch's modules that take (batch, channels, ...)."""

CHANNELS_LAST = frozenset({"Conv", "ConvTranspose", "BatchNorm", "InstanceNorm", "GroupNorm", "Dropout"})
"""Flax's that take (batch, ..., channels)."""


class Layouts:
    """Which axes of which arrays move."""

    def __init__(
        self, reference: Facts, port: Facts, *, modules: Mapping[str, str], given: Mapping[str, Sequence[int]]
    ):
        counterparts = {modules.get(path, path): facts for path, facts in port.items()}
        self._by_type = frozenset(
            path
            for path, facts in reference.items()
            if _is_a(facts.type, facts.bases, CHANNELS_FIRST)
            and path in counterparts
            and _is_a(counterparts[path].type, counterparts[path].bases, CHANNELS_LAST)
        )
        self._given = [(Pattern(text), tuple(axes)) for text, axes in given.items()]
        for text, axes in given.items():
            if sorted(axes) != list(range(len(axes))):
                raise ValueError(f"layouts[{text!r}]: expected each of {len(axes)} axes once, got {tuple(axes)}")

    def apply(self, trace: Trace) -> Trace:
        """The same run with the arrays of those modules in the port's order of axes; what the model returns stays."""
        if not self._by_type and not self._given:
            return trace
        return dataclasses.replace(
            trace,
            given={name: self._moved(name, array) for name, array in trace.given.items()},
            outputs={name: self._moved(name, array) for name, array in trace.outputs.items()},
        )

    def _moved(self, name: str, array: np.ndarray) -> np.ndarray:
        module = module_of(name)
        for pattern, axes in self._given:
            if len(axes) == array.ndim and (pattern.match(module) is not None or pattern.match(name) is not None):
                return array.transpose(axes)
        if module in self._by_type and array.ndim >= 3:
            return np.moveaxis(array, 1, -1)
        return array


def _is_a(name: str, bases: Sequence[str], wanted: frozenset[str]) -> bool:
    return name in wanted or bool(wanted.intersection(bases))
