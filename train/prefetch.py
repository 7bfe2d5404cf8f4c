"""Makes what is needed next while the device computes what is needed now."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
N = TypeVar("N")

AHEAD = 2
"""Batches that are ready and wait: one on the device, and one for the moment when that is taken."""


def prefetched(make: Callable[[N], T], numbers: Iterable[N], *, ahead: int = AHEAD) -> Generator[T, None, None]:
    """`make(number)` for each of them, in order, up to `ahead` of them made in a thread before they are asked for.

    An error of `make` is raised where its result would have come. Whoever stops early closes the iterator, or lets go
    of it: what has not been begun is then not made.

    >>> list(prefetched(lambda n: n * n, range(4)))
    [0, 1, 4, 9]
    """
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as thread:
        try:
            for number in numbers:
                waiting.append(thread.submit(make, number))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
