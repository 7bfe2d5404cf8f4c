"""The mapping between two models whose modules bear the same names, derived from the modules' types."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from parity.facts import Facts
from parity.pair import KnownDifference
from parity.weights.mapping import Rule, WeightMapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Derived:
    """How the two correspond."""

    mapping: WeightMapping
    modules: Mapping[str, str]
    """Port's module path -> reference's, where they differ."""
    known: tuple[KnownDifference, ...] = ()
    stays: frozenset[str] = frozenset()
    """Tensors of the reference without a place in the port: counters, tables that the port computes."""
    own: frozenset[str] = frozenset()
    """Tensors of the port without a counterpart: tables that the reference computes."""

    def travels(self, name: str) -> bool:
        """Whether a tensor of the reference has a place in the port."""
        return name not in self.stays

    def expects(self, name: str) -> bool:
        """Whether a tensor of the port must be filled from the reference."""
        return name not in self.own

    def adjust(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The reference's weights as they are compared: 0 where a known difference leaves no place for them."""
        return dict(weights)


def derive(
    reference: Facts, port: Facts, *, mapping: WeightMapping | Sequence[Rule], modules: Sequence[tuple[str, str]]
) -> Derived:
    """Stub."""
    assert isinstance(mapping, WeightMapping)
    return Derived(mapping=mapping, modules={})
