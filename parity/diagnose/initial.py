"""Initial distributions, on the evidence of rung 5."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from parity.diagnose.diagnosis import Diagnosis, kind

SCALE = kind("initialisation scale", "initial values of another standard deviation")
SHAPE = kind("initialisation distribution", "uniform on one side, normal or truncated on the other")
CONSTANT = kind("initialisation constant", "constant on one side, random or another constant on the other")
MEAN = kind("initialisation mean", "initial values around another mean")

NEAR = 0.04
"""Relative distance up to which a measured deviation is called by a formula's name."""


def explain_initialisation(evidence: Mapping[str, Any]) -> Diagnosis | None:
    """`parameter`, its `shape` in the port's layout, `reference` and `port`: values of all seeds together."""
    name, shape = str(evidence["parameter"]), tuple(evidence["shape"])
    one, other = (np.asarray(evidence[side], np.float64).ravel() for side in ("reference", "port"))
    if not one.size or not other.size:
        return None
    words = [described(values, shape) for values in (one, other)]
    sentence = f"The port draws {name} {words[1]}, the reference {words[0]}"
    fix = f"initialise {name} {words[0]}"
    constant = [np.ptp(values) == 0.0 for values in (one, other)]
    if any(constant):
        return _said(CONSTANT, name, sentence, fix)
    deviations = [float(values.std()) for values in (one, other)]
    error = 4.0 / math.sqrt(min(one.size, other.size))
    if abs(math.log(deviations[1] / deviations[0])) > max(error, 0.01):
        return _said(SCALE, name, sentence, fix)
    shapes = [distribution(values) for values in (one, other)]
    if shapes[0] != shapes[1]:
        return _said(SHAPE, name, sentence, fix)
    if abs(one.mean() - other.mean()) > error * max(deviations):
        return _said(MEAN, name, f"{sentence}; their means are {other.mean():.3g} and {one.mean():.3g}", fix)
    return None


def described(values: np.ndarray, shape: tuple[int, ...]) -> str:
    """`uniformly with standard deviation 0.081 (Xavier)`."""
    if np.ptp(values) == 0.0:
        return f"as {values[0]:g} everywhere"
    deviation = float(values.std())
    names = [name for name, value in formulas(shape) if abs(deviation / value - 1.0) < NEAR]
    known = f" ({names[0]})" if names else ""
    return f"{distribution(values)} with standard deviation {deviation:.3g}{known}"


def distribution(values: np.ndarray) -> str:
    """By the fourth moment: 1.8 for uniform, 3 for normal, between them for a normal cut off at two deviations."""
    centred = values - values.mean()
    kurtosis = float((centred**4).mean() / (centred**2).mean() ** 2)
    if kurtosis < 2.1:
        return "uniformly"
    return "normally, cut off," if kurtosis < 2.65 and np.abs(centred).max() < 2.4 * centred.std() else "normally"


def formulas(shape: tuple[int, ...]) -> Iterator[tuple[str, float]]:
    """Standard deviations in use, for a kernel (..., in, out)."""
    if len(shape) >= 2:
        field = int(np.prod(shape[:-2]))
        fan_in, fan_out = shape[-2] * field, shape[-1] * field
        yield "Xavier", math.sqrt(2.0 / (fan_in + fan_out))
        yield "torch's Linear, 1/√(3 fan_in)", 1.0 / math.sqrt(3.0 * fan_in)
        yield "LeCun, 1/√fan_in", 1.0 / math.sqrt(fan_in)
        yield "He, √(2/fan_in)", math.sqrt(2.0 / fan_in)
        yield "1/√fan_out", 1.0 / math.sqrt(fan_out)
        yield "√(2/fan_out)", math.sqrt(2.0 / fan_out)
        yield "1/√(3 fan_out)", 1.0 / math.sqrt(3.0 * fan_out)
    elif shape:
        yield "1/√width", 1.0 / math.sqrt(shape[-1])
    yield "0.02", 0.02
    yield "1", 1.0


def _said(name: str, parameter: str, sentence: str, fix: str) -> Diagnosis:
    return Diagnosis(kind=name, module=parameter, sentence=sentence, fix=fix)
