"""Learning-rate tables, on the evidence of rung 13."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.diagnose.diagnosis import Diagnosis, kind
from parity.diagnose.engine import Explanation, Factor, Option, explain

STEP = kind("learning-rate step", "a table that starts at step 0, repeats its first step, or is one step ahead")
SCALE = kind("learning-rate scale", "every rate multiplied by a constant")
WARMUP = kind("learning-rate warm-up", "a warm-up of another length, of another form, or none")
DECAY = kind("learning-rate decay", "another form of decay, or none")

FORMS = {
    "inverse root": "s^-½ after the warm-up",
    "inverse": "1/s after the warm-up",
    "constant": "constant after the warm-up",
    "power 0.75": "s^-¾ after the warm-up",
}
MATCH_OF_FLOAT32 = 1e-6


def explain_schedule(evidence: Mapping[str, Any]) -> Diagnosis | None:
    """`steps`, and the rates of `reference` and `port` at them."""
    steps = np.asarray(evidence["steps"], np.float64)
    # Rates are often float32; an explanation to six digits is one.
    expected, got = (np.asarray(evidence[side], np.float64).astype(np.float32) for side in ("reference", "port"))
    if not np.isfinite(got).all() or not got.any():
        return None
    found = _ratio(expected, got) or _neighbours(steps, expected, got)
    if found is not None:
        return found
    return _noam(steps, expected, got) or _halves(steps, expected, got)


def _ratio(expected: np.ndarray, got: np.ndarray) -> Diagnosis | None:
    if not (expected > 0).all():
        return None
    ratios = got.astype(np.float64) / expected
    if np.ptp(ratios) > MATCH_OF_FLOAT32 * abs(ratios.mean()):
        return None
    ratio = float(ratios.mean())
    return _said(
        SCALE, f"Every learning rate of the port is {ratio:.6g} times the reference's", f"divide by {ratio:.6g}"
    )


def _neighbours(steps: np.ndarray, expected: np.ndarray, got: np.ndarray) -> Diagnosis | None:
    """Wherever the table has two steps in a row, the port has the reference's rate of the other one."""
    rates = {int(step): (float(r), float(p)) for step, r, p in zip(steps, expected, got, strict=True)}
    for shift, words, fix in ((-1, "behind", "add 1 to the step"), (1, "ahead", "take 1 from the step")):
        near = [(rates[s][1], rates[s + shift][0], rates[s][0]) for s in rates if s + shift in rates]
        telling = [(p, r) for p, r, own in near if abs(r - own) > MATCH_OF_FLOAT32 * abs(own)]
        if len(telling) >= 2 and all(abs(p - r) <= MATCH_OF_FLOAT32 * max(abs(r), 1e-30) for p, r in telling):
            first = "; its first rate is 0" if rates.get(1, (1.0, 1.0))[1] == 0.0 else ""
            return _said(STEP, f"The port's learning rates are one step {words} of the reference's{first}", fix)
    return None


def _noam(steps: np.ndarray, expected: np.ndarray, got: np.ndarray) -> Diagnosis | None:
    """amplitude · min(s^-½, s · warm-up^-1½) and its relatives, where the last step gives the amplitude."""
    fitted = [_fit(steps, rates) for rates in (expected, got)]
    warmups = dict.fromkeys(round(w) for _, w in fitted if np.isfinite(w) and 1 <= w < 1e7)
    warmups |= dict.fromkeys(w + d for w in [*warmups] for d in (-1, 1))
    amplitudes = dict.fromkeys(float(f"{a:.7g}") for a, _ in fitted if np.isfinite(a) and a > 0)
    if not warmups or not amplitudes:
        return None

    def formula(f: Mapping[str, Any]) -> np.ndarray:
        s, w = np.maximum(steps + f["shift"], 0.0), f["warm-up"]
        with np.errstate(all="ignore"):
            power = {"inverse root": -0.5, "inverse": -1.0, "constant": 0.0, "power 0.75": -0.75}[f["form"]]
            after, rise = s**power, s * w ** (power - 1.0)
            rates = (
                after if f["rise"] == "none" else np.minimum(after, rise if f["rise"] == "linear" else rise * (s / w))
            )
        return np.where(s > 0, f["amplitude"] * rates, 0.0)

    factors = (
        Factor(
            "shift",
            STEP,
            (Option(0, "the step itself"), Option(-1, "the step - 1"), Option(1, "the step + 1")),
            what="argument of the schedule",
            also_right=2,
            fix="compute the rate from {reference}",
        ),
        Factor(
            "warm-up",
            WARMUP,
            tuple(Option(w, f"{w:,} steps") for w in warmups if w > 0),
            what="warm-up",
            free=True,
            fix="warm up for {reference}",
        ),
        Factor(
            "amplitude",
            SCALE,
            tuple(Option(a, f"{a:.6g}") for a in amplitudes),
            what="factor",
            free=True,
            fix="use {reference}",
        ),
        Factor("form", DECAY, tuple(Option(n, w) for n, w in FORMS.items()), what="rate", fix="the rate: {reference}"),
        Factor(
            "rise",
            WARMUP,
            (Option("linear", "linear"), Option("none", "missing"), Option("square", "quadratic")),
            what="warm-up",
            fix="a {reference} warm-up",
        ),
    )
    found: Explanation | None = explain(formula, factors, expected=expected, got=got, unusual=1)
    return None if found is None else found.diagnosis("schedule")


def _fit(steps: np.ndarray, rates: np.ndarray) -> tuple[float, float]:
    """(amplitude by the last step, warm-up by the first that has a rate)."""
    amplitude = float(rates[-1]) * float(steps[-1]) ** 0.5
    first = next((i for i, rate in enumerate(rates) if rate > 0), 0)
    with np.errstate(all="ignore"):
        warmup = float((amplitude * steps[first] / np.float64(rates[first])) ** (2.0 / 3.0))
    return amplitude, warmup


def _halves(steps: np.ndarray, expected: np.ndarray, got: np.ndarray) -> Diagnosis | None:
    """Equal up to some step, or from some step on."""
    same = np.abs(got - expected) <= MATCH_OF_FLOAT32 * np.abs(expected)
    if same.all() or not same.any():
        return None
    first, last = int(np.argmin(same)), len(same) - 1 - int(np.argmin(same[::-1]))
    if same[-1] and same[last + 1 :].all() and first == 0:
        return _said(
            WARMUP,
            f"The port's learning rates differ up to step {int(steps[last]):,} and are equal afterwards",
            "compare the warm-up",
        )
    if same[0] and same[:first].all() and last == len(same) - 1:
        return _said(
            DECAY,
            f"The port's learning rates are equal before step {int(steps[first]):,} and differ from there on",
            "compare the decay",
        )
    return None


def _said(name: str, sentence: str, fix: str) -> Diagnosis:
    return Diagnosis(kind=name, module="schedule", sentence=sentence, fix=fix)
