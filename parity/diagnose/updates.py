"""What a step leaves behind: running statistics, parameters that do not move, trajectories that depart."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.diagnose.diagnosis import Diagnosis, distance, kind
from parity.diagnose.engine import MATCH
from parity.diagnose.settings import MOMENTUM

NOT_UPDATED = kind("step changes nothing", "an update that is dropped: a module changed inside of jit and not returned")
STATISTICS = kind("running statistics not updated", "batch statistics that the port does not keep")
VARIANCE = kind("running variance biased", "torch keeps the unbiased variance of a batch, Flax the biased one")
EARLY = kind("first step differs", "training departs in its very first step")


def explain_statistics(old: np.ndarray, reference: np.ndarray, port: np.ndarray) -> Diagnosis | None:
    """Running statistics before a step in training mode, and after it on both sides: old + share · (batch - old)."""
    moved, ours = (np.asarray(new, np.float64) - old for new in (reference, port))
    if not moved.any():
        return None
    if not ours.any():
        return Diagnosis(
            kind=STATISTICS,
            module="running statistics",
            sentence="The port's running statistics stay as they are",
            fix="call the norm in training mode, and return the updated module from jit",
        )
    ratio = float(moved.ravel() @ ours.ravel() / (moved.ravel() @ moved.ravel()))
    if distance(ours, ratio * moved) > MATCH * 1e3:
        return None
    # share_port / share_reference = (1 - m) / m tells that the two shares add up to 1.
    share = 1.0 / (1.0 + ratio)
    sentence = f"The port's running statistics move {ratio:.6g} times as far as the reference's"
    return Diagnosis(
        kind=MOMENTUM,
        module="running statistics",
        sentence=sentence,
        fix=f"momentum={1.0 - share:.6g} in Flax, where it is the share of the old, is torch's {share:.6g}",
    )


def explain_trajectory(evidence: Mapping[str, Any]) -> Diagnosis | None:
    """`unchanged`: {side: steps after which nothing had changed}; `first` step that departs."""
    unchanged = evidence.get("unchanged", {})
    lost = [n for n in unchanged.get("port", ()) if n not in unchanged.get("reference", ())]
    if lost:
        return Diagnosis(
            kind=NOT_UPDATED,
            module="training step",
            sentence=f"The port's parameters are the same after step {lost[0]}",
            fix="return the updated state from the jitted step: what changes inside of jit alone is lost",
        )
    if evidence.get("first") == 1 and evidence.get("departure") == "jump":
        name = _furthest(evidence)
        return Diagnosis(
            kind=EARLY,
            module=name or "training step",
            sentence=f"Training departs in its first step, furthest in {name}"
            if name
            else "Training departs in its first step",
            fix="compare what the step is made of: loss, clipping, optimizer and schedule, each a rung of its own",
        )
    return None


def _furthest(evidence: Mapping[str, Any]) -> str:
    distances = {n: d[0] for n, d in evidence.get("distances", {}).items() if d}
    return max(distances, key=lambda n: distances[n]) if distances else ""
