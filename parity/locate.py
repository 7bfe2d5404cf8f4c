"""Where two runs first differ: in a module, between modules, in the backward pass only, in float32 only."""

import dataclasses
from collections.abc import Iterable, Sequence

from parity.capture import Trace
from parity.compare import Comparison, relative_error
from parity.tolerances import FLOAT64_RELATIVE


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


def locate(port: Trace, reference: Trace) -> Location | None:
    """The first module call, in the order in which calls end, that was given the same and returned something else.

    A call that the port did not make counts as one. If whatever differs was given something that differs already, the
    fault is in what the model does between its modules.
    """
    last_equal, first_unequal, first_error = "the start", None, 0.0
    for name, expected in reference.outputs.items():
        made = name in port.outputs
        error = relative_error(port.outputs[name], expected) if made else float("inf")
        call = name.split("[")[0]
        if error <= FLOAT64_RELATIVE:
            last_equal = call if first_unequal is None else last_equal
            continue
        given = [key for key in reference.given if key.split("[")[0] == call]
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
    results = [("logits", port.logits, reference.logits), ("loss", port.loss, reference.loss)]
    for name, got, expected in results:
        error = relative_error(got, expected)
        if error > FLOAT64_RELATIVE:
            return Location(module=MODEL, error=error, explanation=f"every module is equal, the {name} not")
    return None


def locate_gradient(comparisons: Iterable[Comparison], reference: Trace) -> Location | None:
    """With equal outputs: the failing gradient nearest to the loss, where the backward pass first goes wrong."""
    return _nearest_to_the_loss(comparisons, reference, explanation="outputs are equal, its gradient is not")


def locate_float32(
    outputs: Sequence[Comparison], parameters: Sequence[Comparison], reference: Trace
) -> Location | None:
    """With equality in float64: the first output beyond its float32 bound, or the gradient nearest to the loss."""
    for comparison in outputs:
        if not comparison.passed:
            explanation = "equal in float64, beyond its bound in float32"
            return Location(module=comparison.tensor, error=comparison.error, explanation=explanation)
    return _nearest_to_the_loss(
        parameters, reference, explanation="equal in float64, its gradient beyond its bound in float32"
    )


def _nearest_to_the_loss(comparisons: Iterable[Comparison], reference: Trace, *, explanation: str) -> Location | None:
    rank = {name.split("[")[0].split("#")[0]: i for i, name in enumerate(reference.outputs)}
    failed = [comparison for comparison in comparisons if not comparison.passed]
    if not failed:
        return None
    nearest = max(failed, key=lambda comparison: rank.get(comparison.tensor.rpartition(".")[0], -1))
    return Location(module=nearest.tensor, error=nearest.error, explanation=explanation)
