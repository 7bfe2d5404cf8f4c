"""What can be said of a value without knowing how it is made."""

import itertools

import numpy as np

from parity.diagnose.between import AXES, OUTPUT_SCALE, POSITIONS_MISSING, SHIFT, scale_kind
from parity.diagnose.case import Case
from parity.diagnose.diagnosis import Diagnosis, distance, kind
from parity.diagnose.dropout import ratio_kind
from parity.diagnose.engine import CLEARER, MATCH

CONSTANT = kind("constant added", "a constant vector added to every position")
ZEROS = kind("zeros", "zeros where the reference has values")
NAN = kind("not finite", "NaN or inf where the reference has numbers")
SHAPE = kind("another shape", "an array of another shape")


def outputs(case: Case) -> Diagnosis | None:
    """Multiplied, moved, shifted, cut off."""
    expected, got = case.expected.astype(np.float64), case.got.astype(np.float64)
    if expected.shape != got.shape:
        sentence = f"{_start(case)} has shape {got.shape} in the port, {expected.shape} in the reference"
        moved = _axes(expected, got)
        if moved is not None:
            return _said(
                case, AXES, f"{sentence}: the same elements in another order of axes, {moved}", "move the axes"
            )
        return _said(case, SHAPE, sentence, "return the same shape")
    if not np.isfinite(got).all() and np.isfinite(expected).all():
        count = int(np.count_nonzero(~np.isfinite(got)))
        return _said(
            case,
            NAN,
            f"{_start(case)} has {count} values in the port that are no numbers",
            "mask with a finite fill, and divide by nothing that may be zero",
        )
    match = min(MATCH, distance(got, expected) / CLEARER)
    if not got.any() and expected.any():
        return _said(case, ZEROS, f"{_start(case)} is zero in the port", "compute it")
    ratio = float((got.ravel() @ expected.ravel()) / max(float(expected.ravel() @ expected.ravel()), 1e-300))
    if abs(ratio) > 1e-9 and distance(got, ratio * expected) <= match:
        name = _scale(case, ratio) or scale_kind(ratio, expected.shape[-1] if expected.ndim else 1)

        return _said(
            case, name, f"{_start(case)} is {ratio:.9g} times that of the reference", f"divide it by {ratio:.9g}"
        )
    return _moved(case, expected, got, match) or _added(case, expected, got, match)


def _scale(case: Case, ratio: float) -> str:
    if case.masks:
        return ratio_kind(ratio)
    return OUTPUT_SCALE if case.method or not (case.module or case.child) else ""


def _moved(case: Case, expected: np.ndarray, got: np.ndarray, match: float) -> Diagnosis | None:
    for axis in range(expected.ndim):
        for what, candidate in (
            ("reversed", np.flip(expected, axis)),
            ("shifted by one", np.roll(expected, 1, axis)),
            ("shifted back by one", np.roll(expected, -1, axis)),
        ):
            if distance(got, candidate) <= match:
                return _said(case, SHIFT, f"{_start(case)} is {what} along axis {axis}", "undo it")
    moved = _axes(expected, got)
    if moved is not None:
        return _said(
            case,
            AXES,
            f"{_start(case)} has the reference's elements in another order of axes, {moved}",
            "move the axes",
        )
    return None


def _added(case: Case, expected: np.ndarray, got: np.ndarray, match: float) -> Diagnosis | None:
    difference = got - expected
    for axes in itertools.chain(((tuple(range(expected.ndim - 1))),), ((0,),) if expected.ndim == 3 else ()):
        constant = difference.mean(axis=axes, keepdims=True)
        if axes and expected.shape[0] > 1 and distance(got, expected + constant) <= match:
            words = (
                "the same vector" if len(axes) > 1 or expected.ndim == 2 else "a vector that depends on the position"
            )
            name = CONSTANT if len(axes) > 1 or expected.ndim == 2 else POSITIONS_MISSING
            return _said(
                case, name, f"{_start(case)} differs by {words} everywhere", "add it, or leave it out, as there"
            )
    return None


def _axes(expected: np.ndarray, got: np.ndarray) -> tuple[int, ...] | None:
    if expected.size != got.size or expected.ndim > 5:
        return None
    for order in itertools.permutations(range(expected.ndim)):
        if order != tuple(range(expected.ndim)):
            moved = expected.transpose(order)
            if distance(moved.reshape(got.shape), got) <= MATCH:
                return order
    return None


def _said(case: Case, name: str, sentence: str, fix: str) -> Diagnosis:
    return Diagnosis(kind=name, module=case.module, sentence=sentence, fix=fix)


def _start(case: Case) -> str:
    return case.where[0].upper() + case.where[1:]
