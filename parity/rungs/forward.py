"""Every named module output, the logits and the loss."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from parity.capture import Trace
from parity.compare import Comparison, relative_error
from parity.tolerances import FLOAT32_FLOOR, FLOAT32_RATIO, FLOAT64_RELATIVE

POOLED = "all of them, pooled"


def outputs(port: Trace, reference: Trace) -> Iterator[Comparison]:
    """Float64 outputs of every module call. A call that only one side made is infinitely far from the other."""
    yield from compare_all(port.outputs, reference.outputs, bound=FLOAT64_RELATIVE)


def results(port: Trace, reference: Trace) -> Iterator[Comparison]:
    """Float64 logits and loss."""
    yield from compare_all(
        {"logits": port.logits, "loss": port.loss},
        {"logits": reference.logits, "loss": reference.loss},
        bound=FLOAT64_RELATIVE,
    )


def compare_all(
    got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], *, bound: float
) -> Iterator[Comparison]:
    """Each tensor by name, in the order of `expected`; one that is on one side only is infinitely far away."""
    for name in [*expected, *(name for name in got if name not in expected)]:
        both = name in got and name in expected
        error = relative_error(got[name], expected[name]) if both else math.inf
        yield Comparison(tensor=name, error=error, bound=bound)


def errors(run: Mapping[str, np.ndarray], answer: Mapping[str, np.ndarray]) -> dict[str, float]:
    """How far each tensor of a float32 run is from the float64 answer; infinitely, if it is missing."""
    return {name: relative_error(run[name], exact) if name in run else math.inf for name, exact in answer.items()}


def against_float64(ours: Mapping[str, float], theirs: Mapping[str, float]) -> Iterator[Comparison]:
    """Float32: the port's errors, judged by the reference's. Each tensor for itself, then all of them pooled."""
    for name, error in ours.items():
        yield Comparison(tensor=name, error=error, bound=max(FLOAT32_RATIO * theirs[name], FLOAT32_FLOOR))
    # Over many tensors chance evens out, so here the ratio alone decides.
    bound = FLOAT32_RATIO * _root_mean_square(theirs)
    yield Comparison(tensor=POOLED, error=_root_mean_square(ours), bound=bound)


def judged_again(comparisons: Iterable[Comparison], further: Sequence[Mapping[str, float]]) -> Iterator[Comparison]:
    """The same comparisons, where each that failed is judged by the reference's largest error over further runs.

    The pooled one is not: it is large enough to be judged by one run.
    """
    for comparison in comparisons:
        if comparison.passed or comparison.tensor == POOLED:
            yield comparison
        else:
            largest = max(run[comparison.tensor] for run in further)
            yield dataclasses.replace(comparison, bound=max(comparison.bound, FLOAT32_RATIO * largest))


def _root_mean_square(run: Mapping[str, float]) -> float:
    return math.sqrt(sum(error * error for error in run.values()) / max(len(run), 1))
