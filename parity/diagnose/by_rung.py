"""Which suspects are asked, by the rung that broke."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from parity.diagnose.backward import explain_backward
from parity.diagnose.between import not_called
from parity.diagnose.case import Case
from parity.diagnose.clipping import explain_clipping
from parity.diagnose.decoding import explain_decoding
from parity.diagnose.diagnosis import Diagnosis
from parity.diagnose.dropout import explain_dropout
from parity.diagnose.environment import explain_buffers, explain_modes, explain_preflight, explain_weights
from parity.diagnose.gradients import BACKWARD, REVERSED, SCALED, STOPPED, explain_gradients
from parity.diagnose.initial import explain_initialisation
from parity.diagnose.loss import explain_loss
from parity.diagnose.narrow import explain_half_width, explain_narrow
from parity.diagnose.optimizer import explain_optimizer
from parity.diagnose.schedule import explain_schedule
from parity.diagnose.settings import explain_inventory
from parity.diagnose.suspects import REGISTRY
from parity.diagnose.updates import explain_buffers_after, explain_trajectory
from parity.rungs import Rung
from parity.rungs.adversarial import cases
from parity.runs import Runs

MODEL = "the model itself"
"""What a location calls the model."""

BY_EVIDENCE: Mapping[str, tuple[Callable[[Mapping[str, Any]], Diagnosis | None], tuple[str, ...]]] = {
    "initialisation": (explain_initialisation, ("parameter", "shape", "reference", "port")),
    "clipping": (explain_clipping, ("gradients", "max_norm", "reference", "port")),
    "optimizer": (explain_optimizer, ("gradients", "weights", "reference", "port")),
    "schedule": (explain_schedule, ("steps", "reference", "port")),
    "trajectory": (explain_trajectory, ("unchanged",)),
    "decoding": (explain_decoding, ("reference", "port")),
}
"""Rung -> who explains it, and the evidence that takes."""

BY_COMPARISONS: Mapping[str, Callable[[Rung], Diagnosis | None]] = {
    "preflight": explain_preflight,
    "weights": explain_weights,
    "modes": explain_modes,
}
"""Rung -> who explains it by what failed."""


def diagnose(runs: Runs, failed: Rung, place: str, case: Case | None, *, called: bool = True) -> Diagnosis | None:
    """What the first difference is; None if nothing explains it.

    `place`: the location's module or tensor; `called`: whether the port calls the module at all.
    """
    if not called:
        facts = runs.reference_facts.get(place)
        return not_called(place, facts.type if facts else "")
    found = None if case is None else diagnose_case(case, (*runs.pair.suspects, *REGISTRY))
    if case is not None and (found is not None or failed.name not in ("initialisation", "buffers")):
        return found
    return _without_case(runs, failed, place)


def _without_case(runs: Runs, failed: Rung, place: str) -> Diagnosis | None:
    """Where no module makes a value differently."""
    if failed.name in BY_COMPARISONS:
        return BY_COMPARISONS[failed.name](failed)
    if failed.name in BY_EVIDENCE:
        explain, needed = BY_EVIDENCE[failed.name]
        evidence = failed.outcome.evidence
        return explain(evidence) if all(name in evidence for name in needed) else None
    return _by_runs(runs, failed, place)


def _by_runs(runs: Runs, failed: Rung, place: str) -> Diagnosis | None:
    """Where more is asked of the runs than the rung found."""
    own: Mapping[str, Callable[[], Diagnosis | None]] = {
        "inventory": lambda: explain_inventory(failed.failures, _shapes(runs)),
        "buffers": lambda: explain_buffers(failed, lambda name: _tables(runs, failed, name)),
        "dropout": lambda: (
            explain_dropout(failed.outcome.evidence, failed.failures)
            or explain_buffers_after(failed.outcome.evidence.get("buffers", {}))
        ),
        "loss": lambda: _loss(runs),
        "half_width": lambda: _half_width(failed, place),
    }
    if failed.name in own:
        return own[failed.name]()
    if failed.name == "adversarial" and place == MODEL:
        return _hard_loss(runs, failed)
    if any(s.precision == "float32" for s in failed.outcome.sections if s.failures):
        return explain_narrow(runs, place)
    return _gradients(runs, failed, place) if failed.name in ("gradients", "adversarial") else None


def _shapes(runs: Runs) -> dict[str, tuple[int, ...]]:
    """Of every tensor of either side."""
    return {
        f"{path}.{name}" if path else name: tensor.shape
        for facts in (runs.reference_facts, runs.port_facts)
        for path, module in facts.items()
        for name, tensor in module.tensors.items()
    }


def _tables(runs: Runs, failed: Rung, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The reference's and the port's: as built, or as a module returned it."""
    built: Mapping[str, tuple[np.ndarray, np.ndarray]] = failed.outcome.evidence.get("tables", {})
    if name in built:
        return built[name]
    reference, port = runs.reference("float64").outputs, runs.port("float64").outputs
    return (reference[name], port[name]) if name in reference and name in port else None


def diagnose_case(case: Case, suspects: Sequence[Any] = REGISTRY) -> Diagnosis | None:
    """The first suspect's explanation."""
    for suspect in suspects:
        found: Diagnosis | None = suspect(case)
        if found is not None:
            return found
    return None


def _half_width(failed: Rung, place: str) -> Diagnosis | None:
    found = next((failure for failure in failed.failures if failure.tensor == place), None)
    return None if found is None else explain_half_width(place, found.error, found.reference)


def _hard_loss(runs: Runs, failed: Rung) -> Diagnosis | None:
    """The loss of the hard input that fails, together with that of the first batch."""
    section = next(section for section in failed.outcome.sections if section.failures)
    every = [runs.batches[0], cases(runs)[section.title]]
    traces = [[run(inputs, "float64") for inputs in every] for run in (runs.run_reference, runs.run_port)]
    outputs = [next(iter(trace.results.values())) for trace in traces[0]]
    losses = [np.array([float(trace.loss) for trace in side]) for side in traces]
    finite = np.isfinite(losses[0]) & np.isfinite(losses[1])
    kept = [i for i, output in enumerate(outputs) if output.ndim >= 2 and finite[i]]
    if not kept or all(losses[0][i] == losses[1][i] for i in kept):
        return None
    return explain_loss([outputs[i] for i in kept], [every[i] for i in kept], *(side[kept] for side in losses))


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
    """Of the first batch, or the hard input, whose gradients differ."""
    section = next(section for section in failed.outcome.sections if section.failures)
    number = re.search(r" \(batch (\d+)\)$", nearest)
    batch = int(number[1]) - 1 if number else 0
    names = [re.sub(r" \(batch \d+\)$", "", failure.tensor) for failure in section.failures]
    if failed.name == "adversarial":
        inputs = cases(runs)[section.title]
        reference, port = runs.run_reference(inputs, "float64"), runs.run_port(inputs, "float64")
    else:
        inputs = runs.batches[batch]
        reference, port = runs.reference("float64", batch), runs.port("float64", batch)
    answer, got = runs.gradients_in_port_layout(reference), port.gradients
    names = [name for name in dict.fromkeys(names) if name in answer]
    name = re.sub(r" \(batch \d+\)$", "", nearest)
    simple = explain_gradients(names, answer, got, inputs, nearest=name)
    if simple is not None and simple.kind not in (STOPPED, SCALED, REVERSED, BACKWARD):
        return simple
    return explain_backward(runs, names, got, reference, inputs, nearest=name) or simple
