"""Decoded ids that differ although the model is equal."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.diagnose.diagnosis import Diagnosis, distance, kind
from parity.diagnose.engine import MATCH

SHIFTED = kind("decoding off by one", "ids that stand one place later or earlier")
EARLY = kind("decoding stops early", "sequences that end before the reference's")
LATE = kind("decoding does not stop", "sequences that go on after their end")
FIRST = kind("decoding starts otherwise", "another first id: what the decoder is given to begin with")
TOKENS = kind("decoded ids", "other ids from some position on")
SCORES = kind("decoding scores", "scores that are scaled, normalised otherwise or counted after the end")


def explain_decoding(evidence: Mapping[str, Any]) -> Diagnosis | None:
    """`reference` and `port`: ids (batch, length), of several hypotheses (batch, hypotheses, length), or scores."""
    if evidence.get("reference") is None or evidence.get("port") is None:
        return None
    expected, got = np.asarray(evidence["reference"]), np.asarray(evidence["port"])
    if np.issubdtype(expected.dtype, np.floating):
        return _scores(expected, got)
    if expected.ndim < 2 or got.ndim < 2 or expected.shape[:-1] != got.shape[:-1]:
        return None
    expected, got = (ids.reshape(-1, ids.shape[-1]) for ids in (expected, got))
    width = min(expected.shape[1], got.shape[1])
    if expected.shape != got.shape and np.array_equal(expected[:, :width], got[:, :width]):
        name = EARLY if got.shape[1] < expected.shape[1] else LATE
        sentence = f"The port decodes {got.shape[1]} positions, the reference {expected.shape[1]}"
        return _said(name, sentence, "use the same length")
    expected, got = expected[:, :width], got[:, :width]
    return _ends(expected, got) or _shifted(expected, got) or _from_where(expected, got)


def _shifted(expected: np.ndarray, got: np.ndarray) -> Diagnosis | None:
    for shift, words in ((1, "later"), (-1, "earlier")):
        one, two = (expected, got) if shift > 0 else (got, expected)
        # A sequence of one id over and over is its own neighbour.
        if one.shape[1] > 2 and np.array_equal(one[:, :-1], two[:, 1:]) and (one[:, :-1] != one[:, 1:]).any():
            sentence = f"The port's ids stand one place {words}"
            return _said(SHIFTED, sentence, "count positions as the reference does")
    return None


def _ends(expected: np.ndarray, got: np.ndarray) -> Diagnosis | None:
    """All differences are filled with one id on one side: it had stopped."""
    different = expected != got
    if not different.any():
        return None
    first = [int(np.argmax(row)) for row in different if row.any()]
    rows = np.flatnonzero(different.any(axis=1))
    fill = min(expected.min(), got.min())
    for name, stopped, which in ((EARLY, got, "the port"), (LATE, expected, "the reference")):
        # Once it has stopped, there is nothing but padding.
        filled = all((stopped[row, start:] == fill).all() for row, start in zip(rows, first, strict=True))
        # What goes on after its end has the same end: one id, right before the padding.
        ends = {int(stopped[row, start - 1]) if start else None for row, start in zip(rows, first, strict=True)}
        if filled and (name == EARLY or (len(ends) == 1 and not ends & {None, int(fill)})):
            sentence = f"From where the ids differ, {which} has nothing but {int(fill)}: it has stopped"
            return _said(name, sentence, "stop a sequence at the same id, and fill up with the same")
    return None


def _from_where(expected: np.ndarray, got: np.ndarray) -> Diagnosis | None:
    first = int(np.argmax((expected != got).any(axis=0)))
    if first == 0:
        return _said(FIRST, "The very first id differs", "start with the same id, mask and positions")
    return _said(
        TOKENS,
        f"Ids are equal up to position {first - 1} and differ from position {first} on",
        "compare what the decoder is given there: positions, masks, cache",
    )


def _scores(expected: np.ndarray, got: np.ndarray) -> Diagnosis | None:
    if expected.shape != got.shape or not np.isfinite(got).all():
        return None
    ratio = float((got.ravel() @ expected.ravel()) / max(float(expected.ravel() @ expected.ravel()), 1e-300))
    if distance(got, ratio * expected) <= MATCH:
        return _said(SCORES, f"The port's scores are {ratio:.6g} times the reference's", f"divide by {ratio:.6g}")
    return _said(SCORES, "The same ids have other scores", "normalise by length, and count the end, in the same way")


def _said(name: str, sentence: str, fix: str) -> Diagnosis:
    return Diagnosis(kind=name, module="decoding", sentence=sentence, fix=fix)
