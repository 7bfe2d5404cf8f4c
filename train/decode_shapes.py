"""The few shapes in which sentences of any length are decoded."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

SHORTEST = 16
"""Source lengths are this, twice this, four times this, ...: a few shapes serve any text."""
ROOM = 1.5
"""Pieces of a translation that there is room for at first, for each piece of the longest source.

Attention runs over all the room there is, and few translations need more (measured: 2 of 1,000 sentences of Multi30k).
Those that do are translated again in the next shape.
"""


class DecodeShape(NamedTuple):
    """One program."""

    src_len: int
    room: int
    """Pieces of a translation, at most."""


def decode_shapes(longest_source: int, longest_target: int) -> tuple[DecodeShape, ...]:
    """All shapes for sources of up to so many pieces, and for translations of up to so many."""
    shapes = []
    src_len = SHORTEST
    while True:
        shapes.append(DecodeShape(src_len, int(ROOM * src_len)))
        if src_len >= longest_source and shapes[-1].room >= longest_target:
            return tuple(shapes)
        src_len *= 2


def source_rows(
    sentences: Sequence[list[int]], *, rows: int, src_len: int, pad_id: int
) -> Int32[np.ndarray, "rows src_len"]:
    """The sentences as rows, filled up with padding; whole rows of it at the end."""
    padded = np.full((rows, src_len), pad_id, dtype=np.int32)
    for row, sentence in zip(padded, sentences, strict=False):
        row[: len(sentence)] = sentence
    return padded
