"""The tree of modules, with the first that differs marked: for the terminal and for pages."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Literal

from parity.compare import Comparison
from parity.rungs import Rung
from parity.runs import Runs
from parity.trace import module_of

Status = Literal["equal", "first difference", "differs", "not compared"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """One module, or a folder of modules without a call of its own."""

    path: str
    """The reference's; empty for the model itself, the first node."""
    depth: int
    type: str
    """Class name; both sides' where they differ: `MultiheadAttention | MultiHeadAttention`."""
    status: Status
    """`differs` is downstream of the first difference, or one of several."""
    error: float | None = None
    """The largest of what it returned, in float64 where that fails or nothing does; None if nothing was compared."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


def tree(runs: Runs, rungs: Iterable[Rung], first: str | None) -> tuple[Node, ...]:
    """Every module of either side, parents before their children. `first`: the location's module or parameter.

    Errors are those of the rung `forward`; of gradients, where only they fail, those of a module's parameters.
    """
    here = {runs.derived.modules.get(path, path): facts.type for path, facts in runs.port_facts.items()}
    there = {path: facts.type for path, facts in runs.reference_facts.items()}
    errors, beyond = _errors(runs, list(rungs))
    paths = _in_order([*there, *here])
    marked = None if first is None else _marked(first, paths, runs.derived.modules)
    nodes = []
    for path in paths:
        types = dict.fromkeys(name for name in (there.get(path, ""), here.get(path, "")) if name)
        status: Status = "equal"
        if path == marked:
            status = "first difference"
        elif path not in errors:
            status = "not compared"
        elif path in beyond:
            status = "differs"
        depth = path.count(".") + 1 if path else 0
        nodes.append(Node(path=path, depth=depth, type=" | ".join(types), status=status, error=errors.get(path)))
    return tuple(nodes)


def _errors(runs: Runs, rungs: list[Rung]) -> tuple[dict[str, float], set[str]]:
    """{module: largest error}, and the modules that are beyond a bound."""
    by_name = {rung.name: rung for rung in rungs}
    errors: dict[str, float] = {}
    beyond: set[str] = set()
    for name, owner in (("forward", _module), ("gradients", _owner)):
        rung = by_name.get(name)
        if rung is None or (name == "gradients" and (beyond or not rung.failures)):
            continue
        for comparison in _of_runs(rung):
            path = runs.derived.modules.get(owner(comparison), owner(comparison))
            if path is None:
                continue
            if name == "forward":
                errors[path] = max(errors.get(path, 0.0), _number(comparison.error))
            if not comparison.passed:
                beyond.add(path)
                errors[path] = max(errors.get(path, 0.0), _number(comparison.error))
    return errors, beyond


def _of_runs(rung: Rung) -> Iterable[Comparison]:
    """Comparisons of the float64 run; of float32 only those that fail."""
    for section in rung.outcome.sections:
        for comparison in section.comparisons:
            if section.title.startswith(("modules and results", "gradients")) and (
                section.precision == "float64" or not comparison.passed
            ):
                yield comparison


def _module(comparison: Comparison) -> str:
    name = comparison.tensor.partition(" (batch")[0]
    return "" if name.startswith("output") and name.partition("[")[0] == "output" else module_of(name)


def _owner(comparison: Comparison) -> str:
    return comparison.tensor.partition(" (batch")[0].rpartition(".")[0]


def _number(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _in_order(paths: Iterable[str]) -> list[str]:
    """As they come, each behind its parent, parents that are no modules (lists) put in."""
    children: dict[str, dict[str, None]] = {}
    for path in dict.fromkeys(paths):
        parts = path.split(".") if path else []
        for depth in range(len(parts)):
            children.setdefault(".".join(parts[:depth]), {})[".".join(parts[: depth + 1])] = None
    ordered = [""]

    def visit(path: str) -> None:
        for child in children.get(path, ()):
            ordered.append(child)
            visit(child)

    visit("")
    return ordered


def _marked(first: str, paths: Iterable[str], modules: Mapping[str, str]) -> str | None:
    """The node of a location: a module, or the module that a parameter (by the port's name) belongs to."""
    known = set(paths)
    place = first.partition(" (batch")[0].partition(",")[0]
    for path in (place, modules.get(place.rpartition(".")[0], place.rpartition(".")[0])):
        if path in known and path:
            return path
    return "" if first == "the model itself" else None
