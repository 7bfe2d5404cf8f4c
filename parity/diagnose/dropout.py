"""Dropout, on the evidence of rung 10."""

from collections.abc import Mapping, Sequence
from typing import Any

from parity.compare import Comparison
from parity.diagnose.diagnosis import Diagnosis, kind

SCALE = kind("dropout scale missing", "kept values that are not divided by 1 - rate")
RATE = kind("dropout rate", "another rate of dropout")
SHARED = kind("dropout mask shared", "one mask for the whole batch, or for all positions")
PLACE = kind("dropout in another place", "a dropout that one side does not have, or has elsewhere")
OFF = kind("dropout off", "no dropout in training, or dropout in evaluation")
INVERTED = kind("dropout mask inverted", "what should be kept is dropped")
RATES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
LIKELY_RATES = RATES[:-1]
"""Half or twice of something has other reasons, most of the time."""
REPEATED = kind("dropout mask repeated", "the same mask again with another seed, or at two places")


def ratio_kind(ratio: float) -> str:
    """Of kept values of the port over the reference's: not divided by 1 - rate, or by that of another rate."""
    return SCALE if any(abs(ratio / (1 - rate) - 1.0) < 1e-9 for rate in RATES) else RATE


def explain_dropout(evidence: Mapping[str, Any], failures: Sequence[Comparison] = ()) -> Diagnosis | None:
    """`rates`, shares kept and `shared_axes` of both sides by site; and what failed."""
    return _sites(failures) or _shared(evidence) or _rates(evidence) or _repeated(failures)


def _sites(failures: Sequence[Comparison]) -> Diagnosis | None:
    for failure in failures:
        if failure.detail.endswith("drops out here"):
            sentence = f"{failure.detail[0].upper()}{failure.detail[1:].replace('here', f'at {failure.tensor}')}"
            return _said(PLACE, failure.tensor, sentence, "drop out in the same places")
    return None


def _shared(evidence: Mapping[str, Any]) -> Diagnosis | None:
    axes = evidence.get("shared_axes", {})
    reference, port = axes.get("reference", {}), axes.get("port", {})
    for site in port:
        theirs, ours = set(reference.get(site, ())), set(port[site])
        if site in reference and ours - theirs:
            axis = min(ours - theirs)
            where = "the batch" if axis == 0 else f"axis {axis}"
            sentence = f"The port has one dropout mask for all of {where} at {site}, the reference one for each"
            return _said(SHARED, site, sentence, "broadcast_dims=(), or broadcast_dropout=False")
    return None


def _rates(evidence: Mapping[str, Any]) -> Diagnosis | None:
    """The site whose share of kept values is furthest from the rate."""
    rates, port, reference = (evidence.get(name, {}) for name in ("rates", "port", "reference"))
    off = {site: abs(port[site] - reference[site]) for site in rates if site in port and site in reference}
    if not off or max(off.values()) < 0.01:
        return None
    site = max(off, key=lambda name: off[name])
    if port[site] == 1.0:
        return _said(OFF, site, f"The port drops nothing at {site}", "call it in training mode")
    sentence = f"The port drops {1 - port[site]:.3f} of the values at {site}, the reference {1 - reference[site]:.3f}"
    return _said(RATE, site, sentence, f"rate={rates[site]:g}")


def _repeated(failures: Sequence[Comparison]) -> Diagnosis | None:
    for failure in failures:
        if failure.detail.startswith("the same mask with two seeds") or "have one mask in the" in failure.detail:
            sentence = f"{failure.tensor}: {failure.detail}"
            return _said(REPEATED, "dropout", sentence, "draw from a new key each time: split it, or use nnx.Rngs")
    return None


def _said(name: str, site: str, sentence: str, fix: str) -> Diagnosis:
    return Diagnosis(kind=name, module=site, sentence=sentence, fix=fix)
