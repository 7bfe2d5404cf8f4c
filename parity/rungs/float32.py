"""The second gate: how far each side's float32 run is from the float64 answer, the port's judged by the reference's."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from parity.compare import Comparison
from parity.rungs import Section, section
from parity.tolerances import FLOAT32, FLOAT32_DRAWS, NarrowRule

POOLED = "all of them, pooled"

Errors = Mapping[str, float]


def judged(
    title: str,
    ours: Errors,
    theirs: Errors,
    *,
    again: Callable[[int], Errors] | None = None,
    redrawn: set[str] | None = None,
    rule: NarrowRule = FLOAT32,
    floors: Errors = MappingProxyType({}),
) -> Section:
    """A section of every tensor and of all of them pooled. `again(k)` gives the reference's errors in further run k.

    `floors`: of single tensors, where theirs are higher than the rule's.

    Where a tensor is beyond its bound, up to FLOAT32_DRAWS further runs of the reference are asked; their tensors are
    added to `redrawn` if that settles it.
    """
    comparisons = first = list(against_float64(ours, theirs, rule=rule, floors=floors))
    failed = [c for c in comparisons if not c.passed]
    further: list[Errors] = []
    may_be_chance = all(math.isfinite(c.error) for c in failed)
    while failed and may_be_chance and again is not None and len(further) < FLOAT32_DRAWS:
        further.append(again(len(further)))
        comparisons = list(judged_again(first, further, rule=rule))
        failed = [c for c in comparisons if not c.passed]
    if failed:
        comparisons = first
    elif redrawn is not None:
        redrawn |= {c.tensor for c in first if not c.passed}
    return section(title, rule.precision, rule.sentence, comparisons)


def against_float64(
    ours: Errors, theirs: Errors, *, rule: NarrowRule, floors: Errors = MappingProxyType({})
) -> Iterator[Comparison]:
    """The port's errors, judged by the reference's. Each tensor for itself, then all of them pooled."""
    floors = {name: max(rule.floor, floors.get(name, 0.0)) for name in ours}
    for name, error in ours.items():
        bound = max(rule.ratio * theirs[name], floors[name])
        yield Comparison(tensor=name, error=error, bound=bound, reference=theirs[name])
    # Over many tensors chance evens out, so here the ratio alone decides; two tensors are not many.
    pooled, floor = _root_mean_square(theirs), _root_mean_square(floors) / math.sqrt(max(1, len(floors)))
    bound = max(rule.ratio * pooled, floor)
    yield Comparison(tensor=POOLED, error=_root_mean_square(ours), bound=bound, reference=pooled)


def judged_again(
    comparisons: Iterable[Comparison], further: Sequence[Errors], *, rule: NarrowRule
) -> Iterator[Comparison]:
    """The same comparisons, where each that failed is judged by the reference's largest error over further runs.

    The pooled one by the largest pooled error: over many tensors they are all alike, over a few they are not.
    """
    for comparison in comparisons:
        if comparison.passed:
            yield comparison
        else:
            name = comparison.tensor
            largest = max(_root_mean_square(run) if name == POOLED else run[name] for run in further)
            yield dataclasses.replace(comparison, bound=max(comparison.bound, rule.ratio * largest))


def _root_mean_square(run: Errors) -> float:
    return math.sqrt(sum(error * error for error in run.values()) / max(len(run), 1))
