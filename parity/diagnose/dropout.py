"""Dropout, by the values it leaves."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.diagnose.diagnosis import Diagnosis, kind

SCALE = kind("dropout scale missing", "kept values that are not divided by 1 - rate")
RATE = kind("dropout rate", "another rate of dropout")
SHARED = kind("dropout mask shared", "one mask for the whole batch, or for all positions")
PLACE = kind("dropout in another place", "a dropout that one side does not have, or has elsewhere")
OFF = kind("dropout off", "no dropout in training, or dropout in evaluation")

Z = 6.0
"""Deviations from the expected share of zeros beyond which a rate is another one."""


def explain_dropout(evidence: Mapping[str, Any]) -> Diagnosis | None:
    """`site`, `rate`, and the keep masks (True = keep) of `reference` and `port`."""
    site, rate = str(evidence.get("site", "dropout")), evidence.get("rate")
    masks = {side: np.asarray(evidence[side]) for side in ("reference", "port") if evidence.get(side) is not None}
    if "port" not in masks or "reference" not in masks:
        return None
    zero = {side: 1.0 - float(mask.astype(bool).mean()) for side, mask in masks.items()}
    shared = {side: _shared(mask) for side, mask in masks.items()}
    if shared["port"] != shared["reference"]:
        words = {
            side: f"the same along axis {axis}" if axis is not None else "of its own for every element"
            for side, axis in shared.items()
        }
        return Diagnosis(
            kind=SHARED,
            module=site,
            sentence=f"The port's mask is {words['port']}, the reference's {words['reference']}",
            fix="broadcast_dims=() or broadcast_dropout=False",
        )
    if rate and zero["port"] == 0.0:
        return Diagnosis(
            kind=OFF, module=site, sentence=f"The port drops nothing at {site}", fix="call it in training mode"
        )
    spread = np.sqrt(0.25 / min(mask.size for mask in masks.values()))
    if abs(zero["port"] - zero["reference"]) > Z * spread:
        sentence = f"The port drops {zero['port']:.4f} of the values at {site}, the reference {zero['reference']:.4f}"
        return Diagnosis(
            kind=RATE,
            module=site,
            sentence=sentence,
            fix=f"rate={rate if rate is not None else round(zero['reference'], 3)}",
        )
    return None


def _shared(mask: np.ndarray) -> int | None:
    """The first axis along which a random mask repeats itself."""
    mask = mask.astype(bool)
    for axis in range(mask.ndim):
        if mask.shape[axis] > 1 and (mask == mask.take([0], axis=axis)).all() and mask.any() and not mask.all():
            return axis
    return None
