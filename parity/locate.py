"""Where two runs first differ: in a module, between modules, in the backward pass only, in float32 only."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from parity.compare import Comparison, relative_error
from parity.rungs import Rung
from parity.runs import Runs
from parity.tolerances import FLOAT64_RELATIVE
from parity.trace import Trace, call_of, module_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Location:
    """The first difference."""

    module: str
    """The module that was given the same and returned something else; or the model itself, or a parameter."""
    error: float
    """Relative error there."""
    explanation: str = ""
    """What else is known, as a half-sentence."""

    def __str__(self) -> str:
        details = f"{self.explanation}; " if self.explanation else ""
        return f"First module that differs: {self.module} ({details}relative error {self.error:.1e})"


MODEL = "the model itself"


def locate(runs: Runs, failed: Rung | None) -> tuple[Location | None, Any]:
    """The first difference of the first broken rung, and its diagnosis."""
    if failed is None:
        return None, None
    if failed.name in ("forward", "loss", "gradients"):
        for number in range(len(runs.batches)):
            port, reference = runs.port("float64", number), runs.reference("float64", number)
            found = follow(port, reference, names=runs.comparable(reference, port))
            if found is not None:
                return found, None
        exact = [s for s in failed.outcome.sections if s.precision == "float64"]
        if any(s.failures for s in exact):
            failures = [failure for s in exact for failure in s.failures]
            return _nearest_to_the_loss(failures, reference, explanation="outputs are equal, its gradient is not"), None
        return _in_float32(failed, reference), None
    worst = max(failed.failures, key=lambda c: c.error)
    return Location(module=worst.tensor, error=worst.error, explanation=worst.detail or failed.title), None


def follow(port: Trace, reference: Trace, *, names: frozenset[str]) -> Location | None:
    """The first module call, in the order in which calls end, that was given the same and returned something else.

    A call that the port did not make counts as one. If whatever differs was given something that differs already, the
    fault is in what the model does between its modules.
    """
    last_equal, first_unequal, first_error = "the start", None, 0.0
    for name, expected in reference.outputs.items():
        if name not in names:
            continue
        made = name in port.outputs
        error = relative_error(port.outputs[name], expected) if made else float("inf")
        call = call_of(name)
        if error <= FLOAT64_RELATIVE:
            last_equal = call if first_unequal is None else last_equal
            continue
        given = [key for key in reference.given if call_of(key) == call]
        if not made or all(
            key in port.given and relative_error(port.given[key], reference.given[key]) <= FLOAT64_RELATIVE
            for key in given
        ):
            return Location(module=call, error=error)
        if first_unequal is None:
            first_unequal, first_error = call, error
    if first_unequal is not None:
        between = f"between {last_equal}, the last that is equal, and {first_unequal}, which is given something else"
        return Location(module=MODEL, error=first_error, explanation=between)
    for name, expected in {**reference.results, "loss": reference.loss}.items():
        got = port.everything.get(name)
        error = float("inf") if got is None else relative_error(got, expected)
        if error > FLOAT64_RELATIVE:
            return Location(module=MODEL, error=error, explanation=f"every module is equal, its {name} not")
    return None


def _in_float32(failed: Rung, reference: Trace) -> Location | None:
    """With equality in float64: the first output beyond its float32 bound, or the gradient nearest to the loss."""
    failures = [failure for s in failed.outcome.sections if s.precision == "float32" for failure in s.failures]
    if failed.name == "gradients":
        explanation = "equal in float64, its gradient beyond its bound in float32"
        return _nearest_to_the_loss(failures, reference, explanation=explanation)
    first = failures[0]
    return Location(
        module=first.tensor, error=first.error, explanation="equal in float64, beyond its bound in float32"
    )


def _nearest_to_the_loss(comparisons: Iterable[Comparison], reference: Trace, *, explanation: str) -> Location | None:
    rank = {module_of(name): i for i, name in enumerate(reference.outputs)}
    failed = [comparison for comparison in comparisons if not comparison.passed]
    if not failed:
        return None
    nearest = max(failed, key=lambda comparison: rank.get(comparison.tensor.rpartition(".")[0], -1))
    return Location(module=nearest.tensor, error=nearest.error, explanation=explanation)
