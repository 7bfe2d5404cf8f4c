"""Every parameter's gradient, in the port's names and layouts.

A gradient that is zero in exact arithmetic, such as the key projection's bias (softmax does not see a shift that all
keys share), is rounding noise on both sides. It is judged by the scale of what was summed to it, and counted apart.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from parity.capture import Trace
from parity.compare import Comparison, norm
from parity.rungs.forward import compare_all
from parity.tolerances import FLOAT64_RELATIVE, ZERO_GRADIENT_UNITS
from parity.weights.mapping import WeightMapping


def in_port_layout(reference: Trace, mapping: WeightMapping) -> dict[str, np.ndarray]:
    """The reference's gradients under the port's names."""
    return mapping.apply(reference.gradients, kind="gradient")


def summed_in_port_layout(reference: Trace, mapping: WeightMapping) -> dict[str, np.ndarray]:
    """For biases, the sums of absolute values behind the gradients, under the port's names."""
    known: dict[str, np.ndarray] = {}
    for step in mapping.plan(reference.gradients):
        if all(name in reference.summed for name in step.sources):
            known |= step.apply(reference.summed)
    return known


def zero_gradients(gradients: Mapping[str, np.ndarray], summed: Mapping[str, np.ndarray]) -> frozenset[str]:
    """Names of the gradients that are nothing but the rounding of what was summed; given in float64."""
    return frozenset(
        name for name, scale in summed.items() if norm(gradients[name]) <= _noise(scale, np.float64) and norm(scale) > 0
    )


def float64_gradients(
    port: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], *, zero: frozenset[str]
) -> Iterator[Comparison]:
    """Those that are not zero in exact arithmetic."""
    yield from compare_all(without(port, zero), without(reference, zero), bound=FLOAT64_RELATIVE)


def without(tensors: Mapping[str, np.ndarray], names: frozenset[str]) -> dict[str, np.ndarray]:
    """The tensors that are not among `names`."""
    return {name: array for name, array in tensors.items() if name not in names}


def zeros(
    port: Mapping[str, np.ndarray], summed: Mapping[str, np.ndarray], *, zero: frozenset[str], dtype: type
) -> Iterator[Comparison]:
    """Those that are: the port's must be noise too, measured by what was summed."""
    for name in sorted(zero):
        error = norm(port[name]) if np.isfinite(port[name]).all() else float("inf")
        yield Comparison(tensor=name, error=error, bound=_noise(summed[name], dtype))


def _noise(scale: np.ndarray, dtype: type) -> float:
    return ZERO_GRADIENT_UNITS * float(np.finfo(dtype).eps) * norm(scale)
