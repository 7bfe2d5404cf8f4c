"""Gradient clipping, on the evidence of rung 11."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.diagnose.diagnosis import Diagnosis, kind
from parity.diagnose.engine import Factor, Option, explain

ADDED = kind("clip constant", "torch divides by norm + 1e-6, optax by the norm")
PER_TENSOR = kind("clip per tensor", "each tensor clipped by itself instead of all of them by their common norm")
BY_VALUE = kind("clip by value", "elements clipped instead of the norm")
MISSING = kind("clipping missing", "gradients that are not clipped")
LIMIT = kind("clip limit", "another limit")
NORM = kind("clip norm", "another norm: of squares, absolute values or the largest element")
ALWAYS = kind("clip always", "gradients brought to the limit even when they are below it")

WORDS = {
    "global": "by their common norm",
    "tensor": "each tensor by its own norm",
    "value": "each element",
    "none": "not at all",
}


def explain_clipping(evidence: Mapping[str, Any]) -> Diagnosis | None:
    """`gradients`, `reference` and `port`: tensors by name; `max_norm`."""
    gradients = {n: np.asarray(g, np.float64) for n, g in evidence["gradients"].items()}
    expected, got = (
        np.concatenate([np.asarray(evidence[side][n], np.float64).ravel() for n in gradients])
        for side in ("reference", "port")
    )
    limit = float(evidence["max_norm"])
    norms = {"2": float(np.sqrt(sum((g * g).sum() for g in gradients.values())))}
    norms["1"] = float(sum(np.abs(g).sum() for g in gradients.values()))
    norms["largest"] = float(max(np.abs(g).max(initial=0.0) for g in gradients.values()))
    norms["squared"] = norms["2"] ** 2
    norms["mean"] = norms["2"] / np.sqrt(sum(g.size for g in gradients.values()))

    def formula(f: Mapping[str, Any]) -> np.ndarray:
        bound = f["limit"]
        if f["how"] == "none":
            return np.concatenate([g.ravel() for g in gradients.values()])
        if f["how"] == "value":
            return np.concatenate([np.clip(g, -bound, bound).ravel() for g in gradients.values()])

        def scaled(g: np.ndarray, norm: float) -> np.ndarray:
            factor = bound / (norm + f["added"]) if norm + f["added"] > 0 else 1.0
            return np.asarray(g * (factor if f["always"] == "yes" else min(1.0, factor))).ravel()

        if f["how"] == "tensor":
            return np.concatenate([scaled(g, float(np.linalg.norm(g.ravel()))) for g in gradients.values()])
        return np.concatenate([scaled(g, norms[f["norm"]]) for g in gradients.values()])

    factors = (
        Factor(
            "added",
            ADDED,
            tuple(Option(a, f"{a:g}") for a in (0.0, 1e-6, 1e-8, 1e-5, 1e-7, 1e-12)),
            what="constant added to the norm",
            also_right=5,
            fix="divide by norm + {reference}",
        ),
        Factor(
            "how",
            lambda r, p: MISSING if "none" in (r, p) else BY_VALUE if "value" in (r, p) else PER_TENSOR,
            tuple(Option(h, w) for h, w in WORDS.items()),
            what="clipping",
            also_right=3,
            fix="clip {reference}",
        ),
        Factor(
            "limit",
            LIMIT,
            tuple(Option(v, f"{v:.6g}") for v in _limits(limit, got)),
            what="limit",
            fix="clip to {reference}",
        ),
        Factor("norm", NORM, tuple(Option(n, n) for n in norms), what="norm", fix="use the norm: {reference}"),
        Factor(
            "always",
            ALWAYS,
            (Option("no", "only above the limit"), Option("yes", "always")),
            what="scaling",
            also_right=1,
            fix="scale {reference}",
        ),
    )
    found = explain(formula, factors, expected=expected, got=got, unusual=0)
    return None if found is None else found.diagnosis("clipping")


def _limits(limit: float, got: np.ndarray) -> list[float]:
    values = [limit, 1.0, 0.5, 5.0, 10.0, 0.1, 2 * limit, limit / 2, limit**2, limit**0.5]
    left = float(np.linalg.norm(got))
    return list(dict.fromkeys([*values, float(f"{left:.6g}"), float(np.abs(got).max(initial=0.0))]))
