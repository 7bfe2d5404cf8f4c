"""Rung 6: what every module returns, and what the model returns."""

from collections.abc import Iterator, Mapping

import numpy as np

from parity.compare import NOTHING_COMPARED, Comparison, identical_after_rounding, relative_error
from parity.rungs import Outcome, Section, float32, section
from parity.runs import Runs
from parity.tolerances import (
    FLOAT64_RELATIVE,
    FLOAT64_RULE,
    ROUNDING_RULE,
    UNITS_AFTER_ROUNDING,
    allowed_unequal,
)


def climb(runs: Runs) -> Outcome:
    """Float64 first. Who computes something else has no float32 error to speak of: then float32 is not compared."""
    exact = [*_float64(runs)]
    sections = [section("modules and results", "float64", FLOAT64_RULE, exact), _rounded(runs)]
    notes = []
    for number in range(len(runs.batches)):
        ends = runs.float64_ends(number)
        if ends is not None:
            notes.append(f"float64 ends at {ends}: from there on the float32 rule judges")
        notes += _not_captured(runs, number)
    if all(comparison.passed for comparison in exact):
        sections += _float32(runs)
    if runs.matched_by_position:
        calls = ", ".join(sorted(runs.matched_by_position))
        notes.append(f"keys differ, matched by position: {calls}")
    if runs.uncompared:
        notes.append(f"modules of one side only, not compared: {', '.join(sorted(runs.uncompared))}")
    return Outcome(sections=tuple(sections), notes=tuple(dict.fromkeys(notes)))


def _not_captured(runs: Runs, number: int) -> Iterator[str]:
    """Modules of either side, those with the same reason on one line."""
    reasons: dict[str, list[str]] = {}
    for trace in (runs.port("float64", number), runs.reference("float64", number)):
        for name, why in trace.not_captured.items():
            reasons.setdefault(why, []).append(name)
    yield from (f"not captured: {', '.join(dict.fromkeys(names))} ({why})" for why, names in reasons.items())


def _float64(runs: Runs) -> Iterator[Comparison]:
    for number in range(len(runs.batches)):
        reference, port = runs.reference("float64", number), runs.port("float64", number)
        names = runs.comparable(reference, port)
        bounds = runs.float64_bounds(number)
        expected = {name: array for name, array in reference.outputs.items() if name in names} | reference.results
        got = {name: array for name, array in port.outputs.items() if name in names} | port.results
        yield from labelled(compare_all(got, expected, bounds=bounds), runs, number)


def _rounded(runs: Runs) -> Section:
    identical = NOTHING_COMPARED
    ends = False
    for number in range(len(runs.batches)):
        reference, port = runs.reference("float64", number), runs.port("float64", number)
        ends = ends or runs.float64_ends(number) is not None
        for name, array in reference.results.items():
            got = port.results.get(name, np.zeros(0))
            identical += identical_after_rounding(got, array)
    runs.results_identical = identical
    share, units = allowed_unequal(identical.count), UNITS_AFTER_ROUNDING
    if ends:  # float32 values to begin with
        share, units = identical.count, 2**31
    return section(
        "results rounded to float32",
        "float64",
        ROUNDING_RULE,
        [
            Comparison(tensor="how many differ", error=identical.unequal, bound=share, detail=str(identical)),
            Comparison(tensor="units apart", error=identical.max_units, bound=units),
        ],
    )


def _float32(runs: Runs) -> Iterator[Section]:
    for number in range(len(runs.batches)):
        exact = runs.reference("float64", number)
        names = runs.comparable(exact, runs.port("float64", number)) | exact.results.keys()
        ours = runs.errors(runs.port("float32", number), exact)
        theirs, _ = runs.reference_errors(number)
        yield float32.judged(
            "modules and results" + label(runs, number),
            {name: error for name, error in ours.items() if name in names},
            {name: error for name, error in theirs.items() if name in names},
            again=lambda draw, number=number: runs.reference_errors(number, draw)[0],  # type: ignore[misc]
            redrawn=runs.redrawn,
        )


def compare_all(
    got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], *, bounds: Mapping[str, float] | None = None
) -> Iterator[Comparison]:
    """Each tensor by name, in the order of `expected`; one that is on one side only is infinitely far away."""
    for name in [*expected, *(name for name in got if name not in expected)]:
        both = name in got and name in expected
        error = relative_error(got[name], expected[name]) if both else float("inf")
        detail = "" if both else f"only the {'port' if name in got else 'reference'} has it"
        bound = (bounds or {}).get(name, FLOAT64_RELATIVE)
        yield Comparison(tensor=name, error=error, bound=bound, detail=detail)


def label(runs: Runs, number: int) -> str:
    """Which batch, where there are several."""
    return f" (batch {number + 1})" if len(runs.batches) > 1 else ""


def labelled(comparisons: Iterator[Comparison], runs: Runs, number: int) -> Iterator[Comparison]:
    """The same, with the batch behind the tensor's name."""
    import dataclasses

    for comparison in comparisons:
        yield dataclasses.replace(comparison, tensor=comparison.tensor + label(runs, number))
