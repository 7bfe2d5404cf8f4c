"""For modules of unknown formula: the port is run again with its weights turned, exchanged or left out."""

import itertools
import time
from collections.abc import Iterator, Mapping

import numpy as np

from parity.diagnose.between import EXCHANGED
from parity.diagnose.case import Case
from parity.diagnose.diagnosis import Diagnosis, distance
from parity.diagnose.engine import CLEARER, MATCH
from parity.diagnose.linear import BIAS, HEADS, QKV, REVERSED, TRANSPOSED, projection_role

MOST_RUNS = 60
SECONDS = 20.0
"""Whichever comes first: a large model is not run sixty times."""

Change = tuple[str, str, Mapping[str, np.ndarray]]
"""(kind, in words, {relative name: array})."""


def exchange(case: Case) -> Diagnosis | None:
    """The first change of the module's weights after which the difference is gone."""
    if case.rerun is None or case.module == "" or not case.weights:
        return None
    limit = min(MATCH, distance(case.got, case.expected) / CLEARER)
    started = time.process_time()
    for name, words, changed in itertools.islice(changes(case.weights), MOST_RUNS):
        if time.process_time() - started > SECONDS:
            return None
        again = case.rerun(changed)
        if again is not None and distance(again.astype(np.float64), case.expected.astype(np.float64)) <= limit:
            sentence = f"With {words}, the port's {case.module} equals the reference's"
            return Diagnosis(kind=name, module=case.module, sentence=sentence, fix=f"map the weights so: {words}")
    return None


def changes(weights: Mapping[str, np.ndarray]) -> Iterator[Change]:
    """What goes wrong with weights, the usual first."""
    for name, array in weights.items():
        if array.ndim == 2 and array.shape[0] == array.shape[1]:
            yield TRANSPOSED, f"{name} transposed", {name: array.T}
        elif array.ndim == 2:
            turned = array.reshape(array.shape[::-1]).T
            yield TRANSPOSED, f"{name} transposed instead of reshaped", {name: turned}
    yield from _exchanged(weights)
    for name, array in weights.items():
        if array.ndim == 1 and array.any():
            yield BIAS, f"{name} left out", {name: np.zeros_like(array)}
        for axis in range(array.ndim):
            yield REVERSED, f"{name} reversed along axis {axis}", {name: np.flip(array, axis)}
            yield from _heads(name, array, axis)


def _exchanged(weights: Mapping[str, np.ndarray]) -> Iterator[Change]:
    """Two of one shape, with their biases."""
    for first, second in itertools.combinations(weights, 2):
        if weights[first].shape == weights[second].shape:
            roles = {projection_role(name.rpartition(".")[0]) for name in (first, second)}
            name = QKV if roles <= {"q", "k", "v"} and len(roles) == 2 else EXCHANGED
            exchanged = {first: weights[second], second: weights[first]}
            path, other = first.rpartition(".")[0], second.rpartition(".")[0]
            for leaf in ("bias", "kernel"):
                one, two = f"{path}.{leaf}", f"{other}.{leaf}"
                if path != other and one in weights and two in weights and weights[one].shape == weights[two].shape:
                    exchanged |= {one: weights[two], two: weights[one]}
            yield name, f"{first} and {second} exchanged", exchanged


def _heads(name: str, array: np.ndarray, axis: int) -> Iterator[Change]:
    width = array.shape[axis]
    for heads in range(2, min(width, 17)):
        if array.ndim >= 2 and width % heads == 0:
            order = np.arange(width).reshape(heads, -1).T.ravel()
            words = f"the heads of {name} split in the other order along axis {axis}"
            yield HEADS, words, {name: array.take(order, axis=axis)}
