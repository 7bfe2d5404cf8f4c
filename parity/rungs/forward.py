"""Every named module output, the logits and the loss."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from parity.capture import Trace
from parity.compare import Comparison, relative_error
from parity.tolerances import FLOAT32_FLOOR, FLOAT32_RATIO, FLOAT64_RELATIVE


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


def against_float64(
    port: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], answer: Mapping[str, np.ndarray]
) -> Iterator[Comparison]:
    """Float32: how far the port is from the float64 answer, judged by how far the reference is.

    Each tensor for itself, then the root mean square over all of them.
    """
    squares = np.zeros(2)
    for name, exact in answer.items():
        if name not in port or name not in reference:
            yield Comparison(tensor=name, error=math.inf, bound=0.0)
            continue
        theirs, ours = relative_error(reference[name], exact), relative_error(port[name], exact)
        yield Comparison(tensor=name, error=ours, bound=max(FLOAT32_RATIO * theirs, FLOAT32_FLOOR))
        squares += np.square([ours, theirs])
    pooled_ours, pooled_theirs = np.sqrt(squares / max(len(answer), 1))
    # Over many tensors chance evens out, so here the ratio alone decides.
    yield Comparison(tensor="all of them, pooled", error=pooled_ours, bound=FLOAT32_RATIO * pooled_theirs)
