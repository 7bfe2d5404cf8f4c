"""What dropout masks look like, over many draws: how many elements are kept, and what is drawn together."""

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Mapping

import numpy as np

from parity.statistics import normal_limit

Masks = Mapping[str, np.ndarray]

WANTED = 3_500_000
"""Elements of one rate, pooled: eight random bits, 26/256 for a rate of 0.1, are seen all but certainly."""

MANY_DRAWS, FEW_DRAWS, MAX_DRAWS = 48, 16, 400
MAX_SECONDS = 4.0
"""For each side's draws, beyond the first two."""


@dataclasses.dataclass(kw_only=True)
class Site:
    """One site's masks, added up."""

    shape: tuple[int, ...]
    kept: int = 0
    size: int = 0
    agreeing: list[int] = dataclasses.field(default_factory=list)
    """For each axis: neighbours (first and second, third and fourth, ...) that are both kept or both dropped."""
    neighbours: list[int] = dataclasses.field(default_factory=list)
    """How many there are."""
    digests: list[bytes] = dataclasses.field(default_factory=list)
    """One a draw."""

    @property
    def share(self) -> float:
        """Kept, of all elements."""
        return self.kept / self.size

    def add(self, mask: np.ndarray) -> None:
        """One more draw. Raises ValueError if its shape is another one."""
        if mask.shape != self.shape:
            raise ValueError(f"expected masks of one shape, got {self.shape} and then {mask.shape}")
        self.kept += int(np.count_nonzero(mask))
        self.size += mask.size
        self.digests.append(hashlib.blake2b(np.packbits(mask).tobytes(), digest_size=16).digest())
        for axis, length in enumerate(mask.shape):
            pairs = length // 2
            first, second = (mask.take(range(start, 2 * pairs, 2), axis=axis) for start in (0, 1))
            self.agreeing[axis] += int(np.count_nonzero(first == second))
            self.neighbours[axis] += first.size

    def counted_once(self) -> "Site":
        """The site with as many elements as were drawn: of a mask that is repeated along an axis, one."""
        times = math.prod(self.shape[axis] for axis in self._repeated())
        return dataclasses.replace(self, kept=round(self.kept / times), size=max(1, self.size // times))

    def _repeated(self) -> set[int]:
        """Axes along which all neighbours agree, though not everything is kept, or dropped."""
        if not 0 < self.kept < self.size:
            return set()
        counts = enumerate(zip(self.agreeing, self.neighbours, strict=True))
        return {axis for axis, (agreeing, pairs) in counts if pairs and agreeing == pairs}

    def shared_axes(self, rate: float, *, false_alarm: float) -> frozenset[int]:
        """Axes along which neighbours agree more often than independent ones of this rate do: one mask for several."""
        expected = rate**2 + (1.0 - rate) ** 2
        # What is repeated along an axis was drawn once, so along the others it counts once.
        found = self._repeated()
        times = math.prod(self.shape[axis] for axis in found)
        for axis, (agreeing, pairs) in enumerate(zip(self.agreeing, self.neighbours, strict=True)):
            error = (expected * (1.0 - expected) * times / pairs) ** 0.5 if pairs else float("inf")
            if pairs and agreeing / pairs - expected > normal_limit(false_alarm) * error > 0.0:
                found.add(axis)
        return frozenset(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """All sites of one side."""

    sites: Mapping[str, Site]
    draws: int

    def alike(self) -> frozenset[tuple[str, str]]:
        """Pairs of sites of one shape whose masks were the same in every draw."""
        first: dict[tuple[object, ...], str] = {}
        pairs = set()
        for name, site in self.sites.items():
            if 0 < site.kept < site.size:
                before = first.setdefault((site.shape, *site.digests), name)
                if before != name:
                    pairs.add((before, name))
        return frozenset(pairs)

    def repeating(self) -> frozenset[str]:
        """Sites that had the same mask in the first and the second draw."""
        return frozenset(name for name, s in self.sites.items() if 0 < s.kept < s.size and s.digests[0] == s.digests[1])


def batches_a_draw(first: Masks, rates: Mapping[str, float]) -> int:
    """How many times a batch is put into one draw, so that a few dozen draws are enough; 1 where they are anyway."""
    counts: dict[float, int] = {}
    for name, mask in first.items():
        if name in rates:
            counts[rates[name]] = counts.get(rates[name], 0) + mask.size
    draws = WANTED / max(1, min(counts.values(), default=WANTED))
    return 1 if draws <= MANY_DRAWS else math.ceil(draws / FEW_DRAWS)


def draw(masks_of: Callable[[int], Masks], rates: Mapping[str, float], *, wanted: int = WANTED) -> Drawn:
    """Draws with one seed after the other until every rate has so many elements, or time is up."""
    started = time.perf_counter()
    sites: dict[str, Site] = {}
    draws = 0
    while draws < 2 or (draws < MAX_DRAWS and _elements(sites, rates) < wanted):
        if draws >= 2 and time.perf_counter() - started > MAX_SECONDS:
            break
        for name, mask in masks_of(draws).items():
            axes = mask.ndim
            site = sites.setdefault(name, Site(shape=mask.shape, agreeing=[0] * axes, neighbours=[0] * axes))
            site.add(mask)
        draws += 1
        if not sites:
            break
    return Drawn(sites=sites, draws=draws)


def pooled(sites: Mapping[str, Site], rates: Mapping[str, float]) -> dict[float, tuple[int, int]]:
    """Rate -> (kept, size) over all sites of that rate."""
    sums: dict[float, tuple[int, int]] = {}
    for name, site in sites.items():
        if name in rates:
            kept, size = sums.get(rates[name], (0, 0))
            sums[rates[name]] = (kept + site.kept, size + site.size)
    return sums


def _elements(sites: Mapping[str, Site], rates: Mapping[str, float]) -> int:
    return min((size for _, size in pooled(sites, rates).values()), default=0)
