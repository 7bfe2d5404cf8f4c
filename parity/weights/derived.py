"""How a reference and a port correspond, once it is worked out."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from parity.facts import Facts
from parity.pair import KnownDifference
from parity.weights.biases import SumBiases
from parity.weights.mapping import WeightMapping
from parity.weights.problems import MappingError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fold:
    """Two biases of the reference that are compared as (their sum, 0)."""

    first: str
    second: str
    op: SumBiases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Derived:
    """How the two correspond."""

    table: WeightMapping
    """The mapping, as far as it could be worked out."""
    modules: Mapping[str, str]
    """Port's module path -> reference's, where they differ."""
    pairs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Port's module path -> reference's, of every module that has a counterpart; of `port`, not of the port itself."""
    port: Facts = dataclasses.field(default_factory=dict)
    """The port's facts with stacked layers apart: `layers.0.fc`, `layers.1.fc`, ... for `layers.fc`."""
    stacked: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Port's module path -> the reference's, of layers that the port stacks along a first axis (nnx.scan, nnx.vmap)."""
    problems: tuple[str, ...] = ()
    """What has no place on the other side, a line for each."""
    known: tuple[KnownDifference, ...] = ()
    stays: frozenset[str] = frozenset()
    """Tensors of the reference without a place in the port: counters, tables that the port computes."""
    own: frozenset[str] = frozenset()
    """Tensors of the port without a counterpart: tables that the reference computes."""
    folds: tuple[Fold, ...] = ()
    """Biases of which the port has the sum."""
    inside: frozenset[str] = frozenset()
    """Modules, by the reference's paths, inside one that does not call them: their outputs are not compared."""

    @property
    def mapping(self) -> WeightMapping:
        """From the reference's names and layouts to the port's. Raises MappingError if there are problems."""
        if self.problems:
            raise MappingError(self.problems)
        return self.table

    @property
    def held(self) -> frozenset[str]:
        """Tensors of the reference that training must not change for the two to stay comparable: the second of two
        biases, which would make their sum move twice as fast, or has no place in the port."""
        return frozenset(fold.second for fold in self.folds)

    def travels(self, name: str) -> bool:
        """Whether a tensor of the reference has a place in the port."""
        return name not in self.stays

    def expects(self, name: str) -> bool:
        """Whether a tensor of the port must be filled from the reference."""
        return name not in self.own

    def adjust(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The reference's weights as they are compared: two biases of which the port has the sum as (sum, 0), where
        the second's part without a place is lost. See `known`."""
        adjusted = dict(weights)
        for fold in self.folds:
            first, second = (np.asarray(adjusted[name]) for name in (fold.first, fold.second))
            adjusted[fold.first], adjusted[fold.second] = fold.op.fold(first, second)
        return adjusted
