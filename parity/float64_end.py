"""Where float64 ends: a module casts to float32 inside. From there on tensors are judged as float32 ones are."""

from collections.abc import Iterable, Mapping

import numpy as np

from parity.tolerances import FLOAT32_FLOOR, FLOAT32_RATIO
from parity.trace import Trace, module_of


def place(reference: Trace, port: Trace) -> str | None:
    """The first tensor, in the reference's order, that something narrower entered: `module of the side (file:line)`."""
    for name in {**reference.everything, **port.results}:
        for side, trace in (("port", port), ("reference", reference)):
            found = _place(trace, name)
            if found is not None:
                module, _, line = found.partition(" at ")
                return f"{module or 'the model itself'} of the {side}" + (f" ({line})" if line else "")
    return None


def narrow(*traces: Trace) -> set[str]:
    """Tensors of any of the float64 runs that something narrower entered."""
    return {name for trace in traces for name in trace.everything if _place(trace, name) is not None}


def bounds(names: Iterable[str], theirs: Mapping[str, float]) -> dict[str, float]:
    """The float32 rule for these tensors, given the reference's own float32 errors."""
    return {name: max(FLOAT32_RATIO * theirs[name], FLOAT32_FLOOR) for name in names if name in theirs}


def _place(trace: Trace, name: str) -> str | None:
    if name in trace.narrow:
        return trace.narrow[name]
    array = trace.everything.get(name)
    return None if array is None or array.dtype == np.float64 else module_of(name)
