"""Several pairs in one row, so that hardly a position is padding; attention keeps them apart by their segments.

Which pair stands where matters only by its two lengths. So rows are planned as patterns, combinations of lengths that
fill a row on both sides, each used as often as there are pairs for it: thousands of patterns for millions of pairs.
The patterns are made once for a text. An epoch decides which of the pairs of the same lengths takes which place, and
in which batch each row stands.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64, Integer

from train.batching import Batch, Bucket, Plan, epoch_generator
from train.config import BatchConfig
from train.rows import segment_rows, source_rows, spans, starts_within_rows, target_rows
from train.sentences import EncodedText


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Rows for the pairs of a text: places for two lengths each, not yet for one pair."""

    shape: Bucket
    """Of every batch."""
    row_starts: Int64[np.ndarray, "rows_and_end"]
    """Which place is the first of each row; at the end, how many places, and so pairs, there are."""
    places: Int64[np.ndarray, "pairs"]
    """All places, those for the same two lengths together, in the order of the lengths' numbers."""
    combinations: Integer[np.ndarray, "pairs"]
    """The number of each pair's two lengths."""
    lengths: Int64[np.ndarray, "pairs 2"]
    """Of the text's pairs."""

    @property
    def num_rows(self) -> int:
        """Rows that hold a pair."""
        return len(self.row_starts) - 1

    @property
    def num_batches(self) -> int:
        """Batches of an epoch, the last one filled up."""
        return -(-self.num_rows // self.shape.batch_size)


def plan_packing(encoded: EncodedText, *, config: BatchConfig) -> PackedRows:
    """The rows that all pairs fit into: `max_len` pieces on the longer side, `max_tokens // max_len` rows a batch.

    The longer side is the one with more pieces in the whole text. The other is shorter in the same ratio, so that both
    fill up together, but as long as its longest sentence: one that is far longer than usual costs padding in every row.

    Raises ValueError when a sentence is longer than `config.max_len`.
    """
    lengths = encoded.lengths
    shape = _shape(lengths, config)
    width = shape.tgt_len + 1
    keys, counts = np.unique(lengths[:, 0] * width + lengths[:, 1], return_counts=True)
    sizes = np.stack([keys // width, keys % width], axis=1)
    patterns = list(_patterns(sizes, counts, room=(shape.src_len, shape.tgt_len)))
    # As narrow as may be: numbers of 16 bits are sorted many times faster.
    narrow = np.min_scalar_type(len(keys))
    wanted = np.concatenate([np.tile(pattern.astype(narrow), rows) for pattern, rows in patterns])
    per_row = np.repeat([len(pattern) for pattern, _ in patterns], [rows for _, rows in patterns])
    number_of = np.zeros(keys[-1] + 1, dtype=narrow)
    number_of[keys] = np.arange(len(keys))
    return PackedRows(
        shape=shape,
        row_starts=np.concatenate([[0], np.cumsum(per_row)]),
        places=np.argsort(wanted, kind="stable"),
        combinations=number_of[lengths[:, 0] * width + lengths[:, 1]],
        lengths=lengths,
    )


def _shape(lengths: Int64[np.ndarray, "pairs 2"], config: BatchConfig) -> Bucket:
    longest, totals = lengths.max(axis=0), lengths.sum(axis=0)
    if longest.max() > config.max_len:
        raise ValueError(f"expected sentences of at most {config.max_len} pieces, got one of {longest.max()}")
    longer = int(np.argmax(totals))
    in_ratio = -(-config.max_len * int(totals[1 - longer]) // int(totals[longer]))
    sides = [config.max_len, config.max_len]
    sides[1 - longer] = max(in_ratio, int(longest[1 - longer]))
    return Bucket(src_len=sides[0], tgt_len=sides[1], batch_size=max(1, config.max_tokens // config.max_len))


def _patterns(
    sizes: Int64[np.ndarray, "combinations 2"], counts: Int64[np.ndarray, "combinations"], *, room: tuple[int, int]
) -> Iterator[tuple[Int64[np.ndarray, "places"], int]]:
    """Patterns until no pair is left: which combinations of lengths stand in a row, and how many rows are like that."""
    # Both sides count as equally long, in whole numbers: every machine is to find the same patterns.
    scaled = sizes * room[::-1]
    left = counts.copy()
    live = np.argsort(-scaled.max(axis=1), kind="stable")
    src, tgt = scaled[live].T.copy()
    while len(live):
        in_row = _fill(src, tgt, left[live], room=room[0] * room[1])
        used, times = np.unique(live[in_row], return_counts=True)
        rows = int((left[used] // times).min())
        left[used] -= rows * times
        yield live[in_row], rows
        remain = np.flatnonzero(left[live])
        live, src, tgt = live[remain], src[remain], tgt[remain]


def _fill(
    src: Int64[np.ndarray, "live"], tgt: Int64[np.ndarray, "live"], left: Int64[np.ndarray, "live"], *, room: int
) -> list[int]:
    """One row: the first combination, then always the one after which the room that is left is the shortest vector.

    That prefers large ones, and of those as large the one that keeps the two sides in balance.
    """
    row, chosen = [0], 0
    free_src = free_tgt = room
    fitting = np.arange(len(src))  # of these the next one is chosen: room only shrinks
    while True:
        left[chosen] -= 1
        free_src, free_tgt = free_src - int(src[chosen]), free_tgt - int(tgt[chosen])
        after_src, after_tgt = free_src - src[fitting], free_tgt - tgt[fitting]
        fits = (np.minimum(after_src, after_tgt) >= 0) & (left[fitting] > 0)
        fitting, after_src, after_tgt = fitting[fits], after_src[fits], after_tgt[fits]
        if not len(fitting):
            return row
        chosen = int(fitting[(after_src * after_src + after_tgt * after_tgt).argmin()])
        row.append(chosen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedPlan(Plan):
    """Several pairs a row, all batches of one shape."""

    encoded: EncodedText
    packing: PackedRows
    pair_at: Int64[np.ndarray, "pairs"]
    """The pair in each place of the packing."""
    row_order: Int64[np.ndarray, "rows"]
    """The packing's rows, batch by batch."""

    def __len__(self) -> int:
        return self.packing.num_batches

    def shape(self, i: int) -> Bucket:
        """The one shape."""
        self._check(i)
        return self.packing.shape

    def pairs(self, i: int) -> Int64[np.ndarray, "pairs"]:
        """The pairs of batch `i`, row by row."""
        self._check(i)
        return self._pairs_of(i, 0, self.packing.shape.batch_size)[0]

    def rows(self, i: int, start: int, stop: int) -> Batch:
        """See `Plan`."""
        self._check(i, start, stop)
        pairs, per_row = self._pairs_of(i, start, stop)
        row = np.repeat(np.arange(len(per_row)), per_row)
        segments = starts_within_rows(np.ones_like(pairs), per_row) + 1
        lengths = self.encoded.lengths[pairs]
        src_len, tgt_len = lengths[:, 0], lengths[:, 1]
        src_shape, tgt_shape = ((stop - start, n) for n in (self.packing.shape.src_len, self.packing.shape.tgt_len))
        src_at = row * src_shape[1] + starts_within_rows(src_len, per_row)
        tgt_at = row * tgt_shape[1] + starts_within_rows(tgt_len, per_row)
        tgt_in, tgt_out = target_rows(self.encoded, pairs, at=tgt_at, shape=tgt_shape)
        return Batch(
            src=source_rows(self.encoded, pairs, at=src_at, shape=src_shape),
            tgt_in=tgt_in,
            tgt_out=tgt_out,
            src_segments=segment_rows(segments, src_len, at=src_at, shape=src_shape),
            tgt_segments=segment_rows(segments, tgt_len, at=tgt_at, shape=tgt_shape),
            pad_id=self.encoded.pad_id,
        )

    def _pairs_of(self, i: int, start: int, stop: int) -> tuple[Int64[np.ndarray, "pairs"], Int64[np.ndarray, "rows"]]:
        """The pairs in rows `start ... stop - 1` of batch `i`, and how many stand in each row."""
        size = self.packing.shape.batch_size
        rows = self.row_order[i * size : (i + 1) * size][start:stop]
        firsts = self.packing.row_starts[rows]
        per_row = self.packing.row_starts[rows + 1] - firsts
        return self.pair_at[spans(firsts, per_row)], per_row

    @property
    def positions(self) -> int:
        """Padded positions of the epoch, both sides together."""
        return len(self) * self.packing.shape.positions


def packed_epoch(encoded: EncodedText, packing: PackedRows, *, seed: int, epoch: int) -> PackedPlan:
    """Every pair exactly once, in an order that depends on `seed` and `epoch` alone.

    Pairs of the same two lengths are shuffled among their places, then rows among the batches; the last batch is filled
    up with rows of PAD. Raises ValueError when `packing` was made for another text.
    """
    rng = epoch_generator(seed=seed, epoch=epoch)
    if not np.array_equal(encoded.lengths, packing.lengths):
        raise ValueError("expected a packing of this text, got one for sentences of other lengths")
    shuffled = rng.permutation(len(encoded))
    pair_at = np.empty_like(shuffled)
    pair_at[packing.places] = shuffled[np.argsort(packing.combinations[shuffled], kind="stable")]
    return PackedPlan(encoded=encoded, packing=packing, pair_at=pair_at, row_order=rng.permutation(packing.num_rows))
