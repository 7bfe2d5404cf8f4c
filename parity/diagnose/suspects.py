"""The registry: a suspect is a function of a case that gives a diagnosis, or None if it explains nothing."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from parity.diagnose.case import Case
from parity.diagnose.diagnosis import Diagnosis, distance
from parity.diagnose.engine import CLEARER, MATCH


class Suspect(Protocol):
    """What is tried on a case."""

    def __call__(self, case: Case) -> Diagnosis | None:
        """What the difference is, or None."""


REGISTRY: list[Suspect] = []
"""Tried in this order, after those that the pair brings."""


def register(suspect: Suspect) -> Suspect:
    """Puts a suspect at the end of the registry; a decorator."""
    REGISTRY.append(suspect)
    return suspect


def suspect(
    kind: str, *, sentence: str, fix: str, applies: Callable[[Case], bool] = lambda case: True
) -> Callable[[Callable[[Case], np.ndarray]], Suspect]:
    """Makes a suspect of a function that computes what the reference returns, from what the port returned.

    The suspect explains the difference if the function's result is the reference's. For example

        @suspect("sign", sentence="the port's output has the other sign", fix="negate it")
        def negated(case):
            return -case.got

    and `Pair(..., suspects=(negated,))`, or `register(negated)` for every pair.
    """

    def decorate(repaired: Callable[[Case], np.ndarray]) -> Suspect:
        def explain(case: Case) -> Diagnosis | None:
            if not applies(case):
                return None
            error = distance(np.asarray(repaired(case), np.float64), case.expected.astype(np.float64))
            if error > min(MATCH, distance(case.got, case.expected) / CLEARER):
                return None
            return Diagnosis(kind=kind, module=case.module, sentence=sentence, fix=fix)

        return explain

    return decorate
