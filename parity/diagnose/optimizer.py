"""Optimizers: Adam, AdamW, SGD by their factors, on the evidence of rung 12."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parity.diagnose.diagnosis import Diagnosis, kind
from parity.diagnose.engine import Explanation, Factor, Option, explain
from parity.diagnose.updates import PARAMETER_STILL

EPS = kind("Adam eps", "another eps in Adam's denominator")
EPS_PLACE = kind("Adam eps placement", "eps inside the square root (eps_root), or added before the bias correction")
BIAS_CORRECTION = kind("Adam bias correction", "moments that are not corrected for their start at zero")
BETAS = kind("Adam betas", "other decay rates of the moments, or the two exchanged")
DECAY = kind("weight decay", "another amount of weight decay, or none")
DECAY_PLACE = kind("weight decay placement", "L2 inside the gradient (torch Adam) or decoupled from it (AdamW)")
DECAY_RATE = kind("weight decay not scaled by the rate", "decoupled decay with and without the learning rate")
RATE = kind("optimizer learning rate", "another learning rate")
RULE = kind("optimizer rule", "another optimizer")
SIGN = kind("update sign", "an update in the direction of the gradient")
MOMENTUM = kind("momentum", "another momentum, dampening or Nesterov's form")
STATE = kind("optimizer state lost", "moments or the count that start anew in each step")
AMSGRAD = kind("amsgrad", "the largest second moment so far on one side")

BETA1 = (0.9, 0.0, 0.95, 0.8, 0.99, 0.98, 0.999)
BETA2 = (0.999, 0.98, 0.99, 0.95, 0.997, 0.9)
EPSILONS = (1e-8, 1e-9, 1e-6, 1e-7, 1e-10, 1e-5, 1e-3, 1e-12, 0.0)
DECAYS = (0.0, 0.01, 0.1, 1e-3, 1e-4, 0.05, 5e-4)

OF_ANY_RULE = (
    Factor(
        "state",
        STATE,
        (
            Option("kept", "kept from step to step"),
            Option("lost", "new in every step"),
            Option("moments lost", "kept in its count alone"),
        ),
        what="state",
        fix="hand on the optimizer's state from step to step",
    ),
    Factor(
        "sign",
        SIGN,
        (Option(-1.0, "against the gradient"), Option(1.0, "along the gradient")),
        what="update",
        fix="step {reference}",
    ),
)
"""What goes wrong in Adam and in SGD alike."""


def explain_optimizer(evidence: Mapping[str, Any]) -> Diagnosis | None:
    """`gradients`, `reference` and `port`: arrays of each step; `weights` before the first."""
    gradients = [np.asarray(g, np.float64) for g in evidence["gradients"]]
    expected, got = (np.stack([np.asarray(u, np.float64) for u in evidence[side]]) for side in ("reference", "port"))
    if not got.any() and expected.any():
        name = str(evidence.get("parameter", "the parameter"))
        return Diagnosis(
            kind=PARAMETER_STILL,
            module=name,
            sentence=f"The port's optimizer does not change {name}",
            fix="give it to the optimizer: no mask, no zero learning rate, and an nnx.Param",
        )
    weights = [np.asarray(evidence["weights"], np.float64)]
    for update in expected[:-1]:
        weights.append(weights[-1] + update)
    run = _Run(gradients, weights)
    rates = _rates(gradients, weights[0], expected, got)
    for factors in (_adam(rates, decay=False), _adam(rates, decay=True), _sgd(gradients, expected, got)):
        found: Explanation | None = explain(run, factors, expected=expected, got=got, unusual=0)
        if found is not None:
            return found.diagnosis("optimizer")
    return None


def _adam(rates: Sequence[float], *, decay: bool) -> list[Factor]:
    few = 3 if decay else len(EPSILONS)
    factors = [
        Factor(
            "rule",
            RULE,
            (Option("adam", "Adam"), Option("sgd", "plain gradient descent"), Option("sign", "the sign")),
            what="optimizer",
            fix="use {reference}",
        ),
        Factor(
            "rate",
            RATE,
            tuple(Option(r, f"{r:.6g}") for r in rates),
            what="learning rate",
            free=True,
            fix="use {reference}",
        ),
        Factor(
            "b1",
            BETAS,
            tuple(Option(b, f"{b:g}") for b in BETA1),
            what="b1",
            also_right=2 if decay else 6,
            fix="b1={reference}",
        ),
        Factor(
            "b2",
            BETAS,
            tuple(Option(b, f"{b:g}") for b in BETA2),
            what="b2",
            also_right=3 if decay else 5,
            fix="b2={reference}",
        ),
        Factor(
            "eps",
            EPS,
            tuple(Option(e, f"{e:g}") for e in EPSILONS),
            what="eps",
            also_right=few - 1,
            fix="eps={reference}",
        ),
        Factor(
            "place",
            EPS_PLACE,
            (
                Option("outside", "added to the root of the corrected moment"),
                Option("inside", "inside the square root (eps_root)"),
                Option("before", "added before the bias correction"),
            ),
            what="eps",
            fix="eps must be {reference}",
        ),
        Factor(
            "correction",
            BIAS_CORRECTION,
            (
                Option("both", "of both moments"),
                Option("none", "missing"),
                Option("first", "of the first moment alone"),
                Option("second", "of the second moment alone"),
                Option("late", "one step late"),
            ),
            what="bias correction",
            fix="correct the bias {reference}",
        ),
        *OF_ANY_RULE,
        Factor(
            "exchanged",
            BETAS,
            (Option("no", "b1 for the first moment"), Option("yes", "b2 for the first moment")),
            what="decay rate",
            fix="use {reference}",
        ),
        Factor(
            "nesterov",
            MOMENTUM,
            (Option("no", "as it is"), Option("yes", "Nesterov's")),
            what="momentum",
            also_right=1,
            fix="use momentum {reference}",
        ),
        Factor(
            "amsgrad",
            AMSGRAD,
            (Option("no", "the current one"), Option("yes", "the largest so far")),
            what="second moment",
            fix="use {reference}",
        ),
    ]
    decays = DECAYS[1:] + DECAYS[:1] if decay else DECAYS
    places = (
        Option("decoupled", "decoupled (AdamW)"),
        Option("l2", "inside the gradient (L2)"),
        Option("unscaled", "decoupled, not multiplied by the learning rate"),
    )
    factors.append(
        Factor(
            "decay",
            DECAY,
            tuple(Option(d, f"{d:g}") for d in decays),
            what="weight decay",
            also_right=6 if decay else 0,
            fix="weight_decay={reference}",
        )
    )
    factors.append(
        Factor(
            "decay place",
            lambda r, p: DECAY_RATE if "unscaled" in (r, p) else DECAY_PLACE,
            places,
            what="weight decay",
            also_right=2 if decay else 0,
            fix="weight decay must be {reference}",
        )
    )
    return factors


def _sgd(gradients: Sequence[np.ndarray], expected: np.ndarray, got: np.ndarray) -> list[Factor]:
    rates: list[float] = []
    for updates in (expected, got):
        ratio = np.abs(updates[0]) / np.maximum(np.abs(gradients[0]), 1e-300)
        rates.append(float(f"{float(np.median(ratio)):.3g}"))
    momenta = (0.0, 0.9, 0.99, 0.8, 0.95)
    return [
        Factor("rule", RULE, (Option("momentum", "gradient descent with momentum"),), what="optimizer"),
        Factor(
            "rate",
            RATE,
            tuple(Option(r, f"{r:.6g}") for r in dict.fromkeys(rates)),
            what="learning rate",
            free=True,
            fix="use {reference}",
        ),
        Factor(
            "b1",
            MOMENTUM,
            tuple(Option(m, f"{m:g}") for m in momenta),
            what="momentum",
            free=True,
            fix="momentum={reference}",
        ),
        Factor(
            "dampening",
            MOMENTUM,
            (Option("no", "absent"), Option("yes", "1 - momentum")),
            what="dampening",
            also_right=1,
            fix="dampening must be {reference}",
        ),
        Factor(
            "nesterov",
            MOMENTUM,
            (Option("no", "as it is"), Option("yes", "Nesterov's")),
            what="momentum",
            also_right=1,
            fix="use momentum {reference}",
        ),
        Factor(
            "decay",
            DECAY,
            tuple(Option(d, f"{d:g}") for d in DECAYS),
            what="weight decay",
            also_right=6,
            fix="weight_decay={reference}",
        ),
        Factor(
            "decay place",
            DECAY_PLACE,
            (Option("l2", "inside the gradient"), Option("decoupled", "decoupled")),
            what="weight decay",
            fix="weight decay must be {reference}",
        ),
        *OF_ANY_RULE,
    ]


def _rates(gradients: Sequence[np.ndarray], weights: np.ndarray, expected: np.ndarray, got: np.ndarray) -> list[float]:
    """Adam's first step is the learning rate wherever the gradient is large, and what decays of the weight."""
    first = gradients[0].ravel()
    large = np.abs(first) >= 0.1 * np.abs(first).max()
    measured = [float(np.median(np.abs(updates[0].ravel()[large]))) for updates in (expected, got)]
    larger_than_eps = np.abs(first) >= 1e-4 * np.abs(first).max()
    if larger_than_eps.sum() > 2:
        terms = np.stack([np.sign(first), weights.ravel()], axis=-1)[larger_than_eps]
        for updates in (expected, got):
            rate, _ = np.linalg.lstsq(terms, -updates[0].ravel()[larger_than_eps])[0]
            measured.append(abs(float(rate)))
    found = [float(f"{rate:.2g}") for rate in measured]
    # An update that is the reference's times a number: to all its digits, for it need not be a round one.
    ratio = float(expected[0].ravel() @ got[0].ravel()) / max(float(expected[0].ravel() @ expected[0].ravel()), 1e-300)
    scaled = [found[0] * ratio] if abs(ratio) > 1e-6 else []
    rounder = [float(f"{rate:.1g}") for rate in found]
    return [rate for rate in dict.fromkeys([*found, *rounder, 1.0, *scaled]) if rate > 0]


class _Run:
    """Updates of every step."""

    def __init__(self, gradients: Sequence[np.ndarray], weights: Sequence[np.ndarray]):
        self.gradients, self.weights = gradients, weights

    def __call__(self, f: Mapping[str, Any]) -> np.ndarray:
        m = v = largest = np.zeros_like(self.weights[0])
        updates = []
        lost = f.get("state", "kept")
        for number, (gradient, w) in enumerate(zip(self.gradients, self.weights, strict=True), start=1):
            step = 1 if lost == "lost" else number
            if lost != "kept":
                m = v = largest = np.zeros_like(m)
            g = gradient + f["decay"] * w if f["decay place"] == "l2" else gradient
            if f["rule"] == "momentum":
                m = f["b1"] * m + (g * (1 - f["b1"]) if f["dampening"] == "yes" and step > 1 else g)
                direction = g + f["b1"] * m if f["nesterov"] == "yes" else m
            elif f["rule"] == "adam":
                b1, b2 = (f["b2"], f["b1"]) if f["exchanged"] == "yes" else (f["b1"], f["b2"])
                m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
                largest = np.maximum(largest, v)
                direction = _adam_direction(m, largest if f["amsgrad"] == "yes" else v, g, b1, b2, step, f)
            else:
                direction = g if f["rule"] == "sgd" else np.sign(g)
            update = f["sign"] * f["rate"] * direction
            if f["decay place"] == "decoupled":
                update = update - f["rate"] * f["decay"] * w
            elif f["decay place"] == "unscaled":
                update = update - f["decay"] * w
            updates.append(update)
        return np.stack(updates)


def _adam_direction(
    m: np.ndarray, v: np.ndarray, g: np.ndarray, b1: float, b2: float, step: int, f: Mapping[str, Any]
) -> np.ndarray:
    count = step + 1 if f["correction"] == "late" else step
    first = 1 - b1**count if f["correction"] in ("both", "first", "late") else 1.0
    second = 1 - b2**count if f["correction"] in ("both", "second", "late") else 1.0
    if f["nesterov"] == "yes":
        corrected = b1 * m / ((1 - b1 ** (count + 1)) if first != 1.0 else 1.0) + (1 - b1) * g / first
    else:
        corrected = m / first
    if f["place"] == "outside":
        below = np.sqrt(v / second) + f["eps"]
    elif f["place"] == "inside":
        below = np.sqrt(v / second + f["eps"])
    else:
        below = (np.sqrt(v) + f["eps"]) / np.sqrt(second)
    return np.asarray(corrected / below)
