"""Where two runs first differ: in a module, between modules, in the backward pass only, in float32 only.

For the first broken rung. Where modules are run, it is looked for twice: by following the values through, and by
handing each module of the port the reference's own inputs (see follow.py).
"""

import dataclasses
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parity import probe
from parity.compare import Comparison, relative_error
from parity.diagnose import CaseBuilder
from parity.diagnose.by_rung import MODEL, diagnose
from parity.diagnose.case import Case
from parity.diagnose.diagnosis import Diagnosis
from parity.diagnose.gradients import BACKWARD_KINDS
from parity.diagnose.updates import departures
from parity.follow import follow, local_differences
from parity.locate_mode import first_in_mode
from parity.pair import Inputs
from parity.rungs import Rung
from parity.rungs.adversarial import cases, probe_inputs
from parity.runs import Runs
from parity.tolerances import FLOAT64_RELATIVE
from parity.trace import LOSS, Trace, method_of, module_of
from parity.training_modes import TITLE as TRAINING

VANISHES = 1e-3
"""A difference whose share of this reaches the model's output, or less, has vanished on the way."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Location:
    """The first difference."""

    module: str
    """The module that was given the same and returned something else; or the model itself, or a parameter."""
    error: float
    """Relative error there."""
    explanation: str = ""
    """What else is known, as a half-sentence."""
    handed: tuple[str, ...] = ()
    """Every place that differs by itself, found by handing each module the reference's inputs."""
    agree: bool | None = None
    """Whether the first of those is the same place; None if nothing was handed."""
    persists: bool | None = None
    """Whether the difference reaches what the model returns: a step; or has vanished there: a spike."""

    def __str__(self) -> str:
        details = f"{self.explanation}; " if self.explanation else ""
        return f"First module that differs: {self.module} ({details}relative error {self.error:.1e})"

    @property
    def sentences(self) -> tuple[str, ...]:
        """What else is known, for the report."""
        lines = []
        if self.agree is not None:
            how = "the same place first" if self.agree else "another place first"
            lines.append(f"Handing each module the reference's inputs finds {how}: {', '.join(self.handed) or 'none'}.")
        if self.persists is not None:
            ends = "reaches the model's output" if self.persists else "has vanished where the model returns"
            lines.append(f"The difference {ends}.")
        return tuple(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A location and, where a module's code is at fault, the value that it makes differently."""

    location: Location
    case: Case | None = None
    called: bool = True
    """Whether the port calls the module."""


def locate(runs: Runs, failed: Rung | None) -> tuple[Location | None, Any]:
    """The first difference of the first broken rung, and its diagnosis if a suspect explains it."""
    if failed is None:
        return None, None
    try:
        found = _found(runs, failed)
    except Exception as error:  # the report must come all the same: which tensor failed is known
        worst = _worst(failed)
        return (None if worst is None else _broken_off(worst.location, "search for its module", error)), None
    if found is None:
        return None, None
    try:
        diagnosis = diagnose(runs, failed, found.location.module, found.case, called=found.called)
    except Exception as error:  # a suspect's own fault must not cost the user the report
        return _broken_off(found.location, "diagnosis", error), None
    return _refined(found.location, diagnosis, runs), diagnosis


def _broken_off(location: Location, what: str, error: Exception) -> Location:
    """The location, with the word that the search or the diagnosis broke off."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    broken = f"the {what} ended in {type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})"
    explanation = "; ".join(part for part in (location.explanation, broken) if part)
    return dataclasses.replace(location, explanation=explanation)


def _refined(location: Location, diagnosis: Diagnosis | None, runs: Runs) -> Location:
    """Where the backward pass alone is at fault, the diagnosis knows the place; the location, a parameter near it."""
    if diagnosis is None or diagnosis.kind not in BACKWARD_KINDS or diagnosis.module not in runs.reference_facts:
        return location
    parameter = location.module.partition(" (batch")[0]
    if parameter not in runs.port_weights:
        return location
    explanation = f"{location.explanation}; the nearest to the loss is {parameter}'s"
    return dataclasses.replace(location, module=diagnosis.module, explanation=explanation)


def _found(runs: Runs, failed: Rung) -> Found | None:
    if failed.name in ("forward", "loss", "gradients"):
        for number, inputs in enumerate(runs.batches):
            reference, port = runs.reference("float64", number), runs.port("float64", number)
            bounds = runs.float64_bounds(number)
            found = follow_and_hand(runs, reference, port, inputs, handed=runs.handed, number=number, bounds=bounds)
            if found is not None:
                return found
        return Found(location=_beyond_outputs(runs, failed, runs.reference("float64")))
    own = {
        "adversarial": _adversarial,
        "initialisation": _initial,
        "buffers": _table,
        "dropout": _in_training,
        "modes": _in_mode,
    }
    found = own[failed.name](runs, failed) if failed.name in own else None
    return found or _worst(failed)


def _table(runs: Runs, failed: Rung) -> Found | None:
    """The first table that differs, with the value of the module that computes it where one does."""
    found = _worst(failed)
    if found is None:
        return None
    call = found.location.module
    reference, port = runs.reference("float64"), runs.port("float64")
    if call not in reference.outputs or call not in port.outputs:
        return found
    return dataclasses.replace(found, case=builder(runs, reference, port, runs.batches[0]).case(call))


def _initial(runs: Runs, failed: Rung) -> Found | None:
    """The parameter; and its module's value where that differs too, which says more: a scale taken for a bias."""
    found = _worst(failed)
    if found is None:
        return None
    path = found.location.module.rpartition(".")[0]
    reference, port = runs.reference("float64"), runs.port("float64")
    value = follow_and_hand(runs, reference, port, runs.batches[0], bounds=runs.float64_bounds(0))
    if value is None or value.location.module != runs.derived.modules.get(path, path):
        return found
    return dataclasses.replace(found, case=value.case)


def _in_training(runs: Runs, failed: Rung) -> Found | None:
    """Within runs in training mode with the same masks, where these differ."""
    masks = failed.outcome.evidence.get("masks")
    handed = [s for s in failed.outcome.sections if s.title.startswith("training mode") and s.precision == "float64"]
    if not any(s.failures for s in handed):
        return None
    inputs = runs.batches[0]
    options: dict[str, Any] = {"training": True, "masks": masks or None}
    reference, port = (run(inputs, "float64", **options) for run in (runs.run_reference, runs.run_port))
    found = follow_and_hand(runs, reference, port, inputs, bounds=runs.float64_bounds(0), masks=masks)
    if found is None:
        nearest = nearest_to_the_loss(handed[0].failures, reference, explanation="in training mode, its gradient")
        return None if nearest is None else Found(location=nearest)
    explanation = "; ".join(part for part in ("in training mode", found.location.explanation) if part)
    return dataclasses.replace(found, location=dataclasses.replace(found.location, explanation=explanation))


def _in_mode(runs: Runs, failed: Rung) -> Found | None:
    """The port's own module that the mode changes."""
    section = next((section for section in failed.outcome.sections if section.failures), None)
    if section is not None and section.title.startswith(TRAINING):
        first = section.failures[0]
        explanation = f"{section.title}, against its own step on one device: {first.tensor}, {first.detail}"
        return Found(location=Location(module="training step", error=first.error, explanation=explanation))
    found = None if section is None else first_in_mode(runs, section)
    if section is None or found is None:
        return None
    explanation = f"{section.title}, against the port's own jitted run of the whole batch"
    return Found(location=Location(module=module_of(found.call), error=found.error, explanation=explanation))


def _worst(failed: Rung) -> Found | None:
    """For rungs that compare no run of the model: the tensor, the step, the entry of a table."""
    failures = [failure for section in failed.outcome.sections for failure in section.failures]
    if not failures:
        return None
    in_order = failed.name in ("inventory", "buffers", "trajectory", "dropout", "half_width")
    first = _in_order(failed, failures) if in_order else max(failures, key=lambda c: c.error)
    return Found(
        location=Location(module=_place(failed, first), error=first.error, explanation=first.detail or failed.title)
    )


def _in_order(failed: Rung, failures: Sequence[Comparison]) -> Comparison:
    """Static facts have no size, and what comes later follows from what came before."""
    if failed.name == "trajectory":
        departed = departures(failed.outcome.evidence)
        return next((c for c in failures if departed and c.tensor == departed[0]), failures[0])
    return failures[0]


def _place(failed: Rung, first: Comparison) -> str:
    """The module or parameter out of a comparison's name: `norm: eps`, `port: norm`, `drop, port`."""
    name = first.tensor.partition(" (batch")[0]
    if failed.name == "inventory" and ": " in name:
        return name.rpartition(": ")[0]
    if failed.name == "preflight" and ": " in name:
        return name.partition(": ")[2]
    if failed.name == "dropout":
        return name.partition(", ")[0]
    if failed.name == "modes" and any(c.tensor == LOSS for c in failed.failures):
        return LOSS  # whose gradients differ with it
    return name


def _adversarial(runs: Runs, failed: Rung) -> Found | None:
    """Within the runs of the first case that fails; else the module that was probed by itself."""
    section = next(section for section in failed.outcome.sections if not section.passed)
    if section.title in (hard := cases(runs)):
        inputs = hard[section.title]
        reference, port = runs.run_reference(inputs, "float64"), runs.run_port(inputs, "float64")
        bounds = {c.tensor: c.bound for c in section.comparisons}
        found = follow_and_hand(runs, reference, port, inputs, bounds=bounds)
        if found is not None:
            explanation = "; ".join(part for part in (f"with {section.title}", found.location.explanation) if part)
            return dataclasses.replace(found, location=dataclasses.replace(found.location, explanation=explanation))
        nearest = nearest_to_the_loss(section.failures, reference, explanation=f"with {section.title}, its gradient")
        return None if nearest is None else Found(location=nearest)
    worst = max(section.failures, key=lambda c: c.error, default=None)
    if worst is None:
        return None
    module, _, kind = worst.tensor.partition(", ")
    precision = "" if section.precision == "float64" else f", in {section.precision}"
    location = Location(module=module, error=worst.error, explanation=f"by itself, given {kind}{precision}")
    return Found(location=location, case=_probed(runs, module, kind) if section.precision == "float64" else None)


def _probed(runs: Runs, module: str, kind: str) -> Case | None:
    """The case of a module that was given a probe by itself."""
    run = runs.reference("float64")
    given = probe_inputs(run.given[module])[kind]
    probes = {module: {kind: given}}
    expected = probe.probe_reference(runs, probes, "float64")[module][kind]
    got = probe.probe_port(runs, probes, probes, "float64")[module][kind]
    alone = dataclasses.replace(run, given={module: given}, given_ids={}, outputs={module: expected}, results={})
    return builder(runs, alone, dataclasses.replace(alone, outputs={module: got}), {}).case(module)


def builder(
    runs: Runs,
    reference: Trace,
    port: Trace,
    inputs: Inputs,
    *,
    masks: Mapping[str, np.ndarray] | None = None,
) -> CaseBuilder:
    """Of two runs of the same inputs, with everything that is known of the modules."""

    def run(weights: Mapping[str, np.ndarray]) -> Trace:
        return runs.run_port(inputs, "float64", weights=weights)

    return CaseBuilder(
        reference,
        port,
        facts=(runs.reference_facts, runs.port_facts),
        paths={theirs: ours for ours, theirs in runs.derived.modules.items()},
        port_weights=runs.port_weights,
        inputs=inputs,
        run=run if inputs and not masks else None,
        masks=masks,
    )


def follow_and_hand(
    runs: Runs,
    reference: Trace,
    port: Trace,
    inputs: Inputs,
    *,
    handed: Any = None,
    number: int = 0,
    bounds: Mapping[str, float] | None = None,
    masks: Mapping[str, np.ndarray] | None = None,
) -> Found | None:
    """Both ways of looking; `handed` is called with the number of the batch, and only if anything differs."""
    names = runs.comparable(reference, port)
    found = follow(port, reference, names=names, bounds=bounds)
    if found is None:
        return None
    cases_of = builder(runs, reference, port, inputs, masks=masks)
    call = cases_of.around(found.call)
    case = cases_of.case(call)
    places: tuple[str, ...] = ()
    agree = None
    if handed is not None:
        places = tuple(local_differences(handed(number), reference, cases_of, names=names, bounds=bounds))
        agree = bool(places) and _same_place(places[0], module_of(call), called=found.called)
    location = Location(
        module=module_of(call) or MODEL,
        error=found.error,
        explanation=found.explanation or _where(case, call, found.call),
        handed=places,
        agree=agree,
        persists=_persists(reference, port, found.error),
    )
    return Found(location=location, case=case, called=found.called)


def _same_place(one: str, other: str, *, called: bool) -> bool:
    """A module that is not called is the fault of one around it."""
    around = one == MODEL or other.startswith(one + ".")
    return one == (other or MODEL) or (not called and around)


def _where(case: Case | None, call: str, found: str) -> str:
    """What of the module differs: what it gives to a submodule, or a method that was found first."""
    if case is not None and case.child:
        before = [module_of(name) for name in case.inside]
        last = f"between {before[-1]}, the last that is equal, and " if before else "before "
        return f"{last}{case.child}, which is given something else"
    return f"in its method {method_of(found)}" if method_of(found) and call else ""


def _persists(reference: Trace, port: Trace, error: float) -> bool | None:
    """Whether what the model returns is off by a part of the first difference that is worth mentioning."""
    errors = [
        relative_error(port.results[name], array) if name in port.results else float("inf")
        for name, array in reference.results.items()
    ]
    if not errors:
        return None
    return max(errors) > max(FLOAT64_RELATIVE, VANISHES * min(error, 1.0))


def _beyond_outputs(runs: Runs, failed: Rung, reference: Trace) -> Location:
    """With equal outputs in float64: a gradient, or float32 alone."""
    exact = [failure for s in failed.outcome.sections if s.precision == "float64" for failure in s.failures]
    names = {ours: theirs for ours, theirs in runs.derived.modules.items()}
    if exact:
        explanation = "outputs are equal, its gradient is not" if failed.name == "gradients" else failed.title
        found = nearest_to_the_loss(exact, reference, explanation=explanation, names=names)
    else:
        failures = [failure for s in failed.outcome.sections if s.precision == "float32" for failure in s.failures]
        if failed.name == "gradients":
            explanation = "equal in float64, its gradient beyond its bound in float32"
            found = nearest_to_the_loss(failures, reference, explanation=explanation, names=names)
        else:
            explanation = "equal in float64, beyond its bound in float32"
            found = Location(module=failures[0].tensor, error=failures[0].error, explanation=explanation)
    assert found is not None, "a rung fails by a comparison that fails"
    return found


def nearest_to_the_loss(
    comparisons: Iterable[Comparison],
    reference: Trace,
    *,
    explanation: str,
    names: Mapping[str, str] | None = None,
) -> Location | None:
    """The failing parameter whose module returned last. `names`: the port's module paths -> the reference's."""
    # By its first call: a tied table is used last of all, and its gradient differs wherever its first use does.
    rank: dict[str, int] = {}
    for i, name in enumerate(reference.outputs):
        rank.setdefault(module_of(name), i)
    failed: Sequence[Comparison] = [comparison for comparison in comparisons if not comparison.passed]
    if not failed:
        return None

    def place(comparison: Comparison) -> int:
        path = comparison.tensor.partition(" (batch")[0].rpartition(".")[0]
        return rank.get((names or {}).get(path, path), -1)

    nearest = max(failed, key=place)
    return Location(module=nearest.tensor, error=nearest.error, explanation=explanation)
