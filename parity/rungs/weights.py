"""Rung 4: weights there and back, bit by bit."""

from collections.abc import Iterator

import numpy as np

from parity.compare import Comparison
from parity.rungs import Outcome, section
from parity.runs import Runs
from parity.tolerances import BITS_RULE
from parity.weights.rules import bits_equal


def climb(runs: Runs) -> Outcome:
    """From the reference to the port and back."""
    return Outcome(sections=(section("weights there and back", "bits", BITS_RULE, _there_and_back(runs)),))


def _there_and_back(runs: Runs) -> Iterator[Comparison]:
    """One comparison for every tensor of the reference; the error is 1 if its bits changed on the way."""
    back = runs.mapping.inverse().apply(runs.port_weights)
    for name, array in runs.weights.items():
        if runs.derived.travels(name):
            same = name in back and bits_equal(np.asarray(array), np.asarray(back[name]))
            yield Comparison(tensor=name, error=0.0 if same else 1.0, bound=0.0)
