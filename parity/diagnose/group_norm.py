"""Group norm: how many groups, and of which channels; channels last or behind the batch."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.diagnose.case import Case
from parity.diagnose.diagnosis import Diagnosis, kind
from parity.diagnose.engine import Factor, Option, explain
from parity.diagnose.norm import AFFINE, EPS, EPS_VALUES, is_norm

GROUPS = kind("number of groups", "another number of groups of a group norm or a convolution")
MEMBERS = kind("group norm channels", "groups of channels that are far from each other instead of neighbours")
OVER = kind("group norm over channels alone", "each position normalised by itself")


def group_norm(case: Case) -> Diagnosis | None:
    """A norm over space and some of the channels."""
    if not case.leaf or not case.given or case.x.ndim < 3 or case.expected.shape != case.x.shape:
        return None
    if not is_norm(case.module, " ".join(case.types)):
        return None
    vectors = {n: a for n, a in case.weights.items() if a.ndim == 1}
    scale = next((vectors[n] for n in ("scale", "weight") if n in vectors), None)
    if scale is None:
        return None
    channels = scale.size
    bias = vectors.get("bias", np.zeros(channels))
    places = [axis for axis in (case.x.ndim - 1, 1) if case.x.shape[axis] == channels]

    def formula(f: Mapping[str, Any]) -> np.ndarray | None:
        x = np.moveaxis(case.x.astype(np.float64), f["axis"], -1)
        shape, groups = x.shape, f["groups"]
        near = f["members"] == "near"
        split = x.reshape(*shape[:-1], *((groups, -1) if near else (-1, groups)))
        own = -1 if near else -2
        axes = (own,) if f["over"] == "channels" else (*range(1, x.ndim - 1), own % split.ndim)
        centred = split - split.mean(axis=axes, keepdims=True)
        result = centred / np.sqrt((centred**2).mean(axis=axes, keepdims=True) + f["eps"])
        result = result.reshape(shape)
        result = result * scale if f["affine"] in ("both", "scale") else result
        result = result + bias if f["affine"] in ("both", "bias") else result
        return np.asarray(np.moveaxis(result, -1, f["axis"]))

    read = [value for value in case.settings.get("eps", ()) if isinstance(value, float)]
    divisors = [n for n in range(1, channels + 1) if channels % n == 0]
    known = [value for value in case.settings.get("groups", ()) if value in divisors]
    affine = (("both", "both applied"), ("scale", "the scale alone"), ("bias", "the bias alone"), ("none", "left out"))
    factors = (
        Factor("axis", MEMBERS, tuple(Option(a, f"axis {a}") for a in dict.fromkeys(places)), also_right=1),
        Factor("groups", GROUPS, tuple(Option(n, str(n)) for n in dict.fromkeys([*known, *divisors])),
               what="number of groups", free=True, fix="num_groups={reference}"),
        Factor("eps", EPS, tuple(Option(e, f"{e:g}") for e in dict.fromkeys([*read, *EPS_VALUES])), what="eps",
               also_right=99, fix="set epsilon={reference}"),
        Factor("members", MEMBERS, (Option("near", "of neighbours"), Option("far", "of channels far apart")),
               what="groups", also_right=1, fix="make groups {reference}"),
        Factor("over", OVER, (Option("space", "over space and channels"), Option("channels", "over channels alone")),
               what="normalisation", also_right=1, fix="normalise {reference}"),
        Factor("affine", AFFINE, tuple(Option(v, w) for v, w in affine), what="scale and bias",
               fix="scale and bias must be {reference}"),
    )  # fmt: skip
    found = explain(formula, factors, expected=case.expected, got=case.got, unusual=0)
    return None if found is None else found.diagnosis(case.module)
