"""Rung 9: every parameter's gradient, in the port's names and layouts.

A gradient that is zero in exact arithmetic, such as the key projection's bias (softmax does not see a shift that all
keys share), is rounding noise on both sides. It is judged by the scale of what was summed to it, and counted apart.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np

from parity.compare import NOTHING_COMPARED, Comparison, identical_after_rounding, norm
from parity.rungs import Outcome, Section, float32, section
from parity.rungs.forward import compare_all, label, labelled
from parity.runs import Runs, zero_among
from parity.tolerances import (
    FLOAT32,
    FLOAT64_GRADIENTS_RULE,
    FLOAT64_RELATIVE,
    GRADIENT_ENTRY_FLOOR,
    GRADIENTS_UNEQUAL_AFTER_ROUNDING,
    OF_ALL_GRADIENTS,
    ROUNDING_RULE,
    ZERO_RULE,
    gradient_floor,
    zero_noise,
)
from parity.trace import Trace

FLOAT32_GRADIENTS = dataclasses.replace(FLOAT32, also=OF_ALL_GRADIENTS)


def climb(runs: Runs) -> Outcome:
    """Float64, then float32 where float64 holds."""
    exact: list[Comparison] = []
    noise: list[Comparison] = []
    for number in range(len(runs.batches)):
        zero, summed = runs.zero_gradients(number), runs.summed(number)
        answer, port = runs.reference_gradients(number), runs.port("float64", number).gradients
        bounds = float64_bounds(answer, runs.float64_gradient_bounds(number))
        found = compare_all(_without(port, zero), _without(answer, zero), bounds=bounds)
        exact += labelled(found, runs, number)
        noise += labelled(_zeros(port, summed, zero=zero, dtype=runs.gradient_dtype(number)), runs, number)
    sections = [section("gradients", "float64", FLOAT64_GRADIENTS_RULE, exact)]
    if noise:
        sections.append(section("gradients that are zero", "float64", ZERO_RULE, noise))
    if all(s.passed for s in sections):
        sections += [_rounded(runs), *_float32(runs)]
    return Outcome(sections=tuple(sections))


def _rounded(runs: Runs) -> Section:
    identical = NOTHING_COMPARED
    for number in range(len(runs.batches)):
        answer, port = runs.reference_gradients(number), runs.port("float64", number).gradients
        summed = runs.summed(number)
        for name in answer.keys() - runs.zero_gradients(number):
            size = np.maximum(np.abs(answer[name]), np.abs(port[name]))
            kept = size > _noise_of_entries(answer[name], summed[name])
            identical += identical_after_rounding(port[name][kept], answer[name][kept])
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
            rule=FLOAT32_GRADIENTS,
            floors=floors(exact, "float32"),
            again=lambda draw, number=number: runs.reference_errors(number, draw)[1],  # type: ignore[misc]
            redrawn=runs.redrawn,
        )
        noise = list(labelled(_zeros(port, runs.summed(number), zero=zero, dtype=np.float32), runs, number))
        if noise:
            yield section("gradients that are zero", "float32", ZERO_RULE, noise)


def compare_traces(
    runs: Runs, reference: Trace, port: Trace, *, relative: float = FLOAT64_RELATIVE
) -> Iterator[Comparison]:
    """Float64 gradients of any two runs; those that are zero in exact arithmetic by the noise they may be."""
    answer, summed = runs.gradients_in_port_layout(reference), runs.summed_in_port_layout(reference)
    zero = zero_among(answer, summed)
    bounds = float64_bounds(answer, dict.fromkeys(answer, relative))
    yield from compare_all(_without(port.gradients, zero), _without(answer, zero), bounds=bounds)
    yield from _zeros(port.gradients, summed, zero=zero, dtype=np.float64)


def floors(gradients: Mapping[str, np.ndarray], precision: str) -> dict[str, float]:
    """Relative error of each that the rounding of all of them together may be."""
    own = {name: norm(gradient) for name, gradient in gradients.items()}
    together = math.sqrt(sum(size * size for size in own.values()))
    return {name: gradient_floor(size, together, precision) for name, size in own.items()}


def float64_bounds(gradients: Mapping[str, np.ndarray], bounds: Mapping[str, float]) -> dict[str, float]:
    """The bounds on float64 gradients, loosened for those that are small beside the others."""
    least = floors(gradients, "float64")
    return {name: max(bounds.get(name, FLOAT64_RELATIVE), floor) for name, floor in least.items()}


def _noise_of_entries(gradient: np.ndarray, summed: np.ndarray) -> np.ndarray:
    """What an entry must exceed to be more than rounding.

    Entries may be zero in exact arithmetic too, as of keys in a bias that queries and values share: of a bias they are
    judged by what was summed to each entry, of anything else by all gradients together.
    """
    small = GRADIENT_ENTRY_FLOOR * norm(gradient) / math.sqrt(gradient.size)
    return np.maximum(zero_noise(1.0, np.float64) * summed, small)


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
