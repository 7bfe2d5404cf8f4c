"""Position tables: sinusoids in their arrangements, rows of a learned table."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from parity.diagnose.between import POSITIONS_MISSING
from parity.diagnose.case import Case
from parity.diagnose.diagnosis import Diagnosis, kind
from parity.diagnose.engine import Explanation, Factor, Option, explain

LAYOUT = kind("positions layout", "sines and cosines interleaved, or all sines before all cosines")
DIVISOR = kind("positions divisor", "the exponent divided by d/2 - 1 instead of d/2")
OFFSET = kind("positions offset", "positions counted from another number")
BASE = kind("positions base", "another base than 10,000")
EXCHANGED = kind("positions sine and cosine exchanged", "sine where the other side has cosine")
SCALE = kind("positions scale", "positions multiplied by a constant")
STEP = kind("positions step", "positions squeezed, stretched or counted backwards")
TABLE = kind("positions table", "a learned table on one side, sinusoids or another table on the other")

ARRANGEMENTS = (("interleaved", "interleaved"), ("concatenated", "all sines before all cosines"))
BASES = (10_000.0, 1_000.0, 100.0, 100_000.0, 500_000.0, 1_000_000.0)
OFFSETS = (0, 1, -1, 2, -2, 3)


def sinusoids(length: int, width: int, f: Mapping[str, Any]) -> np.ndarray | None:
    """A table by its factors."""
    half = width // 2
    if width % 2 or half < 2:
        return None
    divisor = {"half": half, "half - 1": half - 1, "width": width}[f["divisor"]]
    frequencies = f["base"] ** (-np.arange(half) / divisor)
    if f["frequency"] == "decreasing twice":  # 2 · 2i/d: the index doubled once too often
        frequencies = frequencies**2
    positions = (np.arange(length)[::-1] if f["step"] == "backwards" else np.arange(length) * f["step"]) + f["offset"]
    angles = positions[:, None] * frequencies[None, :]
    pair = [np.sin(angles), np.cos(angles)]
    pair = pair[::-1] if f["exchanged"] == "yes" else pair
    if f["layout"] == "interleaved":
        table = np.stack(pair, axis=-1).reshape(length, width)
    else:
        table = np.concatenate(pair, axis=-1)
    return np.asarray(table * f["scale"])


def positions(case: Case) -> Diagnosis | None:
    """A module that is given no more than ids or a length, and returns a table with a row a position."""
    if case.given or not case.leaf or case.expected.ndim not in (2, 3) or case.expected.shape[-1] < 4:
        return None
    found = between_tables(case.expected, case.got, case)
    return None if found is None else found.diagnosis(case.module)


def between_tables(expected: np.ndarray, got: np.ndarray, case: Case | None = None) -> Explanation | None:
    """Two tables (length, width), or (batch, length, width) where all of the batch is the same."""
    if expected.shape != got.shape:
        return None
    one, other = _one(expected), _one(got)
    if one is None or other is None:
        return None
    length, width = one.shape
    learned = dict(_learned(case, width)) if case is not None else {}

    def formula(f: Mapping[str, Any]) -> np.ndarray | None:
        if f["table"] == "":
            return sinusoids(length, width, f)
        table = learned[f["table"]]
        index = np.arange(length) * (1 if f["step"] == "backwards" else f["step"]) + f["offset"]
        if f["step"] == "backwards":
            index = index[::-1]
        rows = table[np.clip(index.astype(int), 0, table.shape[0] - 1)]
        return np.asarray(rows * f["scale"])

    scales = dict.fromkeys([1.0, math.sqrt(width), 1 / math.sqrt(width), 2.0, 0.5, 0.0])
    tables = [Option("", "sinusoids")] + [Option(n, f"the rows of {n}") for n in learned]
    factors = (
        Factor("table", TABLE, tuple(tables), what="table", free=True, fix="use {reference}"),
        Factor(
            "layout",
            LAYOUT,
            tuple(Option(v, w) for v, w in ARRANGEMENTS),
            what="layout of sines and cosines",
            free=True,
            fix="put sines and cosines {reference}",
        ),
        Factor(
            "divisor",
            DIVISOR,
            (Option("half", "d/2"), Option("half - 1", "d/2 - 1"), Option("width", "d")),
            what="divisor in the exponent",
            free=True,
            fix="divide the exponent by {reference}",
        ),
        Factor(
            "offset",
            OFFSET,
            tuple(Option(o, str(o)) for o in OFFSETS),
            what="number of the first position",
            free=True,
            fix="count positions from {reference}",
        ),
        Factor(
            "base",
            BASE,
            tuple(Option(b, f"{b:,.0f}") for b in BASES),
            what="base of the wavelengths",
            also_right=5,
            fix="use base {reference}",
        ),
        Factor(
            "exchanged",
            EXCHANGED,
            (Option("no", "sine, then cosine"), Option("yes", "cosine, then sine")),
            what="order",
            also_right=1,
            fix="put {reference}",
        ),
        Factor(
            "scale",
            lambda r, p: POSITIONS_MISSING if p == 0.0 else SCALE,
            tuple(Option(s, f"{s:.6g}") for s in scales),
            what="factor of the positions",
            also_right=2,
            fix="multiply positions by {reference}",
        ),
        Factor(
            "step",
            STEP,
            tuple(Option(v, w) for v, w in _steps(one, other)),
            what="step from position to position",
            fix="let positions run {reference}",
        ),
        Factor(
            "frequency",
            BASE,
            (Option("usual", "2i/d"), Option("decreasing twice", "4i/d")),
            what="exponent",
            fix="use the exponent {reference}",
        ),
    )
    return explain(formula, factors, expected=one, got=other)


def _steps(one: np.ndarray, other: np.ndarray) -> Iterator[tuple[Any, str]]:
    yield 1.0, "by 1"
    yield "backwards", "backwards"
    yield 2.0, "by 2"
    yield 0.5, "by 1/2"
    yield 0.0, "not at all"
    for table in (one, other):
        # The first column of a sinusoid is the sine of the position itself: its steps show how positions are squeezed.
        if len(table) > 1 and abs(table[1, 0] - table[0, 0]) < 1 and abs(table[0, 0]) < 1e-12:
            step = float(np.arcsin(np.clip(table[1, 0], -1, 1)))
            if 1e-6 < step < 0.999:
                yield step, f"by {step:.6g}"


def _one(table: np.ndarray) -> np.ndarray | None:
    table = table.astype(np.float64)
    if table.ndim == 2:
        return table
    return table[0] if all(np.array_equal(row, table[0]) for row in table[1:]) else None


def _learned(case: Case, width: int) -> Iterator[tuple[str, np.ndarray]]:
    for name, array in case.weights.items():
        if array.ndim == 2 and array.shape[1] == width:
            yield f"its {name}", array
    for name, array in case.other_weights.items():
        if array.ndim == 2 and array.shape[1] == width and "pos" in name.lower():
            yield name, array
