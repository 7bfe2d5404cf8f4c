"""A module that computes in a narrower type than it is given."""

import numpy as np

from parity.diagnose.case import Case
from parity.diagnose.diagnosis import Diagnosis, distance, kind

FLOAT32 = kind("float32 inside", "a module that casts to float32, or to less, in a float64 run")
BFLOAT16 = kind("bfloat16 inside", "a module that casts to bfloat16 or float16, or multiplies in such a precision")

WIDTHS = (("float32", 24, FLOAT32), ("float16", 11, BFLOAT16), ("bfloat16", 8, BFLOAT16))
"""Name, bits of the significand, kind."""


def precision(case: Case) -> Diagnosis | None:
    """A difference as large as one rounding to a narrower type, in most of the elements."""
    expected, got = case.expected.astype(np.float64), case.got.astype(np.float64)
    between = distance(got, expected)
    if expected.shape != got.shape or not np.isfinite(between) or expected.size < 8:
        return None
    # Rounding is everywhere: a difference in a few places only is something else.
    if np.count_nonzero(got != expected) < 0.5 * np.count_nonzero(expected):
        return None
    for name, bits, called in WIDTHS:
        unit = 2.0**-bits
        fitted = float((got.ravel() @ expected.ravel()) / (expected.ravel() @ expected.ravel()))
        rounded = case.got.dtype.itemsize < 8 or np.array_equal(_rounded(got, bits), got)
        if unit / 50 < between < 8 * unit and abs(fitted - 1.0) < between / 2 and rounded:
            return Diagnosis(
                kind=called,
                module=case.module,
                sentence=f"The port differs by about one rounding to {name} ({between:.1e}): it computes in that",
                fix=f"keep the precision of the input: no cast to {name}, and full precision in matrix products",
            )
    return None


def _rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """To so many bits of significand."""
    mantissa, exponent = np.frexp(x)
    return np.asarray(np.ldexp(np.round(mantissa * 2.0**bits) / 2.0**bits, exponent))
