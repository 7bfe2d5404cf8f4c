"""Which suspects are asked, by the rung that broke."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from parity.diagnose.between import not_called
from parity.diagnose.case import Case
from parity.diagnose.clipping import explain_clipping
from parity.diagnose.decoding import explain_decoding
from parity.diagnose.diagnosis import Diagnosis
from parity.diagnose.dropout import explain_dropout
from parity.diagnose.gradients import explain_gradients
from parity.diagnose.initial import explain_initialisation
from parity.diagnose.loss import explain_loss
from parity.diagnose.narrow import explain_narrow
from parity.diagnose.optimizer import explain_optimizer
from parity.diagnose.schedule import explain_schedule
from parity.diagnose.settings import explain_inventory
from parity.diagnose.suspects import REGISTRY
from parity.diagnose.updates import explain_trajectory
from parity.rungs import Rung
from parity.runs import Runs

BY_EVIDENCE: Mapping[str, tuple[Callable[[Mapping[str, Any]], Diagnosis | None], tuple[str, ...]]] = {
    "initialisation": (explain_initialisation, ("parameter", "shape", "reference", "port")),
    "clipping": (explain_clipping, ("gradients", "max_norm", "reference", "port")),
    "optimizer": (explain_optimizer, ("gradients", "weights", "reference", "port")),
    "schedule": (explain_schedule, ("steps", "reference", "port")),
    "trajectory": (explain_trajectory, ("unchanged",)),
    "decoding": (explain_decoding, ("reference", "port")),
    "dropout": (explain_dropout, ("site",)),
}
"""Rung -> who explains it, and the evidence that takes."""


def diagnose(runs: Runs, failed: Rung, place: str, case: Case | None, *, called: bool = True) -> Diagnosis | None:
    """What the first difference is; None if nothing explains it.

    `place`: the location's module or tensor; `called`: whether the port calls the module at all.
    """
    if not called:
        facts = runs.reference_facts.get(place)
        return not_called(place, facts.type if facts else "")
    if case is not None:
        return diagnose_case(case, (*runs.pair.suspects, *REGISTRY))
    return _without_case(runs, failed, place)


def _without_case(runs: Runs, failed: Rung, place: str) -> Diagnosis | None:
    """Where no module makes a value differently."""
    if failed.name == "inventory":
        return explain_inventory(failed.failures)
    if failed.name in BY_EVIDENCE:
        explain, needed = BY_EVIDENCE[failed.name]
        evidence = failed.outcome.evidence
        return explain(evidence) if all(name in evidence for name in needed) else None
    if failed.name == "loss":
        return _loss(runs)
    if any(s.precision == "float32" for s in failed.outcome.sections if s.failures):
        return explain_narrow(runs, place)
    return _gradients(runs, failed, place) if failed.name in ("gradients", "adversarial") else None


def diagnose_case(case: Case, suspects: Sequence[Any] = REGISTRY) -> Diagnosis | None:
    """The first suspect's explanation."""
    for suspect in suspects:
        found: Diagnosis | None = suspect(case)
        if found is not None:
            return found
    return None


def _loss(runs: Runs) -> Diagnosis | None:
    """Of every batch at once: one number alone is soon explained."""
    batches = range(len(runs.batches))
    reference, port = ([run("float64", n) for n in batches] for run in (runs.reference, runs.port))
    outputs = [next(iter(trace.results.values()), None) for trace in reference]
    if any(array is None or array.ndim < 2 for array in outputs):
        return None
    losses = [np.array([float(trace.loss) for trace in side]) for side in (reference, port)]
    return explain_loss([array for array in outputs if array is not None], runs.batches, *losses)


def _gradients(runs: Runs, failed: Rung, nearest: str) -> Diagnosis | None:
    """Of the first batch whose gradients differ."""
    number = re.search(r" \(batch (\d+)\)$", nearest)
    batch = int(number[1]) - 1 if number else 0
    failures = [re.sub(r" \(batch \d+\)$", "", failure.tensor) for failure in failed.failures]
    inputs = runs.batches[batch]
    answer, port = runs.reference_gradients(batch), runs.port("float64", batch).gradients
    return explain_gradients(
        list(dict.fromkeys(failures)), answer, port, inputs, nearest=re.sub(r" \(batch \d+\)$", "", nearest)
    )
