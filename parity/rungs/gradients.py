"""Rung 9: every parameter's gradient, in the port's names and layouts.

A gradient that is zero in exact arithmetic, such as the key projection's bias (softmax does not see a shift that all
keys share), is rounding noise on both sides. It is judged by the scale of what was summed to it, and counted apart.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from parity.compare import NOTHING_COMPARED, Comparison, identical_after_rounding, norm
from parity.rungs import Outcome, Section, float32, section
from parity.rungs.forward import compare_all, label, labelled
from parity.runs import Runs, zero_among
from parity.tolerances import (
    FLOAT64_RULE,
    GRADIENTS_UNEQUAL_AFTER_ROUNDING,
    ROUNDING_RULE,
    ZERO_RULE,
    zero_noise,
)
from parity.trace import Trace


def climb(runs: Runs) -> Outcome:
    """Float64, then float32 where float64 holds."""
    exact: list[Comparison] = []
    noise: list[Comparison] = []
    for number in range(len(runs.batches)):
        zero, summed = runs.zero_gradients(number), runs.summed(number)
        answer, port = runs.reference_gradients(number), runs.port("float64", number).gradients
        bounds = runs.float64_gradient_bounds(number)
        found = compare_all(_without(port, zero), _without(answer, zero), bounds=bounds)
        exact += labelled(found, runs, number)
        noise += labelled(_zeros(port, summed, zero=zero, dtype=runs.gradient_dtype(number)), runs, number)
    sections = [section("gradients", "float64", FLOAT64_RULE, exact)]
    if noise:
        sections.append(section("gradients that are zero", "float64", ZERO_RULE, noise))
    if all(s.passed for s in sections):
        sections += [_rounded(runs), *_float32(runs)]
    return Outcome(sections=tuple(sections))


def _rounded(runs: Runs) -> Section:
    identical = NOTHING_COMPARED
    for number in range(len(runs.batches)):
        answer, port = runs.reference_gradients(number), runs.port("float64", number).gradients
        for name in answer.keys() - runs.zero_gradients(number):
            identical += identical_after_rounding(port[name], answer[name])
    runs.gradients_identical = identical
    bound = GRADIENTS_UNEQUAL_AFTER_ROUNDING
    if any(runs.float64_ends(number) is not None for number in range(len(runs.batches))):
        bound = 1.0  # float32 values to begin with
    share = Comparison(tensor="share that differs", error=1.0 - identical.share, bound=bound, detail=str(identical))
    return section("gradients rounded to float32", "float64", ROUNDING_RULE, [share])


def _float32(runs: Runs) -> Iterator[Section]:
    for number in range(len(runs.batches)):
        zero, exact = runs.zero_gradients(number), runs.reference_gradients(number)
        port = runs.port("float32", number).gradients
        yield float32.judged(
            "gradients" + label(runs, number),
            gradient_errors(port, exact, zero),
            runs.reference_errors(number)[1],
            again=lambda draw, number=number: runs.reference_errors(number, draw)[1],  # type: ignore[misc]
            redrawn=runs.redrawn,
        )
        noise = list(labelled(_zeros(port, runs.summed(number), zero=zero, dtype=np.float32), runs, number))
        if noise:
            yield section("gradients that are zero", "float32", ZERO_RULE, noise)


def compare_traces(runs: Runs, reference: Trace, port: Trace) -> Iterator[Comparison]:
    """Float64 gradients of any two runs; those that are zero in exact arithmetic by the noise they may be."""
    answer, summed = runs.gradients_in_port_layout(reference), runs.summed_in_port_layout(reference)
    zero = zero_among(answer, summed)
    yield from compare_all(_without(port.gradients, zero), _without(answer, zero))
    yield from _zeros(port.gradients, summed, zero=zero, dtype=np.float64)


def gradient_errors(
    run: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray], zero: frozenset[str]
) -> dict[str, float]:
    """Of those that are not zero."""
    found = compare_all(_without(run, zero), _without(exact, zero))
    return {comparison.tensor: comparison.error for comparison in found}


def _without(tensors: Mapping[str, np.ndarray], names: frozenset[str]) -> dict[str, np.ndarray]:
    return {name: array for name, array in tensors.items() if name not in names}


def _zeros(
    port: Mapping[str, np.ndarray], summed: Mapping[str, np.ndarray], *, zero: frozenset[str], dtype: type
) -> Iterator[Comparison]:
    """The port's must be noise too, measured by what was summed."""
    for name in sorted(zero):
        error = norm(port[name]) if np.isfinite(port[name]).all() else float("inf")
        yield Comparison(tensor=name, error=error, bound=zero_noise(norm(summed[name]), dtype))
