"""Largest and mean values of windows, channels last or behind the batch: window, stride, padding, what counts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.diagnose.between import POOLING
from parity.diagnose.case import Case
from parity.diagnose.convolution import PADDING, STRIDE
from parity.diagnose.diagnosis import Diagnosis, kind
from parity.diagnose.engine import Factor, Option, explain

WINDOW = kind("pooling window", "a window of another size")
COUNTED = kind("padding counted in the pooling", "a mean over a window that counts padding, or does not")


def pooling(case: Case) -> Diagnosis | None:
    """A module without weights that makes a feature map smaller."""
    if not case.leaf or case.weights or len(case.given) != 1 or case.x.ndim not in (3, 4):
        return None
    if case.expected.ndim != case.x.ndim or case.got.ndim != case.x.ndim:
        return None
    if case.expected.shape[-1] != case.x.shape[-1] and case.expected.shape[1] == case.x.shape[1]:
        moved = [np.moveaxis(a, 1, -1) for a in (case.x, case.expected, case.got)]
        case = dataclasses.replace(case, given=(moved[0],), expected=moved[1], got=moved[2])
    if case.expected.shape[-1] != case.x.shape[-1]:
        return None
    x, rank = case.x.astype(np.float64), case.x.ndim - 2

    def formula(f: Mapping[str, Any]) -> np.ndarray | None:
        pad, window = f["padding"], f["window"]
        around = [(0, 0), *([(pad, pad + f["behind"])] * rank), (0, 0)]
        if 2 * pad > window or min(x.shape[1:-1]) + 2 * pad < window:
            return None
        fill = -np.inf if f["how"] == "largest" else 0.0
        windows = _windows(np.pad(x, around, constant_values=fill), window, f["stride"], rank)
        axes = tuple(range(-rank, 0))
        if f["how"] == "largest":
            return np.asarray(windows.max(axis=axes))
        if f["counted"] == "yes":
            return np.asarray(windows.mean(axis=axes))
        inside = _windows(np.pad(np.ones_like(x), around), window, f["stride"], rank)
        return np.asarray(windows.sum(axis=axes) / inside.sum(axis=axes))

    factors = (
        Factor("how", POOLING, (Option("largest", "largest"), Option("mean", "mean")), what="value", free=True,
               fix="take the {reference} value"),
        Factor("window", WINDOW, tuple(Option(n, str(n)) for n in (2, 3, 4, 5)), what="window", free=True,
               fix="use a window of {reference}"),
        Factor("stride", STRIDE, tuple(Option(n, str(n)) for n in (2, 1, 3, 4)), what="stride", free=True,
               fix="strides of {reference}"),
        Factor("padding", PADDING, tuple(Option(n, str(n)) for n in (0, 1, 2)), what="padding", free=True,
               fix="pad by {reference}"),
        Factor("counted", COUNTED, (Option("yes", "counted"), Option("no", "not counted")), what="padding", free=True,
               fix="count_include_pad: padding must be {reference}"),
        Factor("behind", PADDING, (Option(0, "the same on both sides"), Option(1, "one more behind")), what="padding",
               also_right=1, fix="pad {reference}"),
    )  # fmt: skip
    found = explain(formula, factors, expected=case.expected, got=case.got, unusual=0)
    return None if found is None else found.diagnosis(case.module)


def _windows(x: np.ndarray, window: int, stride: int, rank: int) -> np.ndarray:
    axes = tuple(range(1, 1 + rank))
    windows = np.lib.stride_tricks.sliding_window_view(x, (window,) * rank, axis=axes)
    return np.asarray(windows[(slice(None), *([slice(None, None, stride)] * rank))])
