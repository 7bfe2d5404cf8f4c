"""Batches of fixed shapes (5.1: "batched together by approximate sequence length"), as numpy arrays.

A few shapes, chosen once for a corpus, are all that a compiler sees. Shapes are filled up with PAD: rows to their
length, and the last batch of a shape with rows of nothing else, which carry no token and so weigh nothing.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int32, Int64

from train.config import BatchConfig
from train.sentences import EncodedText
from transformer_config.config import BOS_ID, PAD_ID

EXTRA_BUCKETS = 2
"""Shapes, at most, that held-out pairs longer than every training shape may add."""
SHORTEST_DECODING = 16
"""Source lengths of decoding batches are this, twice this, four times this, ...: a few shapes serve any text."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One shape of batch. Raises ValueError unless every dimension is at least 1."""

    src_len: int
    tgt_len: int
    batch_size: int

    def __post_init__(self) -> None:
        if min(self.src_len, self.tgt_len, self.batch_size) < 1:
            raise ValueError(f"expected a bucket with dimensions of at least 1, got {self}")

    @property
    def positions(self) -> int:
        """Padded positions of one batch, both sides together."""
        return self.batch_size * (self.src_len + self.tgt_len)

    @property
    def max_tokens(self) -> int:
        """Padded positions of one batch on its longer side."""
        return self.batch_size * max(self.src_len, self.tgt_len)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Piece ids of some pairs. At each position the model reads `tgt_in` and is to predict `tgt_out`."""

    src: Int32[np.ndarray, "batch src_len"]
    """Source sentences, each ending with EOS."""
    tgt_in: Int32[np.ndarray, "batch tgt_len"]
    """Target sentences behind BOS, without EOS."""
    tgt_out: Int32[np.ndarray, "batch tgt_len"]
    """Target sentences, each ending with EOS."""

    @property
    def num_tokens(self) -> int:
        """Target positions that are no padding: what a summed loss is divided by."""
        return int(np.count_nonzero(self.tgt_out != PAD_ID))

    @property
    def shape(self) -> Bucket:
        """The dimensions of the arrays."""
        return Bucket(src_len=self.src.shape[1], tgt_len=self.tgt_out.shape[1], batch_size=self.src.shape[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthReport:
    """Which pairs `drop_long` left out. False, and an empty text, when it kept them all."""

    max_len: int
    pairs: int
    dropped: int
    source_too_long: int
    target_too_long: int
    longest_source: int
    longest_target: int

    def __bool__(self) -> bool:
        return self.dropped > 0

    def __str__(self) -> str:
        if not self.dropped:
            return ""
        return (
            f"{self.dropped} of {self.pairs} training pairs dropped, being longer than {self.max_len} pieces: "
            f"{self.source_too_long} on the source side (longest {self.longest_source}), "
            f"{self.target_too_long} on the target side (longest {self.longest_target})"
        )


def drop_long(encoded: EncodedText, *, max_len: int) -> tuple[EncodedText, LengthReport]:
    """The pairs with at most `max_len` pieces a side, and a report of the others. For training text only.

    Raises ValueError when no pair is that short.
    """
    too_long = encoded.lengths > max_len
    keep = np.flatnonzero(~too_long.any(axis=1))
    if not len(keep):
        raise ValueError(f"expected training pairs of at most {max_len} pieces a side, got only longer ones")
    report = LengthReport(
        max_len=max_len,
        pairs=len(encoded),
        dropped=len(encoded) - len(keep),
        source_too_long=int(too_long[:, 0].sum()),
        target_too_long=int(too_long[:, 1].sum()),
        longest_source=int(encoded.lengths[:, 0].max()),
        longest_target=int(encoded.lengths[:, 1].max()),
    )
    return (encoded.take(keep) if report else encoded), report


def plan_buckets(encoded: EncodedText, *, config: BatchConfig) -> tuple[Bucket, ...]:
    """The shapes, at most `config.num_buckets`, that hold all pairs in the fewest padded positions.

    Each bucket takes the pairs whose longer side lies in one range of lengths; it is as long, on either side, as the
    longest sentence of those, with `max_tokens // max(src_len, tgt_len)` rows (at least one). The ranges are the best
    there are: dynamic programming over the distinct lengths, counting the rows that fill last batches too.
    """
    return _plan(encoded.lengths, max_tokens=config.max_tokens, num_buckets=config.num_buckets)


def _plan(lengths: Int64[np.ndarray, "pairs 2"], *, max_tokens: int, num_buckets: int) -> tuple[Bucket, ...]:
    keys, group = np.unique(lengths.max(axis=1), return_inverse=True)
    counts = np.bincount(group)
    longest = np.zeros((len(keys), 2), dtype=np.int64)
    np.maximum.at(longest, group, lengths)
    # cheapest[j]: fewest positions for the pairs of the first j lengths, and the buckets that achieve it.
    cheapest: list[tuple[int, tuple[Bucket, ...]] | None] = [(0, ())] + [None] * len(keys)
    segments = {
        (first, last): _segment(counts[first:last], longest[first:last], max_tokens=max_tokens)
        for first in range(len(keys))
        for last in range(first + 1, len(keys) + 1)
    }
    for _ in range(num_buckets):
        cheapest = [cheapest[0]] + [
            min(
                (option for option in [cheapest[last], *_extended(cheapest, segments, last)] if option is not None),
                key=lambda option: (option[0], len(option[1])),
                default=None,
            )
            for last in range(1, len(keys) + 1)
        ]
    best = cheapest[-1]
    assert best is not None
    return best[1]


def _extended(
    cheapest: list[tuple[int, tuple[Bucket, ...]] | None],
    segments: dict[tuple[int, int], tuple[int, Bucket]],
    last: int,
) -> Iterator[tuple[int, tuple[Bucket, ...]]]:
    for first in range(last):
        before = cheapest[first]
        if before is not None:
            positions, bucket = segments[first, last]
            yield before[0] + positions, (*before[1], bucket)


def _segment(
    counts: Int64[np.ndarray, "keys"], longest: Int64[np.ndarray, "keys 2"], *, max_tokens: int
) -> tuple[int, Bucket]:
    """Padded positions that one bucket needs for these lengths, and the bucket."""
    src_len, tgt_len = (int(length) for length in longest.max(axis=0))
    bucket = Bucket(src_len, tgt_len, max(1, max_tokens // max(src_len, tgt_len)))
    num_batches = -(-int(counts.sum()) // bucket.batch_size)
    return num_batches * bucket.positions, bucket


def _assign(lengths: Int64[np.ndarray, "pairs 2"], buckets: Sequence[Bucket]) -> Int64[np.ndarray, "pairs"]:
    """For each pair the first bucket that holds it, or -1."""
    shapes = np.array([(bucket.src_len, bucket.tgt_len) for bucket in buckets], dtype=np.int64)
    fits = np.all(lengths[:, None, :] <= shapes[None, :, :], axis=2)
    return np.where(np.any(fits, axis=1), np.argmax(fits, axis=1), -1).astype(np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Which pairs stand in which batch. A batch is made when it is asked for, so one can start at any of them."""

    encoded: EncodedText
    buckets: tuple[Bucket, ...]
    members: tuple[tuple[int, Int64[np.ndarray, "_"]], ...]
    """Of each batch: the number of its bucket, and its pairs (fewer than the bucket's rows in a last batch)."""

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(i) for i in range(len(self)))

    def batch(self, i: int) -> Batch:
        """Batch `i`, counted from 0. Raises ValueError outside the plan."""
        if not 0 <= i < len(self):
            raise ValueError(f"expected the number of a batch in [0, {len(self)}), got {i}")
        bucket_number, pairs = self.members[i]
        bucket = self.buckets[bucket_number]
        src = np.full((bucket.batch_size, bucket.src_len), PAD_ID, dtype=np.int32)
        tgt_in = np.full((bucket.batch_size, bucket.tgt_len), PAD_ID, dtype=np.int32)
        tgt_out = tgt_in.copy()
        for row, pair in enumerate(pairs.tolist()):
            source, target = self.encoded.src[pair], self.encoded.tgt[pair]
            src[row, : len(source)] = source
            tgt_in[row, 0] = BOS_ID
            tgt_in[row, 1 : len(target)] = target[:-1]
            tgt_out[row, : len(target)] = target
        return Batch(src=src, tgt_in=tgt_in, tgt_out=tgt_out)

    @property
    def padding_efficiency(self) -> float:
        """Share of all positions, both sides, that hold a piece."""
        positions = sum(self.buckets[bucket].positions for bucket, _ in self.members)
        return int(self.encoded.lengths.sum()) / positions


def epoch_batches(encoded: EncodedText, buckets: Sequence[Bucket], *, seed: int, epoch: int) -> BatchPlan:
    """Every pair exactly once, in an order that depends on `seed` and `epoch` alone.

    Pairs are shuffled within their bucket, then batches among each other. Raises ValueError when a pair fits no bucket.
    """
    if seed < 0 or epoch < 0:
        raise ValueError(f"expected a seed and an epoch of at least 0, got seed={seed}, epoch={epoch}")
    bucket_of = _assign(encoded.lengths, buckets)
    if (bucket_of < 0).any():
        pair = int(np.argmin(bucket_of))
        src_len, tgt_len = encoded.lengths[pair]
        raise ValueError(f"expected pairs that fit a bucket, got one of {src_len} source and {tgt_len} target pieces")
    # The generator is named, because default_rng may come to mean another one.
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    members = []
    for number, bucket in enumerate(buckets):
        shuffled = rng.permutation(np.flatnonzero(bucket_of == number))
        members += [(number, rows) for rows in _chunks(shuffled, bucket.batch_size)]
    order = rng.permutation(len(members))
    return BatchPlan(encoded=encoded, buckets=tuple(buckets), members=tuple(members[i] for i in order))


def extend_buckets(encoded: EncodedText, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """`buckets`, and at most `EXTRA_BUCKETS` more for those pairs of `encoded` that fit none of them.

    The extra ones keep to the token budget of the others, and are no longer than their longest sentence.
    """
    lengths = encoded.lengths[_assign(encoded.lengths, buckets) < 0]
    if not len(lengths):
        return tuple(buckets)
    budget = max(bucket.max_tokens for bucket in buckets)
    return (*buckets, *_plan(lengths, max_tokens=budget, num_buckets=EXTRA_BUCKETS))


def evaluation_batches(encoded: EncodedText, buckets: Sequence[Bucket]) -> BatchPlan:
    """Every pair exactly once, shape by shape and in order of length; what is too long gets shapes of its own."""
    extended = extend_buckets(encoded, buckets)
    bucket_of = _assign(encoded.lengths, extended)
    by_length = np.argsort(encoded.lengths.max(axis=1), kind="stable")
    members = []
    for number, bucket in enumerate(extended):
        ordered = by_length[bucket_of[by_length] == number]
        members += [(number, rows) for rows in _chunks(ordered, bucket.batch_size)]
    return BatchPlan(encoded=encoded, buckets=extended, members=tuple(members))


def decoding_lengths(longest: int) -> tuple[int, ...]:
    """The padded source lengths that sentences of up to `longest` pieces can have."""
    lengths = [SHORTEST_DECODING]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return tuple(lengths)


def decode_batches(
    src: list[list[int]], *, batch_size: int, max_len: int | None = None
) -> Iterator[tuple[Int64[np.ndarray, "batch"], Int32[np.ndarray, "batch src_len"]]]:
    """Source sentences for decoding, in order of length: where each row stands in `src`, and the padded rows.

    Lengths are rounded up to the next of `decoding_lengths`, but not beyond `max_len`, the model's table of positions,
    where one is given. Rows that fill the last batch hold only PAD and have index -1.

    Raises ValueError when a sentence is longer than `max_len`.
    """
    if batch_size < 1:
        raise ValueError(f"expected a batch_size of at least 1, got {batch_size}")
    lengths = np.array([len(sentence) for sentence in src], dtype=np.int64)
    if max_len is not None and len(src) and lengths.max() > max_len:
        raise ValueError(
            f"expected source sentences of at most {max_len} pieces, got {int((lengths > max_len).sum())} longer ones, "
            f"the longest of {lengths.max()}"
        )
    for rows in _chunks(np.argsort(lengths, kind="stable"), batch_size):
        src_len = decoding_lengths(int(lengths[rows].max()))[-1]
        if max_len is not None:
            src_len = min(src_len, max_len)
        indices = np.full(batch_size, -1, dtype=np.int64)
        indices[: len(rows)] = rows
        padded = np.full((batch_size, src_len), PAD_ID, dtype=np.int32)
        for row, i in enumerate(rows):
            padded[row, : len(src[i])] = src[i]
        yield indices, padded


def _chunks(rows: Int64[np.ndarray, "_"], size: int) -> Iterator[Int64[np.ndarray, "_"]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))
