"""What the charts of the page show, picked out of the document: errors of module outputs and of gradients, in order."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Document = Mapping[str, Any]

POOLED = "all of them, pooled"
_BATCH = re.compile(r" \(batch \d+\)$")


@dataclasses.dataclass(kw_only=True)
class Point:
    """One tensor, of all batches the worst; None where it was not compared in that precision."""

    name: str
    exact: float | None = None
    """Relative difference of the two float64 runs."""
    exact_bound: float | None = None
    port: float | None = None
    """The port's float32 distance from the float64 answer."""
    reference: float | None = None
    """The reference's."""
    bound: float | None = None
    passed: bool = True

    @property
    def errors(self) -> tuple[float, ...]:
        """Those that are known."""
        return tuple(error for error in (self.exact, self.port, self.reference) if error is not None)


def outputs(document: Document) -> list[Point]:
    """Of every module's output and of the results, in the order in which the reference's calls ended."""
    return _points(_sections(document, "forward", "modules and results"))


def gradients(document: Document) -> list[Point]:
    """Of every parameter, by the port's names; without those that are zero in exact arithmetic."""
    return _points(_sections(document, "gradients", "gradients"))


def number(value: float | str | None) -> float:
    """As it was before it was written: JSON has no infinity."""
    return math.nan if value is None else float(value)


def _sections(document: Document, rung: str, title: str) -> Iterator[Mapping[str, Any]]:
    for entry in document["rungs"]:
        if entry["name"] == rung:
            yield from (s for s in entry["sections"] if _BATCH.sub("", s["title"]) == title)


def _points(sections: Iterable[Mapping[str, Any]]) -> list[Point]:
    points: dict[str, Point] = {}
    for section in sections:
        for comparison in section["comparisons"]:
            name = _BATCH.sub("", comparison["tensor"])
            if name != POOLED:
                _add(points.setdefault(name, Point(name=name)), comparison, section["precision"])
    return list(points.values())


def _add(point: Point, comparison: Mapping[str, Any], precision: str) -> None:
    error, bound = number(comparison["error"]), number(comparison["bound"])
    point.passed = point.passed and comparison["passed"]
    if precision == "float64":
        if point.exact is None or not error <= point.exact:
            point.exact, point.exact_bound = error, bound
    elif precision == "float32" and (point.port is None or not error <= point.port):
        point.port, point.bound, point.reference = error, bound, number(comparison["reference"])
