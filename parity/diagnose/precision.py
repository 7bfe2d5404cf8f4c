"""A module that computes in a narrower type than it is given."""

import numpy as np

from parity.diagnose.case import Case
from parity.diagnose.diagnosis import Diagnosis, distance, kind
from parity.diagnose.engine import CLEARER, MATCH

FLOAT32 = kind("float32 inside", "a module that casts to float32, or to less, in a float64 run")
BFLOAT16 = kind("bfloat16 inside", "a module that casts to bfloat16 or float16")
LOW_PRECISION = kind("low precision product", "matrix products in TF32 or bfloat16")

WIDTHS = (("float32", 24, FLOAT32), ("float16", 11, BFLOAT16), ("bfloat16", 8, BFLOAT16))
"""Name, bits of the significand, kind."""
PRODUCTS = (("TF32", 11), ("bfloat16", 8))
"""How the factors of a product are rounded."""

LEAST = 64
"""Elements from which on noise can be told from anything else."""
SMALLEST, LARGEST = 2e-9, 2e-6
"""Relative difference that float32 makes in a module."""


def precision(case: Case) -> Diagnosis | None:
    """Values of a narrower type, in most of the elements; or a difference like the noise of float32."""
    if case.discrete or case.expected.shape != case.got.shape or case.expected.size < 8:
        return None
    expected, got = case.expected.astype(np.float64), case.got.astype(np.float64)
    between = distance(got, expected)
    # Rounding is everywhere: a difference in a few places only is something else.
    if not np.isfinite(between) or np.count_nonzero(got != expected) < 0.5 * np.count_nonzero(expected):
        return None
    for name, bits, called in WIDTHS:
        rounded = case.got.dtype.itemsize < 8 or np.array_equal(rounded_to(got, bits), got)
        if rounded and 2.0**-bits / 50 < between < 8 * 2.0**-bits:
            return _said(case, called, name, between)
    if SMALLEST < between < LARGEST and _is_noise(expected, got):
        return _said(case, FLOAT32, "float32", between)
    return None


def rounded_product(case: Case, x: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> Diagnosis | None:
    """x W + b with the factors rounded, as the units for matrix products do."""
    if x.shape[-1] != kernel.shape[0]:
        return None
    expected, got = case.expected.astype(np.float64), case.got.astype(np.float64)
    between = distance(got, expected)
    if expected.shape != got.shape or distance((x @ kernel + bias).reshape(expected.shape), expected) > MATCH:
        return None
    for name, bits in PRODUCTS:
        product = rounded_to(x, bits) @ rounded_to(kernel, bits) + bias
        if distance(product.reshape(got.shape), got) <= between / CLEARER:
            sentence = f"The port's product has the factors rounded to {name}"
            fix = "precision=jax.lax.Precision.HIGHEST, or jax_default_matmul_precision=highest"
            return Diagnosis(kind=LOW_PRECISION, module=case.module, sentence=sentence, fix=fix)
    return None


def rounded_to(x: np.ndarray, bits: int) -> np.ndarray:
    """To so many bits of significand."""
    mantissa, exponent = np.frexp(x)
    return np.asarray(np.ldexp(np.round(mantissa * 2.0**bits) / 2.0**bits, exponent))


def _is_noise(expected: np.ndarray, got: np.ndarray) -> bool:
    """Of both signs, in no proportion to the values, and nowhere much larger than elsewhere."""
    difference = (got - expected).ravel()
    if difference.size < LEAST:
        return False
    spread = float(difference.std())
    centred, values = difference - difference.mean(), expected.ravel() - expected.mean()
    correlation = float(centred @ values) / max(float(np.linalg.norm(centred) * np.linalg.norm(values)), 1e-300)
    few = 4.0 / np.sqrt(difference.size)
    rows = np.sqrt((difference.reshape(-1, expected.shape[-1]) ** 2).mean(axis=-1))
    even = bool(np.median(rows) > 0 and rows.max() < 8 * np.median(rows))
    return abs(float(difference.mean())) < few * spread and abs(correlation) < few and even


def _said(case: Case, called: str, name: str, between: float) -> Diagnosis:
    sentence = f"The port differs by about one rounding to {name} ({between:.1e}): it computes in that"
    fix = f"keep the precision of the input: no cast to {name}, and full precision in matrix products"
    return Diagnosis(kind=called, module=case.module, sentence=sentence, fix=fix)
