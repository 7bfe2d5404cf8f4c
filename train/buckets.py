"""Which few shapes hold sentences of given lengths in the fewest padded positions."""

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

NONE = np.iinfo(np.int64).max // 4
"""Positions of what cannot be; twice this is still a number."""
Count = int | np.integer | np.ndarray
Lengths = tuple[int, int]
Shape = tuple[int, int, int]
"""Source length, target length, rows."""


def best_shapes(lengths: Int64[np.ndarray, "pairs 2"], *, max_tokens: int, num_buckets: int) -> tuple[Shape, ...]:
    """At most `num_buckets` shapes, for pairs to take the first that they fit.

    Dynamic programming finds the best ranges of the longer side. One pair of unusual lengths makes a whole range long
    on both sides, so the two lengths of every shape are then moved, one shape at a time, for as long as that helps.
    """
    positions, shapes = _best_ranges(lengths, max_tokens=max_tokens, num_buckets=num_buckets)
    # Ranges may have no use for so many shapes; the moves may, so the rest begin as copies, which hold no pair.
    copies = [shapes[i * len(shapes) // num_buckets] for i in range(num_buckets)]
    chain = list(itertools.accumulate(copies, lambda shorter, shape: tuple(map(max, shorter, shape))))
    moved_positions, moved = _Table(lengths, max_tokens=max_tokens).improved(chain)
    if moved_positions < positions:  # not so where shapes of which none holds another are best
        shapes = moved
    return tuple((src_len, tgt_len, int(_rows(src_len, tgt_len, max_tokens))) for src_len, tgt_len in shapes)


def first_fitting(lengths: Int64[np.ndarray, "pairs 2"], shapes: Sequence[Shape]) -> Int64[np.ndarray, "pairs"]:
    """For each pair the first shape that holds it, or -1."""
    found = np.full(len(lengths), -1, dtype=np.int64)
    for number in reversed(range(len(shapes))):
        src_len, tgt_len, _ = shapes[number]
        found[(lengths[:, 0] <= src_len) & (lengths[:, 1] <= tgt_len)] = number
    return found


def _rows(src_len: Count, tgt_len: Count, max_tokens: int) -> Count:
    return np.maximum(1, max_tokens // np.maximum(src_len, tgt_len))


def _positions(pairs: Count, src_len: Count, tgt_len: Count, max_tokens: int) -> Count:
    """Of all batches of a shape, the last one whole."""
    rows = _rows(src_len, tgt_len, max_tokens)
    return -(-pairs // rows) * rows * (src_len + tgt_len)


def _best_ranges(
    lengths: Int64[np.ndarray, "pairs 2"], *, max_tokens: int, num_buckets: int
) -> tuple[int, list[Lengths]]:
    """Padded positions with the cheapest ranges of the longer side, and the longest lengths in each of them."""
    keys, counts, longer = _distinct(lengths.max(axis=1))
    longest = np.zeros((len(keys), 2), dtype=np.int64)
    for side in (0, 1):
        np.maximum.at(longest[:, side], longer, lengths[:, side])
    before = np.concatenate([[0], np.cumsum(counts)])
    cost = np.full((len(keys), len(keys) + 1), NONE, dtype=np.int64)  # of the keys `first ... last - 1`
    for first in range(len(keys)):
        src_len, tgt_len = np.maximum.accumulate(longest[first:]).T
        cost[first, first + 1 :] = _positions(before[first + 1 :] - before[first], src_len, tgt_len, max_tokens)
    cuts = _cheapest_cuts(cost, num_buckets)
    tops = [longest[first:last].max(axis=0) for first, last in itertools.pairwise(cuts)]
    positions = sum(int(cost[first, last]) for first, last in itertools.pairwise(cuts))
    return positions, [(int(top[0]), int(top[1])) for top in tops]


def _cheapest_cuts(cost: Int64[np.ndarray, "begins ends"], num_buckets: int) -> list[int]:
    """Where the cheapest ranges, at most so many and the fewest at that cost, begin and end."""
    # Of the first j keys in so many ranges: the cost, and where the last range begins.
    totals = np.full(len(cost) + 1, NONE, dtype=np.int64)
    totals[0] = 0
    begins: list[np.ndarray] = []
    finals: list[int] = []
    for _ in range(min(num_buckets, len(cost))):
        options = totals[:-1, None] + cost
        begins.append(options.argmin(axis=0))
        totals = np.minimum(options.min(axis=0), NONE)
        finals.append(int(totals[-1]))
    cuts = [len(cost)]
    for begin in reversed(begins[: int(np.argmin(finals)) + 1]):
        cuts.append(int(begin[cuts[-1]]))
    return cuts[::-1]


def _distinct(
    values: Int64[np.ndarray, "values"],
) -> tuple[Int64[np.ndarray, "keys"], Int64[np.ndarray, "keys"], Int64[np.ndarray, "values"]]:
    """The distinct ones in order, how often each occurs, and which of them each value is; without sorting millions."""
    counts = np.bincount(values)
    keys = np.flatnonzero(counts)
    number = np.zeros(len(counts), dtype=np.int64)
    number[keys] = np.arange(len(keys))
    return keys, counts[keys], number[values]


class _Table:
    """How many pairs fit each shape, and so what a chain costs: shapes each of which holds all shorter ones."""

    def __init__(self, lengths: Int64[np.ndarray, "pairs 2"], *, max_tokens: int):
        self.max_tokens = max_tokens
        self.src, _, src = _distinct(lengths[:, 0])
        self.tgt, _, tgt = _distinct(lengths[:, 1])
        shape = (len(self.src), len(self.tgt))
        pairs = np.bincount(src * shape[1] + tgt, minlength=shape[0] * shape[1]).reshape(shape)
        self.fitting = pairs.cumsum(axis=0).cumsum(axis=1)

    def improved(self, chain: Sequence[Lengths]) -> tuple[int, list[Lengths]]:
        """Moves one shape between its neighbours, to the best place there is, until that helps with none.

        The positions then, and the shapes that hold any pair.
        """
        at = [(int(np.searchsorted(self.src, s)), int(np.searchsorted(self.tgt, t))) for s, t in chain]
        moving = True
        while moving:
            moved = [*at]
            for i in range(len(moved) - 1):
                moved[i] = self._best_between(moved[i - 1] if i else None, moved[i], moved[i + 1])
            moving, at = moved != at, moved
        pairs = np.diff([0, *map(self._fitting, at)])
        shapes = [(int(self.src[i]), int(self.tgt[j])) for i, j in at]
        positions = sum(int(_positions(n, *shape, self.max_tokens)) for n, shape in zip(pairs, shapes, strict=True))
        return positions, [shape for n, shape in zip(pairs, shapes, strict=True) if n]

    def _fitting(self, place: Lengths) -> int:
        return int(self.fitting[place])

    def _best_between(self, before: Lengths | None, here: Lengths, after: Lengths) -> Lengths:
        """Where a shape is cheapest together with the one after it. It stays `here` unless that is dearer."""
        low = before or (0, 0)
        window = tuple(slice(first, last + 1) for first, last in zip(low, after, strict=True))
        src_len, tgt_len = self.src[window[0], None], self.tgt[None, window[1]]
        fitting = self.fitting[window]
        pairs = fitting - (self._fitting(before) if before else 0)
        last_shape = int(self.src[after[0]]), int(self.tgt[after[1]])
        here_cost = _positions(pairs, src_len, tgt_len, self.max_tokens)
        cost = np.asarray(here_cost + _positions(self._fitting(after) - fitting, *last_shape, self.max_tokens))
        place = np.unravel_index(int(cost.argmin()), cost.shape)
        if cost[place] >= cost[here[0] - low[0], here[1] - low[1]]:
            return here
        return low[0] + int(place[0]), low[1] + int(place[1])
