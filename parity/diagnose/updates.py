"""What a step leaves behind: running statistics, parameters that do not move, trajectories that depart."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.diagnose.diagnosis import Diagnosis, distance, kind
from parity.diagnose.engine import MATCH
from parity.diagnose.settings import MOMENTUM

NOT_UPDATED = kind("step changes nothing", "an update that is dropped: a module changed inside of jit and not returned")
PARAMETER_STILL = kind("parameter not updated", "a parameter that the port's training does not change")
STATISTICS = kind("running statistics not updated", "batch statistics that the port does not keep")
VARIANCE = kind("running variance biased", "torch keeps the unbiased variance of a batch, Flax the biased one")
EARLY = kind("first step differs", "training departs in its very first step")


def explain_statistics(
    old: np.ndarray, reference: np.ndarray, port: np.ndarray, *, name: str = "", count: float = np.nan
) -> Diagnosis | None:
    """Running statistics before a step in training mode, and after it on both sides: old + share · (batch - old).

    `count`: values of a channel in the batch.
    """
    name = name or "running statistics"
    moved, ours = reference - old, port - old
    if not moved.any():
        return None
    if not ours.any():
        fix = "call the norm in training mode, and return the updated module from jit"
        return Diagnosis(kind=STATISTICS, module=name, sentence=f"The port's {name} stays as it is", fix=fix)
    ratio = float(moved.ravel() @ ours.ravel() / (moved.ravel() @ moved.ravel()))
    if distance(ours, ratio * moved) <= MATCH * 1e3:
        # share_port / share_reference = (1 - m) / m tells that the two shares add up to 1.
        share = 1.0 / (1.0 + ratio)
        sentence = f"The port's {name} moves {ratio:.6g} times as far as the reference's"
        fix = f"momentum={1.0 - share:.6g} in Flax, where it is the share of the old, is torch's {share:.6g}"
        return Diagnosis(kind=MOMENTUM, module=name, sentence=sentence, fix=fix)
    if np.isfinite(count) and count > 1 and "var" in name:
        # What both add to a multiple of the old: in proportion n / (n - 1), whatever the momentum.
        design = np.stack([old.ravel(), reference.ravel()])
        (kept, share), *_ = np.linalg.lstsq(design.T, port.ravel(), rcond=None)
        fits = distance(port.ravel(), kept * old.ravel() + share * reference.ravel()) <= MATCH * 1e3
        if fits and min(abs(share - r) for r in ((count - 1) / count, count / (count - 1))) < 1e-6:
            sentence = f"The port's {name} takes the variance of a batch times {share:.6g}"
            fix = f"multiply the batch's variance by n / (n - 1), n = {count:g}, or by its inverse"
            return Diagnosis(kind=VARIANCE, module=name, sentence=sentence, fix=fix)
    return None


def explain_buffers_after(buffers: Mapping[str, Mapping[str, Any]]) -> Diagnosis | None:
    """`old`, and the `reference`'s and the `port`'s after a step in training mode, by name; `count` as above."""
    for name, values in buffers.items():
        arrays = [np.asarray(values[key], np.float64) for key in ("old", "reference", "port")]
        if len({array.shape for array in arrays}) == 1 and not np.allclose(arrays[1], arrays[2], rtol=1e-10, atol=0.0):
            found = explain_statistics(*arrays, name=name, count=float(values.get("count", np.nan)))
            if found is not None:
                return found
    return None


def explain_trajectory(evidence: Mapping[str, Any]) -> Diagnosis | None:
    """`unchanged`, `still`, `distances` and `bounds` of parameters, `first` step that departs, and `departure`."""
    unchanged = evidence.get("unchanged", {})
    lost = [n for n in unchanged.get("port", ()) if n not in unchanged.get("reference", ())]
    if lost:
        sentence = f"The port's parameters are the same after step {lost[0]}"
        fix = "return the updated state from the jitted step: what changes inside of jit alone is lost"
        return Diagnosis(kind=NOT_UPDATED, module="training step", sentence=sentence, fix=fix)
    departed = departures(evidence)
    still = [name for name in departed if name in evidence.get("still", ())]
    if still:
        more = f" (and {len(still) - 1} more)" if len(still) > 1 else ""
        sentence = f"The port's {still[0]}{more} never moves, the reference's does"
        fix = "give it to the optimizer, and return it from the step"
        return Diagnosis(kind=PARAMETER_STILL, module=still[0], sentence=sentence, fix=fix)
    if departed and evidence.get("first") == 1 and evidence.get("departure") == "jump":
        sentence = f"Training departs in its first step, furthest in {departed[0]}"
        fix = "compare what the step is made of: loss, clipping, optimizer and schedule, each a rung of its own"
        return Diagnosis(kind=EARLY, module=departed[0], sentence=sentence, fix=fix)
    return None


def departures(evidence: Mapping[str, Any]) -> list[str]:
    """Parameters beyond their bound after the first step in which any is, the furthest first."""
    distances, bounds = evidence.get("distances", {}), evidence.get("bounds", {})
    beyond: dict[str, tuple[int, float]] = {}
    for name, steps in distances.items():
        shares = [
            d / b if b > 0 else float(d > 0) * np.inf for d, b in zip(steps, bounds.get(name, steps), strict=True)
        ]
        at = next((i for i, share in enumerate(shares) if not share <= 1.0), None)
        if at is not None:
            beyond[name] = (at, shares[at])
    first = min((at for at, _ in beyond.values()), default=0)
    return sorted((n for n, (at, _) in beyond.items() if at == first), key=lambda n: -beyond[n][1])
