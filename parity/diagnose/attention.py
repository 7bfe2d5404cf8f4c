"""Attention between its projections: heads, scale, masks, softmax, which projection plays which part."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from parity.diagnose import dropout, rotary
from parity.diagnose.activations import softmax
from parity.diagnose.between import DROPOUT_SCALE, SOFTMAX_AXIS
from parity.diagnose.case import Case
from parity.diagnose.diagnosis import Diagnosis, kind
from parity.diagnose.dropout import RATES
from parity.diagnose.engine import Factor, Option, explain
from parity.diagnose.linear import HEADS, QKV
from parity.diagnose.masks import MaskArray, allowed, found_masks, mask_factors
from parity.diagnose.projections import Projections, projections

SCALE_MISSING = kind("score scale missing", "scores that are not divided by √head_dim")
SCALE_WIDTH = kind("score scale by another width", "scores divided by √d_model or another root instead of √head_dim")
SCALE_TWICE = kind("score scale applied twice", "scores divided by head_dim, or multiplied")
NOT_TRANSPOSED = kind("heads not transposed", "heads split or merged by a reshape alone")
NUM_HEADS = kind("number of heads", "another number of heads")
REPEATED = kind("key/value heads repeated", "shared key/value heads repeated in another order")
USED_TWICE = kind("projection used twice", "keys used as values, or another projection in two parts")
FUSED = kind("fused q/k/v layout", "one projection for all three, read as other blocks")
NO_SOFTMAX = kind("softmax missing", "scores used as weights")


def attention(case: Case) -> Diagnosis | None:
    """Of a module with query, key and value projections, or one that has their weights."""
    found = projections(case)
    if found is None:
        return None
    # From few factors to many: each stage costs more, and can be mistaken more easily.
    for windows, turned, unusual in ((False, False, 0), (False, True, 0), (True, False, 0), (False, False, 1)):
        core = _Core(case, found, windows=windows, turned=turned)
        if turned and core.head_widths_are_odd:
            continue
        explanation = explain(core, core.factors(), expected=case.expected, got=case.got, unusual=unusual)
        if explanation is not None:
            return explanation.diagnosis(case.module)
    return None


@dataclasses.dataclass
class _Core:
    """softmax(QKᵀ · scale + mask) V, by its factors."""

    case: Case
    given: Projections
    windows: bool
    turned: bool

    def __post_init__(self) -> None:
        self.batch, self.queries, self.width = self.given.q.shape
        self.keys, self.kv_width = self.given.k.shape[1:]
        inputs = [*self.case.given_ids, *self.case.given, *self._ids_of_the_model()]
        self.masks: Sequence[MaskArray] = found_masks(inputs, self.batch, self.queries, self.keys)[:3]
        shape = (self.batch, self.queries, self.keys)
        self.dropped = [m for m in self.case.masks.values() if m.ndim == 4 and (m.shape[0], *m.shape[2:]) == shape]
        self._scores: dict[tuple[Any, ...], tuple[np.ndarray, np.ndarray]] = {}

    def _ids_of_the_model(self) -> list[np.ndarray]:
        """A module that is given no mask may have been built around one: of padding, where the model is given ids."""
        if any(found_masks([a], self.batch, self.queries, self.keys) for a in (*self.case.given_ids, *self.case.given)):
            return []
        ids = [a for a in self.case.inputs.values() if a.shape == (self.batch, self.keys) and a.dtype.kind in "iu"]
        return [a != 0 for a in ids[:1] if (a == 0).any()]

    @property
    def head_widths_are_odd(self) -> bool:
        return all((self.width // heads) % 2 for heads in self._heads())

    def _heads(self) -> list[int]:
        if self.given.heads:
            return [self.given.heads]
        divisors = [h for h in range(1, min(self.width, 128) + 1) if self.width % h == 0]
        read = [value for name, pair in self.case.settings.items() if "head" in name for value in pair]
        return list(dict.fromkeys([*(h for h in divisors if h in read), *divisors]))

    def factors(self) -> list[Factor]:
        """Those of this stage."""
        same = self.given.q.shape == self.given.k.shape == self.given.v.shape
        orders = [*itertools.permutations("qkv"), *itertools.product("qkv", repeat=3)] if same else [tuple("qkv")]
        parts = list(dict.fromkeys("".join(order) for order in orders))
        factors = [
            Factor(
                "heads",
                NUM_HEADS,
                tuple(Option(h, str(h)) for h in self._heads()),
                what="number of heads",
                free=True,
                fix="use {reference} heads",
            ),
            Factor(
                "scale",
                _scale_kind,
                tuple(Option(v, w) for v, w in _SCALES),
                what="factor of the scores",
                also_right=1,
                fix="multiply the scores by {reference}",
            ),
            *mask_factors(self.masks, self.queries, self.keys, windows=self.windows),
            Factor(
                "parts",
                lambda r, p: QKV if sorted(r) == sorted(p) else USED_TWICE,
                tuple(Option(p, _parts_words(p)) for p in parts),
                what="query, key and value",
                fix="use {reference}",
            ),
            Factor(
                "split",
                lambda r, p: HEADS if "head_dim first" in f"{r} {p}" else NOT_TRANSPOSED,
                tuple(Option(v, w) for v, w in _SPLITS),
                what="order of heads",
                fix="split and merge heads: {reference}",
            ),
            Factor(
                "softmax",
                lambda r, p: NO_SOFTMAX if "none" in (r, p) else SOFTMAX_AXIS,
                tuple(Option(v, w) for v, w in _SOFTMAXES),
                what="softmax",
                fix="take the softmax {reference}",
            ),
        ]
        if self.given.fused is not None:
            options = tuple(Option(v, w) for v, w in _FUSED)
            factors.append(
                Factor(
                    "fused",
                    FUSED,
                    options,
                    what="layout of the fused projection",
                    free=True,
                    fix="read it as {reference}",
                )
            )
        if self.kv_width != self.width:
            options = (Option("each", "each repeated in turn"), Option("tiled", "all of them repeated"))
            factors.append(
                Factor(
                    "repeat",
                    REPEATED,
                    options,
                    what="order of shared heads",
                    free=True,
                    fix="repeat shared heads: {reference}",
                )
            )
        factors.append(_dropout_factor() if self.dropped else _left_over())
        return factors + (rotary.factors() if self.turned else [])

    def __call__(self, f: Mapping[str, Any]) -> np.ndarray | None:
        heads, head_dim = f["heads"], self.width // f["heads"]
        if self.kv_width % head_dim:
            return None
        products = self._products(f, heads, head_dim)
        if products is None:
            return None
        raw, v = products
        scores = (
            raw
            * {
                "1/√head_dim": head_dim**-0.5,
                "1": 1.0,
                "1/√d_model": self.width**-0.5,
                "1/head_dim": 1.0 / head_dim,
                "√head_dim": head_dim**0.5,
                "1/√heads": heads**-0.5,
                "1/√length": self.keys**-0.5,
            }[f["scale"]]
        )
        weights = self._weights(f, scores)
        if self.dropped:
            how, rate = f["masks"]
            kept = self.dropped[0] if how != "inverted" else ~self.dropped[0].astype(bool)
            weights = weights if how == "none" else weights * kept / (1.0 - rate)
        merged = _merge(np.einsum("bhqk,bhkd->bhqd", weights * f.get("dropout", 1.0), v), f["split"])
        return self.given.out(merged)

    def _products(self, f: Mapping[str, Any], heads: int, head_dim: int) -> tuple[np.ndarray, np.ndarray] | None:
        key = (heads, f["parts"], f["split"], f.get("repeat"), f.get("fused"), *(f[n] for n in rotary.NAMES if n in f))
        if key not in self._scores:
            named = dict(zip("qkv", self._parts(f.get("fused", "blocks"), heads), strict=True))
            q, k, v = (_split(named[part], head_dim, f["split"]) for part in f["parts"])
            if f.get("repeat"):
                times = heads // k.shape[1]
                repeat: Callable[[np.ndarray], np.ndarray] = (
                    (lambda x: np.repeat(x, times, axis=1))
                    if f["repeat"] == "each"
                    else (lambda x: np.tile(x, (1, times, 1, 1)))
                )
                k, v = repeat(k), repeat(v)
            if self.turned:
                turned = rotary.turn_all(q, k, v, f)
                if turned is None:
                    return None
                q, k, v = turned
            self._scores[key] = (np.einsum("bhqd,bhkd->bhqk", q, k), v)
        return self._scores[key]

    def _parts(self, layout: str, heads: int) -> tuple[np.ndarray, ...]:
        if self.given.fused is None or layout == "blocks":
            return self.given.q, self.given.k, self.given.v
        shape = (
            (*self.given.fused.shape[:2], heads, 3, -1) if layout == "heads" else (*self.given.fused.shape[:2], -1, 3)
        )
        parts = np.moveaxis(self.given.fused.reshape(shape), -2 if layout == "heads" else -1, 0)
        return tuple(part.reshape(self.given.q.shape) for part in parts)

    def _weights(self, f: Mapping[str, Any], scores: np.ndarray) -> np.ndarray:
        may = np.broadcast_to(allowed(f, self.masks, self.batch, self.queries, self.keys), scores.shape)
        how, value = f["fill"] or ("fill", -math.inf)
        if how in ("fill", "fill, then zero"):
            scores = np.where(may, scores, value)
        elif how == "add":
            scores = np.where(may, scores, scores + value)
        elif how == "allowed":
            scores = np.where(may, scores + value, scores)
        elif how == "times":
            scores = np.where(may, scores, scores * value)
        if f["softmax"] == "none":
            return np.where(may, scores, 0.0)
        axis = {"keys": -1, "queries": -2, "heads": 1}[f["softmax"]]
        lost = ~np.isfinite(scores).any(axis=axis, keepdims=True)
        weights = softmax(np.where(lost, 0.0, scores), axis)
        if f["rows"] == "nan":
            weights = np.where(lost, np.nan, weights)
        elif f["rows"] == "zeros":
            weights = np.where(lost, 0.0, weights)
        return np.where(may, weights, 0.0) if how in ("after", "fill, then zero") else weights


_SCALES = (
    ("1/√head_dim", "1/√head_dim"),
    ("1", "1"),
    ("1/√d_model", "1/√d_model"),
    ("1/head_dim", "1/head_dim"),
    ("√head_dim", "√head_dim"),
    ("1/√heads", "1/√heads"),
    ("1/√length", "1/√length"),
)
_SPLITS = (
    ("usual", "(heads, head_dim), transposed"),
    ("head_dim first", "(head_dim, heads)"),
    ("split head_dim first", "(head_dim, heads) where they are split"),
    ("merge head_dim first", "(head_dim, heads) where they are merged"),
    ("reshape", "a reshape alone, both ways"),
    ("split reshape", "split by a reshape alone"),
    ("merge reshape", "merged without transposing back"),
)
_FUSED = (
    ("blocks", "all queries, all keys, all values"),
    ("heads", "query, key and value of each head in turn"),
    ("elements", "query, key and value of each feature in turn"),
)
_SOFTMAXES = (
    ("keys", "over the keys"),
    ("queries", "over the queries"),
    ("heads", "over the heads"),
    ("none", "not at all"),
)


def _rates() -> tuple[Option, ...]:
    kept = [1 - rate for rate in RATES]
    return (Option(1.0, "1"), *(Option(v, f"{v:.6g}") for keep in kept for v in (1 / keep, keep)))


def _left_over() -> Factor:
    """A scale of dropout where there is none."""
    fix = "multiply the weights by {reference} in evaluation"
    return Factor("dropout", DROPOUT_SCALE, _rates(), what="factor of the weights", fix=fix)


def _dropout_factor() -> Factor:
    """Masks that are handed in, in training."""
    options = [Option(("kept", rate), f"dropped out and divided by {1 - rate:g}") for rate in RATES]
    options.append(Option(("none", 0.0), "not dropped out"))
    options.append(Option(("kept", 0.0), "dropped out and not scaled"))
    options += [
        Option(("inverted", rate), f"dropped out where they should be kept, at rate {rate:g}") for rate in RATES
    ]

    def kind_of(reference: tuple[str, float], port: tuple[str, float]) -> str:
        if "none" in (reference[0], port[0]):
            return dropout.OFF if port[0] == "none" else dropout.PLACE
        if "inverted" in (reference[0], port[0]):
            return dropout.INVERTED
        return dropout.SCALE if 0.0 in (reference[1], port[1]) else dropout.RATE

    fix = "the weights must be {reference}"
    return Factor("masks", kind_of, tuple(options), what="weights", also_right=len(RATES), fix=fix)


def _scale_kind(reference: str, port: str) -> str:
    if "1" in (reference, port):
        return SCALE_MISSING
    return SCALE_TWICE if {"1/head_dim", "√head_dim"} & {reference, port} else SCALE_WIDTH


def _parts_words(parts: str) -> str:
    names = {"q": "query", "k": "key", "v": "value"}
    return ", ".join(names[part] for part in parts) + " projections"


def _split(x: np.ndarray, head_dim: int, how: str) -> np.ndarray:
    """(batch, length, heads · head_dim) -> (batch, heads, length, head_dim)."""
    batch, length, width = x.shape
    heads = width // head_dim
    if how in ("head_dim first", "split head_dim first"):
        return x.reshape(batch, length, head_dim, heads).transpose(0, 3, 1, 2)
    if how in ("reshape", "split reshape"):
        return x.reshape(batch, heads, length, head_dim)
    return x.reshape(batch, length, heads, head_dim).transpose(0, 2, 1, 3)


def _merge(x: np.ndarray, how: str) -> np.ndarray:
    batch, heads, length, head_dim = x.shape
    if how in ("head_dim first", "merge head_dim first"):
        return x.transpose(0, 2, 3, 1).reshape(batch, length, -1)
    if how in ("reshape", "merge reshape"):
        return x.reshape(batch, length, heads * head_dim)
    return x.transpose(0, 2, 1, 3).reshape(batch, length, -1)
