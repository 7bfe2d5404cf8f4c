"""Batches of fixed shapes (5.1: "batched together by approximate sequence length"), as numpy arrays.

A few shapes, chosen once for a corpus, are all that a compiler sees. Shapes are filled up with PAD: rows to their
length, and the last batch of a shape with rows of nothing else, which carry no token and so weigh nothing.
"""

import abc
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int32, Int64

from train.buckets import best_shapes, first_fitting
from train.config import BatchConfig
from train.rows import source_rows, target_rows
from train.sentences import EncodedText
from transformer_config import PAD_ID

EXTRA_BUCKETS = 2
"""Shapes, at most, that held-out pairs longer than every training shape may add."""


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
    src_segments: Int32[np.ndarray, "batch src_len"] | None = None
    """Where several pairs share a row: which of them each position belongs to, 1 for the first, 0 for padding."""
    tgt_segments: Int32[np.ndarray, "batch tgt_len"] | None = None
    """The same for both arrays of the target."""
    pad_id: int = PAD_ID

    @property
    def num_tokens(self) -> int:
        """Target positions that are no padding: what a summed loss is divided by."""
        return int(np.count_nonzero(self.tgt_out != self.pad_id))

    @property
    def num_positions(self) -> int:
        """Positions of both sides, padding included."""
        return self.src.size + self.tgt_out.size

    @property
    def num_real(self) -> int:
        """Positions of both sides that are no padding."""
        return int(np.count_nonzero(self.src != self.pad_id)) + self.num_tokens

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
    """The shapes, at most `config.num_buckets`, that hold all pairs in few padded positions.

    Each bucket takes the pairs that fit it and none before, and has `max_tokens // max(src_len, tgt_len)` rows (at
    least one). There are never more positions than with the best ranges of the longer side, and mostly fewer; the rows
    that fill last batches are counted too.
    """
    shapes = best_shapes(encoded.lengths, max_tokens=config.max_tokens, num_buckets=config.num_buckets)
    return tuple(Bucket(*shape) for shape in shapes)


def _assign(encoded: EncodedText, buckets: Sequence[Bucket]) -> Int64[np.ndarray, "pairs"]:
    """For each pair the first bucket that holds it, or -1."""
    return first_fitting(encoded.lengths, [dataclasses.astuple(bucket) for bucket in buckets])


class Plan(abc.ABC):
    """Which pairs stand in which batch of an epoch: a pure function of the text, a seed and the epoch.

    Every epoch has equally many batches, so one number says where a run stands. A batch is made when it is asked for,
    whole or some rows of it, so one can start at any of them and each process can make its own rows.
    """

    encoded: EncodedText

    @abc.abstractmethod
    def __len__(self) -> int:
        """Batches of the epoch."""

    @abc.abstractmethod
    def shape(self, i: int) -> Bucket:
        """The dimensions of batch `i`, counted from 0. Raises ValueError outside the plan, as all below do."""

    @abc.abstractmethod
    def pairs(self, i: int) -> Int64[np.ndarray, "pairs"]:
        """Where the pairs of batch `i` stand in `encoded`, row by row."""

    @abc.abstractmethod
    def rows(self, i: int, start: int, stop: int) -> Batch:
        """Rows `start ... stop - 1` of batch `i`; those beyond its own are PAD, so it can be filled up to any number.

        Raises ValueError unless 0 <= start < stop.
        """

    @property
    @abc.abstractmethod
    def positions(self) -> int:
        """Padded positions of the epoch, both sides together."""

    def batch(self, i: int) -> Batch:
        """All rows of batch `i`."""
        return self.rows(i, 0, self.shape(i).batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(i) for i in range(len(self)))

    @property
    def padding_efficiency(self) -> float:
        """Share of all positions, both sides, that hold a piece."""
        return int(self.encoded.lengths.sum()) / self.positions

    def _check(self, i: int, start: int = 0, stop: int = 1) -> None:
        if not 0 <= i < len(self):
            raise ValueError(f"expected the number of a batch in [0, {len(self)}), got {i}")
        if not 0 <= start < stop:
            raise ValueError(f"expected rows from 0 on, at least one, got rows {start} to {stop}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPlan(Plan):
    """One pair a row, rows in buckets."""

    encoded: EncodedText
    buckets: tuple[Bucket, ...]
    order: Int64[np.ndarray, "pairs"]
    """The pairs; those of one batch stand together."""
    starts: Int64[np.ndarray, "batches"]
    """Where in `order` each batch begins."""
    sizes: Int64[np.ndarray, "batches"]
    """Pairs of each batch: fewer than the bucket's rows in a last one."""
    bucket_numbers: Int64[np.ndarray, "batches"]

    def __len__(self) -> int:
        return len(self.starts)

    def shape(self, i: int) -> Bucket:
        """The bucket of batch `i`."""
        self._check(i)
        return self.buckets[self.bucket_numbers[i]]

    def pairs(self, i: int) -> Int64[np.ndarray, "pairs"]:
        """The pairs of batch `i`, one a row."""
        self._check(i)
        return self.order[self.starts[i] : self.starts[i] + self.sizes[i]]

    def rows(self, i: int, start: int, stop: int) -> Batch:
        """See `Plan`."""
        self._check(i, start, stop)
        bucket, pairs = self.shape(i), self.pairs(i)[start:stop]
        row = np.arange(len(pairs))
        src_shape, tgt_shape = ((stop - start, length) for length in (bucket.src_len, bucket.tgt_len))
        src = source_rows(self.encoded, pairs, at=row * bucket.src_len, shape=src_shape)
        tgt_in, tgt_out = target_rows(self.encoded, pairs, at=row * bucket.tgt_len, shape=tgt_shape)
        return Batch(src=src, tgt_in=tgt_in, tgt_out=tgt_out, pad_id=self.encoded.pad_id)

    @property
    def positions(self) -> int:
        """Padded positions of the epoch, both sides together."""
        per_bucket = np.array([bucket.positions for bucket in self.buckets])
        return int(per_bucket[self.bucket_numbers].sum())


def epoch_generator(*, seed: int, epoch: int) -> np.random.Generator:
    """What shuffles an epoch. Raises ValueError for negative numbers."""
    if seed < 0 or epoch < 0:
        raise ValueError(f"expected a seed and an epoch of at least 0, got seed={seed}, epoch={epoch}")
    # The generator is named, because default_rng may come to mean another one.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))


def epoch_batches(encoded: EncodedText, buckets: Sequence[Bucket], *, seed: int, epoch: int) -> BatchPlan:
    """Every pair exactly once, in an order that depends on `seed` and `epoch` alone.

    Pairs are shuffled within their bucket, then batches among each other. Raises ValueError when a pair fits no bucket.
    """
    rng = epoch_generator(seed=seed, epoch=epoch)
    bucket_of = _assign(encoded, buckets)
    if (bucket_of < 0).any():
        pair = int(np.argmin(bucket_of))
        src_len, tgt_len = encoded.lengths[pair]
        raise ValueError(f"expected pairs that fit a bucket, got one of {src_len} source and {tgt_len} target pieces")
    shuffled = [rng.permutation(np.flatnonzero(bucket_of == number)) for number in range(len(buckets))]
    plan = _in_batches(encoded, buckets, shuffled)
    order = rng.permutation(len(plan))
    return dataclasses.replace(
        plan, starts=plan.starts[order], sizes=plan.sizes[order], bucket_numbers=plan.bucket_numbers[order]
    )


def _in_batches(
    encoded: EncodedText, buckets: Sequence[Bucket], members: Sequence[Int64[np.ndarray, "_"]]
) -> BatchPlan:
    """The batches of one bucket after the other, given the pairs of each."""
    order = np.concatenate(members)
    batch_sizes = np.array([bucket.batch_size for bucket in buckets])
    pairs = np.array([len(of_bucket) for of_bucket in members])
    bucket_numbers = np.repeat(np.arange(len(buckets)), -(-pairs // batch_sizes))
    firsts = [
        np.arange(begin, begin + number, size)
        for begin, number, size in zip(np.cumsum(pairs) - pairs, pairs, batch_sizes, strict=True)
    ]
    starts = np.concatenate(firsts)
    ends = np.minimum(starts + batch_sizes[bucket_numbers], np.cumsum(pairs)[bucket_numbers])
    return BatchPlan(
        encoded=encoded,
        buckets=tuple(buckets),
        order=order,
        starts=starts,
        sizes=ends - starts,
        bucket_numbers=bucket_numbers,
    )


def extend_buckets(encoded: EncodedText, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """`buckets`, and at most `EXTRA_BUCKETS` more for those pairs of `encoded` that fit none of them.

    The extra ones keep to the token budget of the others, and are no longer than their longest sentence.
    """
    lengths = encoded.lengths[_assign(encoded, buckets) < 0]
    if not len(lengths):
        return tuple(buckets)
    budget = max(bucket.max_tokens for bucket in buckets)
    extra = best_shapes(lengths, max_tokens=budget, num_buckets=EXTRA_BUCKETS)
    return (*buckets, *(Bucket(*shape) for shape in extra))


def evaluation_batches(encoded: EncodedText, buckets: Sequence[Bucket]) -> BatchPlan:
    """Every pair exactly once, shape by shape and in order of length; what is too long gets shapes of its own."""
    extended = extend_buckets(encoded, buckets)
    by_length = np.argsort(encoded.lengths.max(axis=1), kind="stable")
    bucket_of = _assign(encoded, extended)[by_length]
    return _in_batches(encoded, extended, [by_length[bucket_of == number] for number in range(len(extended))])
