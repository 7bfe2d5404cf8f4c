"""Ids and masks that a module hands on otherwise."""

from collections.abc import Iterator

import numpy as np

from parity.diagnose.case import Case
from parity.diagnose.diagnosis import Diagnosis, kind
from parity.diagnose.embedding import IDS, IDS_PLACE
from parity.diagnose.masks import ADDED, INVERTED, MISSING, TRANSPOSED

OTHER_MASK = kind("wrong mask", "a mask that belongs to something else")
OTHER_IDS = kind("wrong ids", "ids that belong to something else")
MASK_OFF = kind("mask off by one", "a mask shifted by one position")
PADDING_ID = kind("padding id", "another id taken for padding where a mask is made")

Guess = tuple[str, str, np.ndarray]
"""(kind, in words, array)."""


def ids(case: Case) -> Diagnosis | None:
    """What a submodule is given besides floating-point arrays."""
    if not case.discrete:
        return None
    guesses = _masks(case) if case.expected.dtype == bool else _ids(case)
    for name, words, guess in guesses:
        if guess.shape == case.got.shape and np.array_equal(guess, case.got):
            start = case.where[0].upper() + case.where[1:]
            sentence = f"{start} is {words} in the port"
            return Diagnosis(kind=name, module=case.module, sentence=sentence, fix="hand on what the reference does")
    return None


def _masks(case: Case) -> Iterator[Guess]:
    mask = case.expected
    yield INVERTED, "inverted", ~mask
    yield MISSING, "True everywhere", np.ones_like(mask)
    yield MISSING, "False everywhere", np.zeros_like(mask)
    if mask.ndim >= 2:
        yield TRANSPOSED, "transposed", np.swapaxes(mask, -1, -2)
    for shift in (1, -1):
        yield MASK_OFF, "shifted by one position", np.roll(mask, shift, axis=-1)
        edge = np.roll(mask, shift, axis=-1)
        edge[..., 0 if shift > 0 else -1] = True
        yield MASK_OFF, "shifted by one position", edge
    if mask.all():
        yield ADDED, "another one", case.got
    for name, array in case.inputs.items():
        if array.shape == mask.shape and np.issubdtype(array.dtype, np.integer):
            for pad in np.unique(array):
                yield PADDING_ID, f"made of {name} with {pad} for padding", array != pad
                yield INVERTED, f"True where {name} is {pad}", array == pad
    for array in case.given_ids:
        yield OTHER_MASK, "another one that it was given", array


def _ids(case: Case) -> Iterator[Guess]:
    wanted = case.expected
    for shift in (1, -1, 2, -2):
        yield IDS, f"{shift:+d}", wanted + shift
    yield IDS, "clamped", np.minimum(wanted, case.got.max())
    for axis in range(wanted.ndim):
        for shift in (1, -1):
            rolled = np.roll(wanted, shift, axis)
            rolled_in = rolled.copy()
            place = [slice(None)] * wanted.ndim
            place[axis] = slice(0, 1) if shift > 0 else slice(-1, None)
            rolled_in[tuple(place)] = case.got[tuple(place)]
            yield IDS_PLACE, f"shifted by one along axis {axis}", rolled
            yield IDS_PLACE, f"shifted by one along axis {axis}", rolled_in
        yield IDS_PLACE, f"reversed along axis {axis}", np.flip(wanted, axis)
    for name, array in case.inputs.items():
        yield OTHER_IDS, name, array
