"""Convolutions and transposed convolutions: padding, strides, and which way round the kernel is.

Computed channels last; a port that keeps torch's layouts is brought to that.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from parity.diagnose.case import Case
from parity.diagnose.diagnosis import Diagnosis, kind
from parity.diagnose.engine import Factor, Option, explain
from parity.diagnose.linear import BIAS, BIAS_TWICE, KERNELS, SCALED

FLIPPED = kind("convolution kernel flipped", "a kernel whose taps are in the reverse order")
AXES = kind("convolution kernel axes", "a kernel whose axes are exchanged: height and width, or input and output")
PADDING = kind("convolution padding", "padding of another width, on other sides, or of another kind")
STRIDE = kind("convolution stride", "another stride")
DILATION = kind("convolution dilation", "another dilation of the kernel")

WIDEST = 3
"""Strides and dilations that are tried."""
MODES = (("constant", "zeros"), ("wrap", "the other end"), ("reflect", "a reflection"), ("edge", "the edge"))


def convolution(case: Case) -> Diagnosis | None:
    """A module whose kernel has an axis for each but the batch, and one more."""
    kernel = (
        next((a for n, a in case.weights.items() if n in KERNELS and a.ndim == case.x.ndim), None)
        if case.given
        else None
    )
    if kernel is None or not case.leaf or case.x.ndim < 3:
        return None
    transposed = any("Transpose" in name for name in case.types)
    if kernel.shape[0] == case.expected.shape[1] and kernel.shape[-2:] != (case.x.shape[-1], case.expected.shape[-1]):
        case, kernel = _channels_last(case), np.moveaxis(kernel, (1, 0), (-2, -1))
    layer = _Layer(case, kernel, transposed=transposed)
    found = explain(layer, layer.factors(), expected=case.expected, got=case.got, unusual=1)
    return None if found is None else found.diagnosis(case.module)


def _channels_last(case: Case) -> Case:
    given, expected, got = (np.moveaxis(a, 1, -1) for a in (case.x, case.expected, case.got))
    return dataclasses.replace(case, given=(given,), expected=expected, got=got)


class _Layer:
    def __init__(self, case: Case, kernel: np.ndarray, *, transposed: bool):
        self.x, self.kernel, self.transposed = case.x.astype(np.float64), kernel, transposed
        self.bias = next((a for n, a in case.weights.items() if n == "bias"), np.zeros(1))
        self.expected, self.settings = case.expected, case.settings
        self.rank = kernel.ndim - 2

    def factors(self) -> list[Factor]:
        width = range(1, WIDEST + 1)
        flips = (Option("no", "as stored"), Option("yes", "reversed"))
        orders = [Option("", "as stored"), *(Option(o, f"in the order {o}") for o in self._orders())]
        times = [Option(1.0, "added once")] + (
            [Option(0.0, "left out"), Option(2.0, "added twice")] if self.bias.any() else []
        )
        return [
            Factor(
                "stride",
                STRIDE,
                tuple(Option(s, _words(s)) for s in self._strides(width)),
                what="stride",
                free=True,
                fix="strides={reference}",
            ),
            Factor("padding", PADDING, tuple(self._paddings()), what="padding", free=True, fix="padding: {reference}"),
            Factor(
                "flip", FLIPPED, flips, what="kernel", also_right=1, fix="the taps of the kernel must be {reference}"
            ),
            Factor(
                "mode",
                PADDING,
                tuple(Option(m, w) for m, w in MODES),
                what="padding's content",
                also_right=3,
                fix="pad with {reference}",
            ),
            Factor(
                "dilation",
                DILATION,
                tuple(Option(d, str(d)) for d in width),
                what="dilation",
                also_right=WIDEST,
                fix="kernel_dilation={reference}",
            ),
            Factor(
                "space",
                AXES,
                (Option("no", "as they are"), *([Option("yes", "exchanged")] if self.rank == 2 else [])),
                what="height and width",
                fix="height and width must be {reference}",
            ),
            Factor("axes", AXES, tuple(orders), what="axes of the kernel", fix="put the kernel's axes {reference}"),
            Factor(
                "times",
                lambda r, p: BIAS if 0.0 in (r, p) else BIAS_TWICE,
                tuple(times),
                what="bias",
                fix="the bias must be {reference}",
            ),
            Factor(
                "scale",
                SCALED,
                (Option(1.0, "1"), Option(-1.0, "-1"), Option(2.0, "2"), Option(0.5, "1/2")),
                what="factor of the kernel",
                fix="multiply the kernel by {reference}",
            ),
        ]

    def _strides(self, width: range) -> list[tuple[int, ...]]:
        read = [v for v in self.settings.get("strides", ()) if isinstance(v, tuple) and len(v) == self.rank]
        read += [(v,) * self.rank for v in self.settings.get("strides", ()) if isinstance(v, int)]
        mixed = [(1, 2), (2, 1)] if self.rank == 2 else []
        return list(dict.fromkeys([*read, *((s,) * self.rank for s in width), *mixed]))

    def _paddings(self) -> Iterator[Option]:
        """((before, behind) of each axis)."""
        taps = self.kernel.shape[: self.rank]
        half = tuple((n // 2, n // 2) for n in taps)
        yield Option(half, "half of the kernel")
        for pad in range(max(taps) + 1):
            yield Option(((pad, pad),) * self.rank, f"{pad} on either side")
        for pad in range(max(taps)):
            yield Option(((pad, pad + 1),) * self.rank, f"{pad} before, {pad + 1} behind")
            yield Option(((pad + 1, pad),) * self.rank, f"{pad + 1} before, {pad} behind")
        yield Option(tuple((n - 1, 0) for n in taps), "all of it before (causal)")
        if self.rank == 2:
            yield Option(half[::-1], "half of the kernel, height and width exchanged")

    def _orders(self) -> list[tuple[int, ...]]:
        axes = range(self.kernel.ndim)
        spatial = [p for p in itertools.permutations(range(self.rank)) if p != tuple(range(self.rank))]
        orders = [(*p, self.rank, self.rank + 1) for p in spatial]
        return [*orders, (*range(self.rank), self.rank + 1, self.rank)] if len(axes) > 2 else orders

    def __call__(self, f: Mapping[str, Any]) -> np.ndarray | None:
        kernel = self.kernel.transpose(f["axes"]) if f["axes"] else self.kernel
        space = tuple(range(self.rank))
        kernel = np.flip(kernel, space) if f["flip"] == "yes" else kernel
        x, stride = self.x, f["stride"]
        x = x.swapaxes(1, 2) if f["space"] == "yes" else x
        if self.transposed:
            x, stride = _spread(x, stride), (1,) * self.rank
        around = f["padding"]
        for axis, (lo, hi) in enumerate(around):
            reach = f["dilation"] * (kernel.shape[axis] - 1) + 1
            if x.shape[1 + axis] + lo + hi < reach:
                return None
            if f["mode"] in ("reflect", "wrap") and max(lo, hi) >= x.shape[1 + axis]:
                return None
        padded = np.pad(x, [(0, 0), *around, (0, 0)], mode=f["mode"])
        result = _correlate(padded, kernel, stride=stride, dilation=f["dilation"])
        if result is None:
            return None
        result = result.swapaxes(1, 2) if f["space"] == "yes" else result
        result = result * f["scale"]
        return result + f["times"] * self.bias if self.bias.any() else result


def _words(stride: tuple[int, ...]) -> str:
    return str(stride[0]) if len(set(stride)) == 1 else str(stride)


def _spread(x: np.ndarray, strides: tuple[int, ...]) -> np.ndarray:
    """Zeros between the elements of every axis of space."""
    sizes = [(n - 1) * stride + 1 for n, stride in zip(x.shape[1:-1], strides, strict=True)]
    result = np.zeros((x.shape[0], *sizes, x.shape[-1]))
    result[(slice(None), *(slice(None, None, stride) for stride in strides), slice(None))] = x
    return result


def _correlate(x: np.ndarray, kernel: np.ndarray, *, stride: tuple[int, ...], dilation: int) -> np.ndarray | None:
    rank, (features_in, features_out) = kernel.ndim - 2, kernel.shape[-2:]
    if x.shape[-1] % features_in or features_out % (x.shape[-1] // features_in):
        return None
    taps = tuple(dilation * (n - 1) + 1 for n in kernel.shape[:rank])
    axes = tuple(range(1, 1 + rank))
    windows = np.lib.stride_tricks.sliding_window_view(x, taps, axis=axes)
    strided, every = [slice(None, None, n) for n in stride], slice(None)
    windows = windows[(every, *strided, every, *([slice(None, None, dilation)] * rank))]
    groups = x.shape[-1] // features_in
    letters = "hwd"[:rank]
    parts = zip(np.split(windows, groups, axis=1 + rank), np.split(kernel, groups, axis=-1), strict=True)
    return np.concatenate([np.einsum(f"...i{letters},{letters}io->...o", w, k) for w, k in parts], axis=-1)
