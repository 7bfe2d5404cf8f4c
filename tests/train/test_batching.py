from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.batching import (
    EXTRA_BUCKETS,
    Batch,
    Bucket,
    Plan,
    drop_long,
    epoch_batches,
    evaluation_batches,
    extend_buckets,
    plan_buckets,
)
from train.config import BatchConfig
from train.sentences import EncodedText, Sentences
from transformer_config.config import BOS_ID, EOS_ID, PAD_ID

LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=40)


def encoded_of(lengths: list[tuple[int, int]]) -> EncodedText:
    """Pairs of these lengths, no two alike: the pieces spell the number of the pair and the side."""
    src = [[10 + 2 * i] * (src_len - 1) + [EOS_ID] for i, (src_len, _) in enumerate(lengths)]
    tgt = [[11 + 2 * i] * (tgt_len - 1) + [EOS_ID] for i, (_, tgt_len) in enumerate(lengths)]
    return EncodedText(src=Sentences.of(src), tgt=Sentences.of(tgt))


def random_encoded(seed: int = 0, *, pairs: int = 300) -> EncodedText:
    rng = np.random.default_rng(seed)
    src_len = rng.integers(1, 30, pairs)
    tgt_len = np.clip(src_len + rng.integers(-3, 4, pairs), 1, None)
    return encoded_of([(int(a), int(b)) for a, b in zip(src_len, tgt_len, strict=True)])


def pairs_in(batch: Batch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The rows of a batch that are no filling, without padding; checks the arrays' agreement on the way."""
    assert batch.src.dtype == batch.tgt_in.dtype == batch.tgt_out.dtype == np.int32
    found = []
    for src, tgt_in, tgt_out in zip(batch.src, batch.tgt_in, batch.tgt_out, strict=True):
        if not src.any():
            assert not tgt_in.any()
            assert not tgt_out.any()
            continue
        real = np.flatnonzero(tgt_out != PAD_ID)
        assert tgt_in[0] == BOS_ID
        assert tgt_out[real[-1]] == EOS_ID
        assert (tgt_in[real[1:]] == tgt_out[real[:-1]]).all()
        assert (tgt_in[len(real) :] == PAD_ID).all()
        found.append((tuple(src[src != PAD_ID].tolist()), tuple(tgt_out[real].tolist())))
    return found


def all_pairs(batches: Plan) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    return Counter(pair for batch in batches for pair in pairs_in(batch))


def expected_pairs(encoded: EncodedText) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    return Counter(
        (tuple(src.tolist()), tuple(tgt.tolist())) for src, tgt in zip(encoded.src, encoded.tgt, strict=True)
    )


@given(lengths=LENGTHS, max_tokens=st.integers(20, 200), num_buckets=st.integers(1, 6), epoch=st.integers(0, 3))
def test_an_epoch_holds_every_pair_once_within_the_budget(
    lengths: list[tuple[int, int]], max_tokens: int, num_buckets: int, epoch: int
) -> None:
    encoded = encoded_of(lengths)
    buckets = plan_buckets(encoded, config=BatchConfig(max_tokens=max_tokens, num_buckets=num_buckets, max_len=20))
    assert len(buckets) <= num_buckets
    for bucket in buckets:
        assert bucket.batch_size == max(1, max_tokens // max(bucket.src_len, bucket.tgt_len))
    plan = epoch_batches(encoded, buckets, seed=7, epoch=epoch)
    assert all_pairs(plan) == expected_pairs(encoded)
    assert {batch.shape for batch in plan} <= set(buckets)
    assert all(batch.src_segments is None and batch.tgt_segments is None for batch in plan)
    real = sum(batch.num_real for batch in plan)
    assert real == sum(map(sum, lengths))
    assert plan.padding_efficiency == real / sum(batch.num_positions for batch in plan)
    assert sum(batch.num_tokens for batch in plan) == sum(tgt_len for _, tgt_len in lengths)


def positions_of_best_ranges(encoded: EncodedText, *, max_tokens: int, num_buckets: int) -> int:
    """By trying all ways to cut the lengths into ranges."""
    longer = encoded.lengths.max(axis=1)
    keys = sorted(set(longer.tolist()))
    best = []
    for number in range(min(num_buckets, len(keys))):
        for cuts in combinations(keys[:-1], number):
            total = 0
            for low, high in zip((0, *cuts), (*cuts, keys[-1]), strict=True):
                inside = encoded.lengths[(longer > low) & (longer <= high)]
                src_len, tgt_len = inside.max(axis=0).tolist()
                rows = max(1, max_tokens // max(src_len, tgt_len))
                total += -(-len(inside) // rows) * rows * (src_len + tgt_len)
            best.append(total)
    return min(best)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=30), number=st.integers(1, 4)
)
def test_no_ranges_need_fewer_positions(lengths: list[tuple[int, int]], number: int) -> None:
    encoded = encoded_of(lengths)
    buckets = plan_buckets(encoded, config=BatchConfig(max_tokens=24, num_buckets=number, max_len=20))
    plan = epoch_batches(encoded, buckets, seed=0, epoch=0)
    positions = sum(batch.shape.positions for batch in plan)
    assert positions <= positions_of_best_ranges(encoded, max_tokens=24, num_buckets=number)


def test_one_odd_pair_does_not_make_a_bucket_long() -> None:
    """Ranges of the longer side would have targets of 20 in the bucket of sources of 20."""
    encoded = encoded_of([(20, 5)] * 100 + [(40, 10)] * 100 + [(19, 20), (40, 40)])
    buckets = plan_buckets(encoded, config=BatchConfig(max_tokens=200, num_buckets=3, max_len=40))
    assert [(bucket.src_len, bucket.tgt_len) for bucket in buckets] == [(20, 5), (40, 10), (40, 40)]


def test_six_buckets_leave_little_padding() -> None:
    encoded = random_encoded(pairs=3_000)
    efficiency = {}
    for number in (1, 6):
        buckets = plan_buckets(encoded, config=BatchConfig(max_tokens=500, num_buckets=number))
        efficiency[number] = epoch_batches(encoded, buckets, seed=0, epoch=0).padding_efficiency
    assert efficiency[1] < 0.55
    assert efficiency[6] > 0.8


def test_order_depends_on_seed_and_epoch_alone() -> None:
    encoded = random_encoded()
    buckets = plan_buckets(encoded, config=BatchConfig(max_tokens=100, num_buckets=4, max_len=40))

    def order(seed: int, epoch: int) -> list[list[int]]:
        plan = epoch_batches(encoded, buckets, seed=seed, epoch=epoch)
        return [plan.pairs(i).tolist() for i in range(len(plan))]

    assert order(1, 2) == order(1, 2)
    orders = [order(1, 2), order(1, 3), order(2, 1), order(2, 2), order(0, 0)]
    assert all(a != b for a, b in combinations(orders, 2))
    # Whole batches are shuffled among each other, too: the first ones are not all of one shape.
    plan = epoch_batches(encoded, buckets, seed=1, epoch=2)
    assert len({plan.batch(i).shape for i in range(12)}) > 1


def test_the_order_of_an_epoch_never_changes() -> None:
    """A resumed run relies on it, also with another version of numpy."""
    plan = epoch_batches(encoded_of([(2, 2)] * 8), [Bucket(2, 2, 3)], seed=5, epoch=1)
    assert [plan.pairs(i).tolist() for i in range(len(plan))] == [[0, 7, 6], [3, 1], [4, 2, 5]]


def test_a_batch_can_be_made_without_those_before_it() -> None:
    encoded = random_encoded()
    buckets = plan_buckets(encoded, config=BatchConfig(max_tokens=100, num_buckets=4, max_len=40))
    whole = list(epoch_batches(encoded, buckets, seed=3, epoch=1))
    late = epoch_batches(encoded, buckets, seed=3, epoch=1)
    assert len(late) == len(whole)
    for i in (len(whole) - 1, 5, 0):
        for name in ("src", "tgt_in", "tgt_out"):
            np.testing.assert_array_equal(getattr(late.batch(i), name), getattr(whole[i], name))
    for i in (-1, len(whole)):
        with pytest.raises(ValueError, match=rf"\[0, {len(whole)}\), got {i}"):
            late.batch(i)


@given(lengths=LENGTHS, number=st.integers(1, 4), seed=st.integers(0, 9), epoch=st.integers(1, 99))
def test_every_epoch_has_equally_many_batches(
    lengths: list[tuple[int, int]], number: int, seed: int, epoch: int
) -> None:
    encoded = encoded_of(lengths)
    buckets = plan_buckets(encoded, config=BatchConfig(max_tokens=40, num_buckets=number, max_len=20))
    first, later = (epoch_batches(encoded, buckets, seed=seed, epoch=e) for e in (0, epoch))
    assert len(first) == len(later)
    assert Counter(map(first.shape, range(len(first)))) == Counter(map(later.shape, range(len(later))))


def test_rows_are_made_apart_and_filled_up_with_padding() -> None:
    encoded = random_encoded()
    plan = epoch_batches(
        encoded,
        plan_buckets(encoded, config=BatchConfig(max_tokens=100, num_buckets=4, max_len=40)),
        seed=3,
        epoch=1,
    )
    check_rows(plan)


def check_rows(plan: Plan) -> None:
    """Pieces of a batch are the batch, then PAD; and `shape` and `pairs` say what stands in it."""
    for i in range(len(plan)):
        whole = plan.batch(i)
        size = whole.shape.batch_size
        assert plan.shape(i) == whole.shape
        assert whole.num_real == plan.encoded.lengths[plan.pairs(i)].sum()
        parts = [plan.rows(i, start, start + 2) for start in range(0, size + 4, 2)]
        for name in ("src", "tgt_in", "tgt_out", "src_segments", "tgt_segments"):
            if getattr(whole, name) is not None:
                rows = np.concatenate([getattr(part, name) for part in parts])
                np.testing.assert_array_equal(rows[:size], getattr(whole, name))
                assert not rows[size:].any()
    for start, stop in ((-1, 2), (2, 2), (3, 2)):
        with pytest.raises(ValueError, match=f"got rows {start} to {stop}"):
            plan.rows(0, start, stop)
    with pytest.raises(ValueError, match="number of a batch"):
        plan.pairs(len(plan))
    with pytest.raises(ValueError, match="number of a batch"):
        plan.shape(-1)


def test_an_epoch_refuses_what_fits_no_bucket_and_negative_seeds() -> None:
    encoded = encoded_of([(3, 3), (9, 2)])
    with pytest.raises(ValueError, match="got one of 9 source and 2 target pieces"):
        epoch_batches(encoded, [Bucket(4, 4, 2)], seed=0, epoch=0)
    with pytest.raises(ValueError, match="seed=-1"):
        epoch_batches(encoded, [Bucket(9, 9, 2)], seed=-1, epoch=0)


@given(lengths=LENGTHS, held_out=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=40))
def test_evaluation_drops_nothing_and_bounds_its_shapes(
    lengths: list[tuple[int, int]], held_out: list[tuple[int, int]]
) -> None:
    buckets = plan_buckets(encoded_of(lengths), config=BatchConfig(max_tokens=60, num_buckets=3, max_len=20))
    encoded = encoded_of(held_out)
    batches = evaluation_batches(encoded, buckets)
    assert all_pairs(batches) == expected_pairs(encoded)
    shapes = extend_buckets(encoded, buckets)
    assert batches.buckets == shapes
    assert shapes[: len(buckets)] == buckets
    assert len(shapes) <= len(buckets) + EXTRA_BUCKETS
    longest = encoded.lengths.max(axis=0)
    assert all(b.src_len <= longest[0] and b.tgt_len <= longest[1] for b in shapes[len(buckets) :])


def test_evaluation_goes_in_order_of_length() -> None:
    encoded = random_encoded()
    buckets = plan_buckets(encoded, config=BatchConfig(max_tokens=100, num_buckets=4, max_len=40))
    plan = evaluation_batches(encoded, buckets)
    order = np.concatenate([plan.pairs(i) for i in range(len(plan))])
    longer = encoded.lengths.max(axis=1)[order]
    assert (np.diff(longer) >= 0).all()


def test_long_pairs_are_counted_on_either_side() -> None:
    encoded = encoded_of([(3, 3), (9, 2), (2, 8), (9, 9), (5, 5)])
    kept, report = drop_long(encoded, max_len=5)
    assert kept.lengths.tolist() == [[3, 3], [5, 5]]
    assert report
    assert (report.dropped, report.source_too_long, report.target_too_long) == (3, 2, 2)
    assert str(report) == (
        "3 of 5 training pairs dropped, being longer than 5 pieces: "
        "2 on the source side (longest 9), 2 on the target side (longest 9)"
    )


def test_nothing_to_drop_and_nothing_left() -> None:
    encoded = encoded_of([(3, 3), (4, 2)])
    kept, report = drop_long(encoded, max_len=4)
    assert kept is encoded
    assert not report
    assert not str(report)
    with pytest.raises(ValueError, match="at most 2 pieces"):
        drop_long(encoded, max_len=2)


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="src_len=0"):
        Bucket(0, 1, 1)
