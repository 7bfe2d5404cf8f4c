"""Weights there and back, bit by bit."""

from collections.abc import Iterator, Mapping

import numpy as np

from parity.compare import Comparison
from parity.weights.mapping import WeightMapping
from parity.weights.rules import bits_equal


def there_and_back(
    reference: Mapping[str, np.ndarray], port: Mapping[str, np.ndarray], mapping: WeightMapping
) -> Iterator[Comparison]:
    """One comparison for every tensor of the reference; the error is 1 if its bits changed on the way."""
    back = mapping.inverse().apply(port)
    for name, array in reference.items():
        same = name in back and bits_equal(np.asarray(array), np.asarray(back[name]))
        yield Comparison(tensor=name, error=0.0 if same else 1.0, bound=0.0)
