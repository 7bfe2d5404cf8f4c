"""Embeddings: which table, which row, which scale."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from parity.diagnose.between import EMBEDDING_SCALE, EMBEDDING_SCALED_TWICE, scale_kind
from parity.diagnose.case import Case
from parity.diagnose.diagnosis import Diagnosis, kind
from parity.diagnose.engine import Factor, Option, explain

TABLE = kind("wrong embedding table", "a table that belongs to another module, or is tied where it should not be")
PADDING_ROW = kind("padding row zeroed", "the row of the padding id is zero on one side")
IDS = kind("ids shifted", "ids one too high or too low, or clamped")
IDS_PLACE = kind("ids shifted along the length", "each position reads its neighbour's id")


def embedding(case: Case) -> Diagnosis | None:
    """Rows of a table at the ids that a module is given."""
    tables = dict(_tables(case))
    ids = next((a for a in case.given_ids if np.issubdtype(a.dtype, np.integer)), None)
    if (
        case.given
        or not case.leaf
        or case.discrete
        or ids is None
        or not tables
        or case.expected.shape[: ids.ndim] != ids.shape
    ):
        return None
    width = case.expected.shape[-1]

    def formula(f: Mapping[str, Any]) -> np.ndarray | None:
        table = tables[f["table"]]
        moved = np.roll(ids, f["place"], axis=-1)
        index = _moved(moved, f["ids"], table.shape[0])
        rows = table[index] * f["scale"]
        if f["zero"] is not None:
            rows = np.where((moved == f["zero"])[..., None], 0.0, rows)
        return np.asarray(rows)

    root = math.sqrt(width)
    scales = [
        Option(1.0, "1"),
        Option(root, f"√{width}"),
        Option(1 / root, f"1/√{width}"),
        Option(float(width), f"{width}"),
    ]
    scales += [Option(value, f"{value:.6g}") for value in _solved(case, ids, tables[""])]
    seen = sorted({int(i) for i in np.unique(ids)})[:4]
    factors = (
        Factor(
            "scale",
            lambda r, p: _scale(r, p, width),
            tuple(scales),
            what="factor of the embedding",
            free=True,
            fix="multiply the rows by {reference}",
        ),
        Factor(
            "zero",
            PADDING_ROW,
            (Option(None, "none"), *(Option(i, f"that of id {i}") for i in seen)),
            what="row that is zero",
            also_right=1,
            fix="the row that is zero must be {reference}",
        ),
        Factor(
            "table",
            TABLE,
            tuple(Option(n, f"that of {n}" if n else "its own") for n in tables),
            what="table",
            fix="read {reference}",
        ),
        Factor("ids", IDS, tuple(Option(v, w) for v, w in _IDS), what="row", fix="read the row {reference}"),
        Factor(
            "place",
            IDS_PLACE,
            (
                Option(0, "of the position itself"),
                Option(1, "of the position before"),
                Option(-1, "of the position after"),
            ),
            what="id",
            fix="read the id {reference}",
        ),
    )
    found = explain(formula, factors, expected=case.expected, got=case.got)
    return None if found is None else found.diagnosis(case.module)


_IDS = (
    (0, "of the id"),
    (1, "of the id + 1"),
    (-1, "of the id - 1"),
    (2, "of the id + 2"),
    (-2, "of the id - 2"),
    ("clip 1", "of the id, at most the last but one"),
    ("reverse", "counted from the end"),
)


def _moved(ids: np.ndarray, how: Any, rows: int) -> np.ndarray:
    if how == "clip 1":
        return np.minimum(ids, rows - 2)
    if how == "reverse":
        return rows - 1 - ids
    return np.clip(ids + how, 0, rows - 1)


def _tables(case: Case) -> Iterator[tuple[str, np.ndarray]]:
    width = case.expected.shape[-1] if case.expected.ndim else 0
    own = [a for a in case.weights.values() if a.ndim == 2 and a.shape[1] == width]
    others = [(n, a) for n, a in case.other_weights.items() if a.ndim == 2 and width in a.shape]
    largest = max((int(ids.max()) for ids in case.given_ids if ids.size and ids.dtype != bool), default=0)
    others = [(n, a if a.shape[1] == width else a.T) for n, a in others]
    others = [(n, a) for n, a in others if a.shape[0] > largest]
    # A module without a table of its own shares that of another: the first one that is large enough.
    if own:
        yield "", own[0]
    elif others:
        yield "", others[0][1]
        others = others[1:]
    yield from others[:12]


def _solved(case: Case, ids: np.ndarray, table: np.ndarray) -> Iterator[float]:
    rows = table[np.clip(ids, 0, table.shape[0] - 1)].ravel()
    for result in (case.expected, case.got):
        flat = result.astype(np.float64).ravel()
        if flat.shape == rows.shape and rows.any() and np.isfinite(flat).all():
            solved = float(rows @ flat / (rows @ rows))
            residual = float(np.linalg.norm(solved * rows - flat))
            if residual < 1e-9 * float(np.linalg.norm(flat)) and abs(solved - 1.0) > 1e-9:
                yield solved


def _scale(reference: float, port: float, width: int) -> str:
    ratio = port / reference
    root = math.sqrt(width)
    if abs(ratio * root - 1.0) < 1e-9:
        return EMBEDDING_SCALE
    if abs(ratio / root - 1.0) < 1e-9:
        return EMBEDDING_SCALED_TWICE
    return scale_kind(ratio, width)
