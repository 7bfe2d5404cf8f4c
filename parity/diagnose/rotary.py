"""Rotary positions of queries and keys (Su et al. 2021), by their factors."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.diagnose.diagnosis import kind
from parity.diagnose.engine import Factor, Option

LAYOUT = kind("rotary layout", "pairs of neighbours turned on one side, halves on the other")
MISSING = kind("rotary positions missing", "queries, keys or both are not turned")
BASE = kind("rotary base", "another base of the wavelengths")
OFFSET = kind("rotary offset", "positions counted from another number")
DIRECTION = kind("rotary direction", "turned the other way round")

NAMES = ("rotary", "rotary base", "rotary offset", "rotary direction", "rotary of")


def factors() -> list[Factor]:
    """Those of `turn_all`."""
    layouts = (Option("half", "halves"), Option("interleaved", "neighbours"), Option("none", "nothing"))
    bases = (10_000.0, 1_000.0, 100.0, 100_000.0, 500_000.0, 1_000_000.0)
    offsets = ((0, 0), (1, 1), (1, 0), (0, 1), (-1, 0), (0, -1))
    # Turning both by the same shift changes nothing, unless the values are turned too.
    words = {
        (0, 0): "0",
        (1, 1): "1",
        (1, 0): "1 for queries",
        (0, 1): "1 for keys",
        (-1, 0): "-1 for queries",
        (0, -1): "-1 for keys",
    }
    return [
        Factor(
            "rotary",
            lambda r, p: MISSING if "none" in (r, p) else LAYOUT,
            layouts,
            what="turned pairs",
            free=True,
            fix="turn {reference}",
        ),
        Factor(
            "rotary base",
            BASE,
            tuple(Option(b, f"{b:,.0f}") for b in bases),
            what="rotary base",
            also_right=5,
            fix="use base {reference}",
        ),
        Factor(
            "rotary offset",
            OFFSET,
            tuple(Option(o, words[o]) for o in offsets),
            what="first rotary position",
            fix="count rotary positions from {reference}",
        ),
        Factor(
            "rotary direction",
            DIRECTION,
            (Option(1, "counter-clockwise"), Option(-1, "clockwise")),
            what="rotation",
            fix="turn {reference}",
        ),
        Factor(
            "rotary of",
            MISSING,
            (
                Option("qk", "queries and keys"),
                Option("q", "queries alone"),
                Option("k", "keys alone"),
                Option("qkv", "queries, keys and values"),
            ),
            what="turned tensors",
            fix="turn {reference}",
        ),
    ]


def turn_all(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, f: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(batch, heads, length, head_dim) each; None for an odd width of heads."""
    if f["rotary"] == "none":
        return q, k, v
    if q.shape[-1] % 2:
        return None
    first, second = f["rotary offset"]
    turned = []
    for name, x, offset in (("q", q, first), ("k", k, second), ("v", v, second)):
        turned.append(turn(x, f, offset) if name in f["rotary of"] else x)
    return turned[0], turned[1], turned[2]


def turn(x: np.ndarray, f: Mapping[str, Any], offset: int) -> np.ndarray:
    """Each pair of features by its angle."""
    half = x.shape[-1] // 2
    angles = (np.arange(x.shape[-2]) + offset)[:, None] * f["rotary base"] ** (-np.arange(half) / half)[None, :]
    cos, sin = np.cos(angles), f["rotary direction"] * np.sin(angles)
    if f["rotary"] == "half":
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    a, b = x[..., 0::2], x[..., 1::2]
    return np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
