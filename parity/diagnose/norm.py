"""Layer norm, RMS norm, batch norm and group norm."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.diagnose.case import Case
from parity.diagnose.diagnosis import Diagnosis, distance, kind
from parity.diagnose.engine import Change, Explanation, Factor, Option, explain

EPS = kind("norm eps", "another eps in a norm's denominator (torch 1e-5, Flax 1e-6)")
EPS_PLACE = kind("norm eps placement", "eps added to the deviation instead of the variance, or the other way round")
VARIANCE = kind("norm variance unbiased", "a variance divided by n - 1 on one side, by n on the other")
MEAN = kind("norm mean not subtracted", "RMS norm on one side, layer norm on the other")
AFFINE = kind("norm scale or bias", "a norm's scale or bias left out, or the two exchanged")
OFFSET = kind("norm scale offset", "x · (1 + scale) on one side, x · scale on the other")
AXIS = kind("norm axis", "normalised over another axis")
FAST = kind("fast variance", "E[x²] - E[x]² on one side, which loses everything where the mean is large")
EXCHANGED = kind("weights of another module", "a matrix that belongs to another module, another layer for one")
MISSING = kind("norm missing", "a norm that one side leaves out")
RUNNING = kind("batch norm statistics", "running statistics exchanged, or those of the batch used in evaluation")

NAMES = ("norm", "ln_", "layernorm", "rms", "bn")
EPS_VALUES = (1e-5, 1e-6, 1e-3, 1e-8, 1e-12, 1e-7, 1e-4, 1e-2, 1e-9, 0.0)


def is_norm(name: str, type_name: str = "") -> bool:
    """By its class's name, or by its own."""
    last = name.rpartition(".")[2].lower()
    return "norm" in type_name.lower() or any(part in last for part in NAMES)


def _yes(usual: str, other: str) -> tuple[Option, Option]:
    return Option("yes", usual), Option("no", other)


_AFFINE = (
    ("both", "both applied"),
    ("scale", "the scale alone"),
    ("bias", "the bias alone"),
    ("neither", "left out"),
    ("exchanged", "exchanged"),
)
PLACE_OF_EPS = Factor(
    "place", EPS_PLACE, _yes("inside the square root", "outside the square root"), what="eps", fix="add eps {reference}"
)
SCALE_AND_BIAS = Factor(
    "affine",
    AFFINE,
    tuple(Option(v, w) for v, w in _AFFINE),
    what="scale and bias",
    fix="scale and bias must be {reference}",
)


def norm(case: Case) -> Diagnosis | None:
    """Any module that has as many parameters as features, or the name of a norm."""
    if not case.leaf or not case.given or case.expected.shape != case.x.shape:
        return None
    if not is_norm(case.module, " ".join(case.types)):
        return None
    statistics = _statistics(case)
    found = _layer_norm(case) if statistics is None else _batch_norm(case, *statistics)
    if found is None:
        return None
    return found.diagnosis(case.module)


def _layer_norm(case: Case) -> Explanation | None:
    formula, x = _Formula(case), case.x
    axes = [Option(-1, "the last axis")]
    axes += [Option(axis, f"axis {axis}") for axis in range(x.ndim - 1)]
    axes += [Option((1, 2), "length and features")] if x.ndim == 3 else []
    axes += [Option(tuple(range(1, x.ndim)), "all but the first axis")] if x.ndim > 2 else []
    owners = tuple(Option(n, f"that of {n}" if n else "its own") for n in [*formula.owners][:40])
    factors = (
        Factor("eps", EPS, _eps_options(case, formula), what="eps", fix="set epsilon={reference}", also_right=99),
        Factor(
            "mean",
            MEAN,
            _yes("subtracted", "not subtracted (RMS norm)"),
            what="mean",
            also_right=1,
            fix="the mean must be {reference}",
        ),
        PLACE_OF_EPS,
        Factor(
            "n",
            VARIANCE,
            _yes("divided by n", "divided by n - 1"),
            what="variance",
            fix="take the variance {reference}",
        ),
        SCALE_AND_BIAS,
        Factor(
            "offset",
            OFFSET,
            _yes("multiplied as it is", "multiplied as 1 + scale"),
            what="scale",
            also_right=1,
            fix="the scale must be {reference}",
        ),
        Factor("axis", AXIS, tuple(axes), what="mean and variance taken over", fix="normalise over {reference}"),
        Factor("scale of", EXCHANGED, owners, what="scale", fix="use {reference}"),
        Factor("bias of", EXCHANGED, owners, what="bias", fix="use {reference}"),
        Factor("skip", MISSING, _yes("applied", "left out"), what="norm", fix="apply the norm"),
    )
    return explain(formula, factors, expected=case.expected, got=case.got)


class _Formula:
    def __init__(self, case: Case):
        width = case.x.shape[-1]
        self.x = case.x.astype(np.float64)
        self.scale, self.bias = _affine(case.weights, "", width)
        self.owners = {"": (self.scale, self.bias)}
        for name in case.other_weights:
            path = name.rpartition(".")[0]
            if is_norm(path) and path not in self.owners and case.other_weights[name].shape == (width,):
                self.owners[path] = _affine(case.other_weights, path + ".", width)

    def __call__(self, f: Mapping[str, Any]) -> np.ndarray | None:
        if f["skip"] == "no":
            return self.x
        x = self.x - self.x.mean(axis=f["axis"], keepdims=True)
        count = x.size / np.prod([x.shape[a] for a in range(x.ndim) if a not in _axes(f["axis"], x.ndim)])
        squares = (x if f["mean"] == "yes" else self.x) ** 2
        variance = squares.mean(axis=f["axis"], keepdims=True)
        if f["n"] == "no":
            variance = variance * count / (count - 1) if count > 1 else variance
        below = np.sqrt(variance + f["eps"]) if f["place"] == "yes" else np.sqrt(variance) + f["eps"]
        normalised = (x if f["mean"] == "yes" else self.x) / below
        scale, bias = self.owners[f["scale of"]][0], self.owners[f["bias of"]][1]
        scale, bias = (bias, scale) if f["affine"] == "exchanged" else (scale, bias)
        if f["affine"] in ("both", "scale", "exchanged"):
            normalised = normalised * (1.0 + scale if f["offset"] == "no" else scale)
        return normalised + bias if f["affine"] in ("both", "bias", "exchanged") else normalised


def _affine(weights: Mapping[str, np.ndarray], prefix: str, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(scale, bias) of the norm whose parameters have this prefix."""
    vectors = {n.removeprefix(prefix): a for n, a in weights.items() if n.startswith(prefix) and a.shape == (width,)}
    scale = next((a for n, a in vectors.items() if n in ("scale", "weight", "gamma", "g")), np.ones(width))
    return scale, next((a for n, a in vectors.items() if n in ("bias", "beta", "b")), np.zeros(width))


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    return tuple(a % ndim for a in (axis if isinstance(axis, tuple) else (axis,)))


def _eps_options(case: Case, formula: _Formula) -> tuple[Option, ...]:
    """The values in use, those read off the modules, and what the results themselves say."""
    read = [value for value in case.settings.get("eps", ()) if isinstance(value, float)]
    solved = [_solved_eps(formula, array) for array in (case.expected, case.got)]
    values = dict.fromkeys([*read, *EPS_VALUES, *(v for v in solved if v is not None)])
    return tuple(Option(value, f"{value:.6g}") for value in values)


def _solved_eps(formula: _Formula, result: np.ndarray) -> float | None:
    """The eps of a layer norm that gives this result, by the rows with the least variance."""
    plain = (formula.x - formula.x.mean(axis=-1, keepdims=True)) * formula.scale
    variance = ((formula.x - formula.x.mean(axis=-1, keepdims=True)) ** 2).mean(axis=-1)
    shifted = result - formula.bias
    with np.errstate(all="ignore"):
        below = (plain * plain).sum(axis=-1) / (plain * shifted).sum(axis=-1)
        eps = below**2 - variance
    eps = eps[np.isfinite(eps)]
    if not eps.size:
        return None
    best = float(np.median(eps))
    # As a person would have written it: an eps has one or two digits.
    return float(f"{best:.1e}") if best > 0 else None


def _statistics(case: Case) -> tuple[np.ndarray, np.ndarray] | None:
    """Running mean and variance, where a module has them."""
    mean = next((case.weights[n] for n in ("mean", "running_mean") if n in case.weights), None)
    if mean is None:
        return None
    return mean, next((case.weights[n] for n in ("var", "running_var") if n in case.weights), np.ones_like(mean))


def _batch_norm(case: Case, mean: np.ndarray, variance: np.ndarray) -> Explanation | None:
    x = case.x.astype(np.float64)
    places = [axis for axis in range(x.ndim) if x.shape[axis] == mean.size]

    def formula(f: Mapping[str, Any]) -> np.ndarray | None:
        if f["skip"] == "no":
            return x
        shape = tuple(mean.size if axis == f["axis"] else 1 for axis in range(x.ndim))
        rest = tuple(axis for axis in range(x.ndim) if axis != f["axis"])
        m, v = {
            "running": (mean, variance),
            "exchanged": (variance, mean),
            "batch": (x.mean(axis=rest), x.var(axis=rest)),
            "deviation": (mean, np.sqrt(variance)),
            "none": (np.zeros_like(mean), np.ones_like(mean)),
        }[f["statistics"]]
        scale = case.weights.get("scale", case.weights.get("weight", np.ones_like(mean)))
        bias = case.weights.get("bias", np.zeros_like(mean))
        scale, bias = (bias, scale) if f["affine"] == "exchanged" else (scale, bias)
        v = v.reshape(shape)
        below = np.sqrt(v + f["eps"]) if f["place"] == "yes" else np.sqrt(v) + f["eps"]
        result = (x - m.reshape(shape)) / below
        if f["affine"] in ("both", "scale", "exchanged"):
            result = result * scale.reshape(shape)
        return result + bias.reshape(shape) if f["affine"] in ("both", "bias", "exchanged") else result

    statistics = (
        ("running", "the running ones"),
        ("batch", "those of the batch"),
        ("exchanged", "mean and variance exchanged"),
        ("deviation", "the variance taken for a deviation"),
        ("none", "left out"),
    )
    read = [value for value in case.settings.get("eps", ()) if isinstance(value, float)]
    eps = dict.fromkeys([*read, *EPS_VALUES, *_solved_batch_eps(case, x, mean, variance)])
    factors = (
        Factor("axis", AXIS, tuple(Option(a, f"axis {a}") for a in places), what="axis of the features", also_right=9),
        Factor(
            "eps",
            EPS,
            tuple(Option(v, f"{v:.6g}") for v in eps),
            what="eps",
            fix="set epsilon={reference}",
            also_right=99,
        ),
        Factor(
            "statistics", RUNNING, tuple(Option(v, w) for v, w in statistics), what="statistics", fix="use {reference}"
        ),
        PLACE_OF_EPS,
        SCALE_AND_BIAS,
        Factor("skip", MISSING, _yes("applied", "left out"), what="norm", fix="apply the norm"),
    )
    return explain(formula, factors, expected=case.expected, got=case.got)


def _solved_batch_eps(case: Case, x: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> list[float]:
    axis = next((a for a in range(x.ndim) if x.shape[a] == mean.size), None)
    if axis is None:
        return []
    rest = tuple(a for a in range(x.ndim) if a != axis)
    scale = case.weights.get("scale", case.weights.get("weight", np.ones_like(mean)))
    shape = tuple(mean.size if a == axis else 1 for a in range(x.ndim))
    centred = (x - mean.reshape(shape)) * scale.reshape(shape)
    bias = case.weights.get("bias", np.zeros_like(mean)).reshape(shape)
    solved = []
    for result in (case.expected, case.got):
        with np.errstate(all="ignore"):
            below = (centred**2).sum(axis=rest) / (centred * (result - bias)).sum(axis=rest)
            eps = float(np.median(below**2 - variance))
        if np.isfinite(eps) and eps > 0:
            solved.append(float(f"{eps:.1e}"))
    return solved


def fast_variance(case: Case) -> Diagnosis | None:
    """E[x²] - E[x]²: a rounding error as large as the one that the formula makes in numpy, and of no other reason."""
    if not case.leaf or not case.given or case.expected.shape != case.x.shape:
        return None
    if not is_norm(case.module, " ".join(case.types)) or case.x.shape[-1] < 2:
        return None
    formula = _Formula(case)
    x = formula.x
    mean, square = x.mean(axis=-1, keepdims=True), (x * x).mean(axis=-1, keepdims=True)
    noise = np.finfo(np.float64).eps * square / np.maximum(x.var(axis=-1, keepdims=True), 1e-300)
    between = np.linalg.norm(case.got - case.expected, axis=-1, keepdims=True)
    scale = np.maximum(np.linalg.norm(case.expected - formula.bias, axis=-1, keepdims=True), 1e-300)
    relative = between / scale
    large = np.abs(mean).max() > 30 * x.std(axis=-1).max()
    if not large or distance(case.got, case.expected) > 1e-3 or not (relative <= 30 * noise).all():
        return None
    change = Change(
        Factor("variance", FAST, (), what="variance", fix="use_fast_variance=False: take the variance as {reference}"),
        Option("two", "the mean of (x - mean)²"),
        Option("fast", "E[x²] - E[x]²"),
    )
    return Explanation(changes=(change,)).diagnosis(case.module)
