"""Losses that differ on equal outputs: label smoothing, padding, what the sum is divided by."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parity.diagnose.diagnosis import Diagnosis, kind
from parity.diagnose.engine import Explanation, Factor, Option, explain
from parity.diagnose.precision import WIDTHS, rounded_to
from parity.pair import Inputs

SPREAD = kind("label smoothing spread", "smoothing mass spread over K, K - 1 or K - 2 classes")
SMOOTHING = kind("label smoothing missing", "label smoothing on one side only, or of another amount")
PADDING = kind("padding counted in the loss", "padding that counts on one side, or another id taken for padding")
REDUCTION = kind("loss reduction", "a sum, or a mean over tokens, positions, sentences or the batch")
FACTOR = kind("loss scale", "a constant factor of the loss")
TARGETS = kind("targets shifted", "the loss of a position compared with its neighbour's target")
REGRESSION = kind("regression loss", "squared, absolute or Huber error")

AMOUNTS = (0.0, 0.1, 0.05, 0.2, 0.15, 0.3, 0.01)
SPREADS = ("K", "K - 1", "K - 2", "K - 1 without padding")
WORDS = {
    "K": "all K classes",
    "K - 1": "all classes but the target",
    "K - 2": "all classes but target and padding",
    "K - 1 without padding": "all classes but padding",
}
REDUCTIONS = ("token", "sum", "position", "sentence", "batch")
REDUCTION_WORDS = {
    "token": "a mean over the positions that count",
    "sum": "a sum",
    "position": "a mean over all positions",
    "sentence": "a mean over sentences of their means",
    "batch": "a sum divided by the size of the batch",
}


def explain_loss(
    outputs: Sequence[np.ndarray], inputs: Sequence[Inputs], expected: np.ndarray, got: np.ndarray
) -> Diagnosis | None:
    """`outputs`: logits (..., classes), or predictions, of each batch; `expected` and `got`: the losses of each."""
    found = _classification(outputs, inputs, expected, got) or _regression(outputs, inputs, expected, got)
    return _narrow(outputs, expected, got) if found is None else found.diagnosis("loss")


def _narrow(outputs: Sequence[np.ndarray], expected: np.ndarray, got: np.ndarray) -> Diagnosis | None:
    """Losses, or the sums that they are means of, that are numbers of a narrower type."""
    error = float(np.abs(got - expected).max() / max(float(np.abs(expected).max()), 1e-300))
    for name, bits, called in WIDTHS:
        if not 2.0**-bits / 50 < error < 16 * 2.0**-bits:
            continue
        for loss, output in zip(got, outputs, strict=True):
            sums = loss * np.arange(1, output[..., 0].size + 1)
            # A mean of so many. By chance none of them is a number of so few bits.
            if not np.isclose(rounded_to(sums, bits), sums, rtol=1e-13, atol=0.0).any():
                break
        else:
            sentence = f"The port's loss is a number of {name}, {error:.1e} from the reference's"
            return Diagnosis(kind=called, module="loss", sentence=sentence, fix="compute the loss in float32 or better")
    return None


def _classification(
    outputs: Sequence[np.ndarray], inputs: Sequence[Inputs], expected: np.ndarray, got: np.ndarray
) -> Explanation | None:
    shapes = [logits.shape[:-1] for logits in outputs]
    names = [n for n, a in inputs[0].items() if np.issubdtype(a.dtype, np.integer) and a.shape == shapes[0]]
    if not names or any(logits.ndim < 2 for logits in outputs):
        return None
    tables = [_Losses(logits, batch) for logits, batch in zip(outputs, inputs, strict=True)]
    seen = {int(i) for batch in inputs for name in names for i in np.unique(batch[name])}
    ignored: list[int | None] = [0, None, -100, -1, 1, 2, *sorted(i for i in seen if i < 0)]

    def formula(f: Mapping[str, Any]) -> np.ndarray:
        return np.array([table.loss(f) for table in tables])

    factors = (
        Factor(
            "targets",
            TARGETS,
            tuple(Option(n, n) for n in reversed(names)),
            what="targets",
            free=True,
            fix="use {reference}",
        ),
        Factor(
            "ignore",
            PADDING,
            tuple(Option(i, "none" if i is None else str(i)) for i in dict.fromkeys(ignored)),
            what="id that does not count",
            free=True,
            fix="leave out positions whose target is {reference}",
        ),
        Factor(
            "amount",
            SMOOTHING,
            tuple(Option(a, f"{a:g}") for a in AMOUNTS),
            what="label smoothing",
            free=True,
            fix="smooth by {reference}",
        ),
        Factor(
            "spread",
            SPREAD,
            tuple(Option(s, WORDS[s]) for s in SPREADS),
            what="spread of the smoothing mass",
            free=True,
            fix="spread the smoothing mass over {reference}",
        ),
        Factor(
            "reduction",
            REDUCTION,
            tuple(Option(r, REDUCTION_WORDS[r]) for r in REDUCTIONS),
            what="loss",
            free=True,
            fix="return {reference}",
        ),
        Factor(
            "shift",
            TARGETS,
            (
                Option(0, "of the position itself"),
                Option(1, "of the position before"),
                Option(-1, "of the position after"),
            ),
            what="target",
            fix="compare with the target {reference}",
        ),
        Factor(
            "factor",
            FACTOR,
            tuple(Option(v, f"{v:.6g}") for v in (1.0, 2.0, 0.5, 1 / np.log(2.0), -1.0)),
            what="factor of the loss",
            fix="multiply the loss by {reference}",
        ),
    )
    return explain(formula, factors, expected=expected, got=got, unusual=0)


class _Losses:
    """Losses of one batch of logits."""

    def __init__(self, logits: np.ndarray, inputs: Inputs):
        self.inputs = inputs
        logits = logits.astype(np.float64)
        largest = logits.max(axis=-1, keepdims=True)
        normaliser = largest + np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))
        self.costs = normaliser - logits  # -log p of every class
        self.total = self.costs.sum(axis=-1)

    def loss(self, f: Mapping[str, Any]) -> float:
        targets = np.roll(self.inputs[f["targets"]], f["shift"], axis=-1)
        classes = self.costs.shape[-1]
        index = np.clip(targets, 0, classes - 1)
        nll = np.take_along_axis(self.costs, index[..., None], axis=-1)[..., 0]
        counts = np.ones(targets.shape, bool) if f["ignore"] is None else targets != f["ignore"]
        pad = self.costs[..., f["ignore"]] if f["ignore"] in range(classes) else np.zeros_like(nll)
        others, number = {
            "K": (self.total, classes),
            "K - 1": (self.total - nll, classes - 1),
            "K - 2": (self.total - nll - pad, classes - 2),
            "K - 1 without padding": (self.total - pad, classes - 1),
        }[f["spread"]]
        cost = (1 - f["amount"]) * nll + f["amount"] * others / max(1, number)
        cost = np.where(counts, cost, 0.0)
        return _reduced(cost, counts, f["reduction"]) * float(f["factor"])


def _reduced(cost: np.ndarray, counts: np.ndarray, reduction: str) -> float:
    if reduction == "sentence":
        costs, numbers = (array.reshape(array.shape[0], -1).sum(axis=1) for array in (cost, counts))
        return float((costs / numbers).mean())
    below = {"token": counts.sum(), "sum": 1, "position": cost.size, "batch": cost.shape[0]}[reduction]
    return float(cost.sum() / below)


def _regression(
    outputs: Sequence[np.ndarray], inputs: Sequence[Inputs], expected: np.ndarray, got: np.ndarray
) -> Explanation | None:
    names = [n for n, a in inputs[0].items() if np.issubdtype(a.dtype, np.floating) and a.shape == outputs[0].shape]
    if not names:
        return None

    def formula(f: Mapping[str, Any]) -> np.ndarray:
        losses = []
        for output, batch in zip(outputs, inputs, strict=True):
            error = output.astype(np.float64) - batch[f["targets"]].astype(np.float64)
            cost = {
                "squared": error**2,
                "absolute": np.abs(error),
                "Huber": np.where(np.abs(error) < 1, 0.5 * error**2, np.abs(error) - 0.5),
            }[f["cost"]]
            losses.append({"mean": cost.mean(), "sum": cost.sum(), "batch": cost.sum() / cost.shape[0]}[f["reduction"]])
        return np.array(losses) * f["factor"]

    factors = (
        Factor("targets", TARGETS, tuple(Option(n, n) for n in names), free=True),
        Factor(
            "cost",
            REGRESSION,
            tuple(Option(c, c) for c in ("squared", "absolute", "Huber")),
            what="error",
            free=True,
            fix="use the {reference} error",
        ),
        Factor(
            "reduction",
            REDUCTION,
            (
                Option("mean", "a mean over all elements"),
                Option("sum", "a sum"),
                Option("batch", "a sum divided by the size of the batch"),
            ),
            what="loss",
            free=True,
            fix="return {reference}",
        ),
        Factor(
            "factor",
            FACTOR,
            tuple(Option(v, f"{v:g}") for v in (1.0, 0.5, 2.0)),
            what="factor of the loss",
            free=True,
            fix="multiply the loss by {reference}",
        ),
    )
    return explain(formula, factors, expected=expected, got=got, unusual=0)
