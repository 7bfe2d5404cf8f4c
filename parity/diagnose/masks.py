"""Attention masks by their factors: padding, look-ahead, window; True = may attend."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parity.diagnose.diagnosis import kind
from parity.diagnose.engine import Factor, Option

INVERTED = kind("mask inverted", "True means `may attend` on one side and `is forbidden` on the other")
ON_QUERIES = kind("padding mask on queries", "padding masked in query rows instead of key columns")
MISSING = kind("mask missing", "a mask that the port does not apply")
ADDED = kind("mask added", "a mask that only the port applies")
TRANSPOSED = kind("mask transposed", "queries and keys of a mask exchanged")
LOOK_AHEAD_MISSING = kind("look-ahead mask missing", "a decoder that sees later positions")
LOOK_AHEAD_ADDED = kind("look-ahead mask added", "an encoder that does not see later positions")
LOOK_AHEAD_OFF = kind("look-ahead mask off by one", "a position does not see itself, or sees the next one")
WINDOW = kind("window", "a local window of another width, or on one side only")
ROWS = kind("fully masked rows", "where every key is masked: zeros, the mean of the values, or NaN")
FILL = kind("mask fill", "a fill that is not negative enough, added or multiplied instead of filled in")

FORBIDDEN_BELOW = -1e3
"""A floating-point mask is added to scores: this and less forbids."""

FILLS = (-100.0, -10.0, -1.0, 0.0, -2.0, -3.0, -5.0, -9.0, -20.0, -30.0, -50.0, 1e-9, -1e-9)
"""Not negative enough: exp of them is no zero, or scores may be lower."""

MaskArray = tuple[str, np.ndarray]
"""(`keys` or `pairs`, True = as given; already broadcastable to (batch, heads, queries, keys))."""


def found_masks(arrays: Sequence[np.ndarray], batch: int, queries: int, keys: int) -> list[MaskArray]:
    """Arrays among a call's inputs that can be masks, in every reading that their shapes allow."""
    found: list[MaskArray] = []
    for array in arrays:
        mask = _as_bool(array)
        if mask is None:
            continue
        if mask.shape == (batch, keys):
            found.append(("keys", mask[:, None, None, :]))
        if mask.shape == (queries, keys) and queries > 1:
            found.append(("pairs", mask[None, None]))
        if mask.shape == (batch, queries, keys):
            found.append(("pairs", mask[:, None]))
        if mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[-1] == keys and mask.shape[2] in (1, queries):
            found.append(("keys" if mask.shape[2] == 1 else "pairs", mask))
    return found


def _as_bool(array: np.ndarray) -> np.ndarray | None:
    if array.dtype == bool:
        return array
    if np.issubdtype(array.dtype, np.floating):
        low = array <= FORBIDDEN_BELOW
        return ~low if array.ndim >= 2 and low.any() and not array[~low].any() else None
    return array.astype(bool) if array.size and np.isin(array, (0, 1)).all() else None


def mask_factors(masks: Sequence[MaskArray], queries: int, keys: int, *, windows: bool) -> list[Factor]:
    """Factors for `allowed`."""
    factors = []
    for number, (shape, _) in enumerate(masks):
        what = "mask" if shape == "pairs" else "padding mask"
        options = [Option("attend", "True for what may be attended to"), Option("forbid", "True for what is forbidden")]
        options.append(Option("ignored", "not applied"))
        if shape == "keys" and queries == keys:
            options.append(Option("queries", "applied to query rows"))
            options.append(Option("forbid queries", "applied to query rows, inverted"))
            options.append(Option("both", "applied to query rows as well as to key columns"))
        if shape == "pairs" and queries == keys:
            options += [Option("transposed", "transposed"), Option("forbid transposed", "transposed and inverted")]
        factors.append(
            Factor(
                f"mask {number}",
                _mask_kind,
                tuple(options),
                what=what,
                also_right=2,
                fix=f"the {what} must be {{reference}}",
            )
        )
    look_ahead = (
        Option("none", "absent"),
        Option("causal", "key ≤ query"),
        Option("inverted", "key > query"),
        Option("transposed", "key ≥ query"),
        Option("strict", "key < query"),
        Option("next", "key ≤ query + 1"),
    )
    factors.append(
        Factor(
            "look-ahead",
            _look_ahead_kind,
            look_ahead,
            what="look-ahead mask",
            also_right=1,
            fix="the look-ahead mask must be {reference}",
        )
    )
    factors.append(
        Factor(
            "all",
            INVERTED,
            (Option("usual", "as it is"), Option("inverted", "inverted")),
            what="mask as a whole",
            fix="invert the mask once: True must mean what it means in the reference",
        )
    )
    if windows:
        options = [Option((None, ""), "absent")]
        options += [Option((w, ""), f"{w} to either side") for w in range(max(queries, keys))]
        options += [Option((w, "past"), f"{w} into the past") for w in range(max(queries, keys))]
        factors.append(
            Factor("window", WINDOW, tuple(options), what="window", free=True, fix="the window: {reference}")
        )
    rows = (Option("zeros", "zeros"), Option("mean", "the mean of all values"), Option("nan", "NaN"))
    factors.append(
        Factor(
            "rows",
            ROWS,
            rows,
            what="output where every key is masked",
            free=True,
            fix="where no key may be attended to, return {reference}",
        )
    )
    fill = [Option(None, "minus infinity")]
    for value in FILLS:
        fill.append(Option(("fill", value), f"{value:g}"))
        fill.append(Option(("fill, then zero", value), f"{value:g}, zeroed after the softmax"))
        fill.append(Option(("add", value), f"{value:g}, added"))
    fill += [
        Option(("add", 1.0), "+1, added"),
        Option(("after", 0.0), "0, after the softmax"),
        Option(("times", 0.0), "0, multiplied before the softmax"),
        Option(("allowed", 1.0), "1 added to what is allowed"),
    ]
    factors.append(
        Factor("fill", FILL, tuple(fill), what="fill of masked scores", fix="fill masked scores with {reference}")
    )
    return factors


def allowed(f: Mapping[str, Any], masks: Sequence[MaskArray], batch: int, queries: int, keys: int) -> np.ndarray:
    """(batch, 1 or heads, queries, keys)."""
    result = np.ones((batch, 1, queries, keys), bool)
    for number, (shape, given) in enumerate(masks):
        how = f[f"mask {number}"]
        if how == "ignored":
            continue
        mask = ~given if how.startswith("forbid") else given
        if how.endswith("queries") and shape == "keys":
            mask = np.swapaxes(mask, -1, -2)
        if how == "both":
            mask = mask & np.swapaxes(mask, -1, -2)
        if how.endswith("transposed"):
            mask = np.swapaxes(mask, -1, -2)
        result = result & mask
    q, k = np.arange(queries)[:, None], np.arange(keys)[None, :]
    result = (
        result
        & {
            "none": q >= -1,
            "causal": k <= q,
            "inverted": k > q,
            "transposed": k >= q,
            "strict": k < q,
            "next": k <= q + 1,
        }[f["look-ahead"]]
    )
    width, side = f.get("window", (None, ""))
    if width is not None:
        result = result & ((q - k <= width) & (q >= k) if side == "past" else np.abs(q - k) <= width)
    return ~result if f["all"] == "inverted" else result


def _mask_kind(reference: str, port: str) -> str:
    if port == "ignored":
        return MISSING
    if reference == "ignored":
        return ADDED
    if "queries" in port or "queries" in reference or "both" in (port, reference):
        return ON_QUERIES
    if "transposed" in port or "transposed" in reference:
        return TRANSPOSED
    return INVERTED


def _look_ahead_kind(reference: str, port: str) -> str:
    if port == "none":
        return LOOK_AHEAD_MISSING
    if "inverted" in (reference, port) and "none" not in (reference, port):
        return INVERTED
    if "transposed" in (reference, port) and "none" not in (reference, port):
        return TRANSPOSED
    if "none" in (reference, port):
        return LOOK_AHEAD_ADDED
    return LOOK_AHEAD_OFF
