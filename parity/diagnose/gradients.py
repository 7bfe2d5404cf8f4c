"""Gradients that differ where all outputs are equal: the backward pass alone is at fault."""

from collections.abc import Mapping, Sequence

import numpy as np

from parity.diagnose.diagnosis import Diagnosis, distance, kind
from parity.diagnose.engine import MATCH
from parity.pair import Inputs

STOPPED = kind("gradient stopped", "a stop_gradient, or an array made outside of what is differentiated")
SCALED = kind("gradient scaled", "a gradient multiplied by a constant")
REVERSED = kind("gradient reversed", "a gradient of the other sign")
PADDING_ROW = kind("padding row gradient", "torch's padding_idx row gets no gradient, Flax's does unless stopped")
TIED = kind("tied gradient counted once", "of two uses of one tensor only one contributes to its gradient")
PARTIAL = kind("gradient partly stopped", "part of a parameter gets no gradient")
BACKWARD = kind("backward pass", "outputs are equal, gradients are not, and no simpler name fits")

BACKWARD_KINDS = frozenset({STOPPED, SCALED, REVERSED})
"""What happens at one place of the backward pass."""

Tensors = Mapping[str, np.ndarray]


def explain_gradients(
    failed: Sequence[str], expected: Tensors, got: Tensors, inputs: Inputs, *, nearest: str
) -> Diagnosis | None:
    """`failed`: parameters whose gradients differ; `nearest`: the one of them nearest to the loss."""
    if nearest not in expected or nearest not in got or expected[nearest].shape != got[nearest].shape:
        return None
    wanted, found = expected[nearest].astype(np.float64), got[nearest].astype(np.float64)
    if not np.isfinite(found).all():
        return None
    if not found.any() and wanted.any():
        others = sum(not got[name].any() for name in failed if name in got) - 1
        more = f", and of {others} more behind it" if others else ""
        return _said(
            STOPPED,
            nearest,
            f"The port's gradient of {nearest} is zero{more}",
            "remove the stop_gradient, or compute it inside of what is differentiated",
        )
    rows = _rows(nearest, wanted, found, inputs) if set(failed) == {nearest} else None
    if rows is not None:
        return rows
    ratio = float(wanted.ravel() @ found.ravel()) / max(float(wanted.ravel() @ wanted.ravel()), 1e-300)
    if distance(found, ratio * wanted) <= MATCH:
        name = REVERSED if abs(ratio + 1.0) < 1e-9 else SCALED
        return _said(
            name,
            nearest,
            f"The port's gradient of {nearest} is {ratio:.6g} times the reference's",
            "remove the factor from the backward pass",
        )
    return _partial(nearest, wanted, found) or _upstream(failed, expected, got, nearest)


def _rows(name: str, wanted: np.ndarray, found: np.ndarray, inputs: Inputs) -> Diagnosis | None:
    """Of a table: in which rows the gradients differ."""
    if wanted.ndim != 2:
        return None
    ids = [a for a in inputs.values() if np.issubdtype(a.dtype, np.integer)]
    used = {int(i) for array in ids for i in np.unique(array)}
    scale = np.linalg.norm(wanted) / np.sqrt(len(wanted))
    different = [i for i in range(len(wanted)) if np.linalg.norm(found[i] - wanted[i]) > 1e-11 * scale]
    if len(different) == 1 and len(wanted) > 2:
        row = different[0]
        which = (
            "none in the reference"
            if not wanted[row].any()
            else "none in the port"
            if not found[row].any()
            else "another"
        )
        return _said(
            PADDING_ROW,
            name,
            f"Row {row} of {name} gets another gradient than in the reference: {which}",
            f"stop the gradient of row {row}" if not wanted[row].any() else f"let row {row} have its gradient",
        )
    unused = [i for i in range(len(wanted)) if i not in used]
    if not ids or not unused:
        return None
    if all(i in used for i in different):
        sentence = f"The port's gradient of {name} differs only in rows that are looked up: not every use of it counts"
        return _said(TIED, name, sentence, "use one and the same parameter in both places, without stop_gradient")
    if wanted[unused].any() and not found[unused].any():
        sentence = (
            f"The port's gradient of {name} is zero in rows that are not looked up: its use as a matrix does not count"
        )
        return _said(TIED, name, sentence, "use one and the same parameter in both places, without stop_gradient")
    return None


def _partial(name: str, wanted: np.ndarray, found: np.ndarray) -> Diagnosis | None:
    """Equal but for elements that are zero."""
    lost = (found == 0.0) & (wanted != 0.0)
    if not lost.any() or distance(np.where(lost, wanted, found), wanted) > MATCH:
        return None
    return _said(
        PARTIAL,
        name,
        f"{int(lost.sum())} of {lost.size} elements of the gradient of {name} are zero in the port",
        "remove the stop_gradient",
    )


def _upstream(failed: Sequence[str], expected: Tensors, got: Tensors, nearest: str) -> Diagnosis:
    """Nothing at the nearest one; perhaps others show it."""
    zero = [n for n in failed if n in got and n in expected and not got[n].any() and expected[n].any()]
    if zero:
        return _said(STOPPED, zero[0], f"The port's gradient of {zero[0]} is zero", "remove the stop_gradient")
    sentence = f"All outputs are equal, but the port's gradient of {nearest} is not: its backward pass is another one"
    fix = "look for stop_gradient, custom_vjp, or another path of the gradient between it and the loss"
    return _said(BACKWARD, nearest, sentence, fix)


def _said(name: str, parameter: str, sentence: str, fix: str) -> Diagnosis:
    return Diagnosis(kind=name, module=parameter, sentence=sentence, fix=fix)
