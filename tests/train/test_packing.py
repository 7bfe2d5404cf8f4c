from collections import Counter
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.test_batching import LENGTHS, check_rows, encoded_of, expected_pairs, random_encoded
from train.batching import Batch, Bucket
from train.config import BatchConfig
from train.packing import PackedPlan, packed_epoch, plan_packing
from train.sentences import EncodedText, Sentences
from transformer_config.config import BOS_ID, EOS_ID, PAD_ID

CONFIG = BatchConfig(max_tokens=90, max_len=20, packing=True)


def segments_of(segments: np.ndarray, ids: np.ndarray) -> list[list[int]]:
    """The ids of each segment of a row; checks on the way that they stand one after the other, padding last."""
    number = int(segments.max(initial=0))
    lengths = [int((segments == n).sum()) for n in range(1, number + 1)]
    assert all(lengths)
    expected = np.repeat(np.arange(1, number + 1), lengths)
    assert segments.tolist() == [*expected.tolist(), *[0] * (len(segments) - len(expected))]
    assert ((segments == 0) == (ids == PAD_ID)).all()
    return [ids[segments == n].tolist() for n in range(1, number + 1)]


def pairs_in(batch: Batch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    assert batch.src_segments is not None
    assert batch.tgt_segments is not None
    found = []
    for row in range(len(batch.src)):
        src = segments_of(batch.src_segments[row], batch.src[row])
        tgt_in = segments_of(batch.tgt_segments[row], batch.tgt_in[row])
        tgt_out = segments_of(batch.tgt_segments[row], batch.tgt_out[row])
        for source, read, predicted in zip(src, tgt_in, tgt_out, strict=True):
            assert read[0] == BOS_ID
            assert source[-1] == predicted[-1] == EOS_ID
            assert read[1:] == predicted[:-1]
            found.append((tuple(source), tuple(predicted)))
    return found


@given(lengths=LENGTHS, max_tokens=st.integers(20, 200), epoch=st.integers(0, 3))
def test_an_epoch_holds_every_pair_once_in_one_shape(
    lengths: list[tuple[int, int]], max_tokens: int, epoch: int
) -> None:
    encoded = encoded_of(lengths)
    packing = plan_packing(encoded, config=BatchConfig(max_tokens=max_tokens, max_len=20, packing=True))
    assert max(packing.shape.src_len, packing.shape.tgt_len) == 20
    assert packing.shape.batch_size == max_tokens // 20
    plan = packed_epoch(encoded, packing, seed=7, epoch=epoch)
    batches = list(plan)
    assert {batch.shape for batch in batches} == {packing.shape}
    assert len(batches) == packing.num_batches == -(-packing.num_rows // packing.shape.batch_size)
    assert Counter(pair for batch in batches for pair in pairs_in(batch)) == expected_pairs(encoded)
    order = np.concatenate([plan.pairs(i) for i in range(len(plan))])
    assert sorted(order.tolist()) == list(range(len(lengths)))
    real = sum(batch.num_real for batch in batches)
    assert real == sum(map(sum, lengths))
    assert plan.padding_efficiency == real / sum(batch.num_positions for batch in batches)


def test_pairs_are_named_in_the_order_of_their_segments() -> None:
    encoded = random_encoded(pairs=60)
    plan = packed_epoch(encoded, plan_packing(encoded, config=BatchConfig(max_tokens=90, max_len=40)), seed=0, epoch=0)
    for i, batch in enumerate(plan):
        named = [(tuple(encoded.src[p].tolist()), tuple(encoded.tgt[p].tolist())) for p in plan.pairs(i).tolist()]
        assert named == pairs_in(batch)


def test_a_row_by_hand() -> None:
    encoded = encoded_of([(3, 2), (2, 3)])
    packing = plan_packing(encoded, config=BatchConfig(max_tokens=12, max_len=6))
    assert packing.shape == Bucket(src_len=6, tgt_len=6, batch_size=2)
    (batch,) = packed_epoch(encoded, packing, seed=0, epoch=0)
    assert batch.src.tolist() == [[12, EOS_ID, 10, 10, EOS_ID, 0], [0] * 6]
    assert batch.tgt_in.tolist() == [[BOS_ID, 13, 13, BOS_ID, 11, 0], [0] * 6]
    assert batch.tgt_out.tolist() == [[13, 13, EOS_ID, 11, EOS_ID, 0], [0] * 6]
    assert batch.src_segments is not None
    assert batch.tgt_segments is not None
    assert batch.src_segments.tolist() == [[1, 1, 2, 2, 2, 0], [0] * 6]
    assert batch.tgt_segments.tolist() == [[1, 1, 1, 2, 2, 0], [0] * 6]


def test_rows_are_made_apart_and_filled_up_with_padding() -> None:
    encoded = random_encoded()
    packing = plan_packing(encoded, config=BatchConfig(max_tokens=100, max_len=33))
    check_rows(packed_epoch(encoded, packing, seed=3, epoch=1))


def order_of(plan: PackedPlan) -> list[list[int]]:
    return [plan.pairs(i).tolist() for i in range(len(plan))]


def test_order_depends_on_seed_and_epoch_alone() -> None:
    encoded = random_encoded()
    packing = plan_packing(encoded, config=BatchConfig(max_tokens=100, max_len=40))

    def order(seed: int, epoch: int) -> list[list[int]]:
        return order_of(packed_epoch(encoded, packing, seed=seed, epoch=epoch))

    again = plan_packing(encoded, config=BatchConfig(max_tokens=100, max_len=40))
    assert order(1, 2) == order_of(packed_epoch(encoded, again, seed=1, epoch=2))
    orders = [order(1, 2), order(1, 3), order(2, 1), order(2, 2), order(0, 0)]
    assert {len(batches) for batches in orders} == {packing.num_batches}
    assert all(a != b for a, b in combinations(orders, 2))


def test_the_order_of_an_epoch_never_changes() -> None:
    """A resumed run relies on it, also with another version of numpy."""
    encoded = encoded_of([(2, 2)] * 5 + [(3, 3)] * 3)
    packing = plan_packing(encoded, config=BatchConfig(max_tokens=10, max_len=5))
    assert order_of(packed_epoch(encoded, packing, seed=5, epoch=1)) == [[3, 1, 7, 2], [6, 0, 5, 4]]


def lognormal(rng: np.random.Generator, mean: float, spread: float, pairs: int) -> np.ndarray:
    return rng.lognormal(np.log(mean) - spread**2 / 2, spread, pairs)


def captions(rng: np.random.Generator, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    src = lognormal(rng, 16, 0.33, pairs)
    return src, src * rng.lognormal(0, 0.15, pairs)


def long_tail(rng: np.random.Generator, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    src = lognormal(rng, 25, 0.6, pairs)
    return src, src * rng.lognormal(0, 0.2, pairs)


def unrelated(rng: np.random.Generator, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    return lognormal(rng, 25, 0.6, pairs), lognormal(rng, 25, 0.6, pairs)


def unbalanced(rng: np.random.Generator, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    src = lognormal(rng, 25, 0.4, pairs)
    return src, src * 0.6 * rng.lognormal(0, 0.15, pairs)


def half_rows(rng: np.random.Generator, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    src = lognormal(rng, 60, 0.4, pairs)
    return src, src * rng.lognormal(0, 0.15, pairs)


@pytest.mark.parametrize(
    ("draw", "at_least"),
    [(captions, 0.96), (long_tail, 0.97), (unrelated, 0.96), (unbalanced, 0.96), (half_rows, 0.94)],
)
def test_rows_are_full(
    draw: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]], at_least: float
) -> None:
    lengths = np.stack(draw(np.random.default_rng(0), 20_000), axis=1).round().astype(np.int64).clip(2, None)
    lengths = lengths[(lengths <= 128).all(axis=1)]
    sides = [Sentences.one_after_the_other(np.full(lengths[:, i].sum(), 5), lengths[:, i].copy()) for i in (0, 1)]
    encoded = EncodedText(*sides)
    packing = plan_packing(encoded, config=BatchConfig(max_tokens=2_500, max_len=128, packing=True))
    efficiency = packed_epoch(encoded, packing, seed=0, epoch=0).padding_efficiency
    # What is full on one side is as full as can be, however empty the other.
    totals, shape = lengths.sum(axis=0), packing.shape
    rows = max(totals[0] / shape.src_len, totals[1] / shape.tgt_len)
    best = totals.sum() / (rows * (shape.src_len + shape.tgt_len))
    assert at_least * best <= efficiency <= best


def test_a_packing_is_for_one_text_and_its_lengths() -> None:
    encoded = encoded_of([(3, 3), (9, 2)])
    with pytest.raises(ValueError, match="at most 8 pieces, got one of 9"):
        plan_packing(encoded, config=BatchConfig(max_len=8))
    packing = plan_packing(encoded, config=CONFIG)
    with pytest.raises(ValueError, match="got one for sentences of other lengths"):
        packed_epoch(encoded_of([(9, 2), (3, 3)]), packing, seed=0, epoch=0)
    with pytest.raises(ValueError, match="epoch=-1"):
        packed_epoch(encoded, packing, seed=0, epoch=-1)
