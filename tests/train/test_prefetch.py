"""Batches made ahead: in order, errors where they belong, nothing left running."""

import threading

import pytest

from train.prefetch import prefetched


def test_in_order_and_all_of_them() -> None:
    assert list(prefetched(lambda n: 2 * n, range(50), ahead=3)) == [2 * n for n in range(50)]
    assert list(prefetched(lambda n: n, [], ahead=3)) == []


def test_so_many_are_made_before_they_are_asked_for() -> None:
    made: list[int] = []
    enough = threading.Event()

    def make(number: int) -> int:
        made.append(number)
        if number == 3:
            enough.set()
        return number

    batches = prefetched(make, range(10), ahead=3)
    assert next(batches) == 0
    assert enough.wait(10)
    batches.close()
    assert made == [0, 1, 2, 3], "and no more than that"


def test_another_thread_makes_them() -> None:
    (name,) = prefetched(lambda _: threading.current_thread().name, [0])
    assert name.startswith("prefetch")


def test_an_error_comes_where_its_batch_would_have() -> None:
    def make(number: int) -> int:
        if number == 2:
            raise ValueError("batch 2 is broken")
        return number

    batches = prefetched(make, range(5))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="batch 2"):
        next(batches)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_whoever_stops_early_leaves_no_thread() -> None:
    batches = prefetched(lambda n: n, range(1000))
    assert next(batches) == 0
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
