"""Counting dropout masks: what was drawn once counts once."""

import numpy as np
import pytest

from parity import masks
from parity.masks import Site

LIMIT = 1e-6
RNG = np.random.default_rng(0)


def site(*drawn: np.ndarray) -> Site:
    counted = Site(shape=drawn[0].shape, agreeing=[0] * drawn[0].ndim, neighbours=[0] * drawn[0].ndim)
    for mask in drawn:
        counted.add(mask)
    return counted


def test_independent_elements_share_nothing() -> None:
    found = site(*(RNG.random((64, 8, 6)) < 0.9 for _ in range(20)))
    assert found.shared_axes(0.1, false_alarm=LIMIT) == frozenset()
    assert found.counted_once() == found


def test_a_mask_repeated_over_the_batch_counts_once_and_makes_no_other_axis_look_shared() -> None:
    drawn = [np.broadcast_to(RNG.random((1, 8, 6)) < 0.9, (64, 8, 6)) for _ in range(20)]
    found = site(*drawn)
    assert found.shared_axes(0.1, false_alarm=LIMIT) == frozenset({0})
    once = found.counted_once()
    assert once.size == 20 * 48
    assert once.share == pytest.approx(found.share, abs=1 / once.size)


def test_a_mask_repeated_over_two_axes() -> None:
    found = site(*(np.broadcast_to(RNG.random((8, 1, 6)) < 0.5, (8, 10, 6))[..., None] for _ in range(40)))
    assert found.shared_axes(0.5, false_alarm=LIMIT) == frozenset({1})


def test_everything_kept_is_no_mask_that_is_repeated() -> None:
    found = site(np.ones((4, 6), bool))
    assert found.counted_once() == found


@pytest.mark.parametrize(("size", "times"), [(masks.WANTED, 1), (masks.WANTED // 48 + 1, 1), (masks.WANTED // 160, 10)])
def test_a_draw_holds_as_many_batches_as_keep_draws_few(size: int, times: int) -> None:
    first = {"drop": np.ones(size, bool), "another": np.ones(7, bool)}
    assert masks.batches_a_draw(first, {"drop": 0.1}) == times
