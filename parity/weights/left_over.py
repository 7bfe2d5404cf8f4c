"""Trained tensors for which no counterpart was found: why, and what rule would give them one (P22)."""

from collections.abc import Iterator

import numpy as np

from parity.facts import Facts, TensorFacts
from parity.weights.alignment import Alignment
from parity.weights.conversions import View
from parity.weights.pieces import Pieces
from parity.weights.problems import Candidates, TensorSpec


def left_over(reference: Facts, port: Facts, alignment: Alignment, found: Pieces) -> Iterator[str]:
    """A line for each, the reference's first."""
    used, filled = found.sources.keys() | found.sources_taken, found.targets.keys() | found.targets_taken
    ours = {n: _spec(t) for n, t in found.source_tensors.items() if t.trained and not t.same_as and n not in used}
    theirs = {n: _spec(t) for n, t in found.target_tensors.items() if t.trained and not t.same_as and n not in filled}
    near_ours, near_theirs = Candidates(ours), Candidates(theirs)
    partners = {other: path for path, other in alignment.pairs.items()}
    for name, spec in ours.items():
        home = _home(reference, name)
        reason = _reason(home, name, _other(alignment.port, partners.get(home.path)), side="port")
        yield f"unused {name!r} {spec}: {reason}{near_theirs.near(name, spec)}"
    for name, spec in theirs.items():
        home = _home(port, name)
        reason = _reason(home, name, _other(reference, alignment.pairs.get(home.path)), side="reference")
        yield f"missing {name!r} {spec}: {reason}{near_ours.near(name, spec)}"


def _reason(home: View, name: str, other: View | None, *, side: str) -> str:
    if other is None:
        return f"the {side} has no module {home.path!r}; name its counterpart in `modules`, or write a rule for it"
    names = ", ".join(other.tensors) or "no tensor of its own"
    return f"{home} has it, {other} of the {side} has {names}; write {_suggestion(home, name, other, side=side)}"


def _suggestion(home: View, name: str, other: View, *, side: str) -> str:
    """The rule, or the rules to choose from: of a matrix only the reader knows which way round it is stored."""
    leaf = name[len(home.path) + 1 :] if home.path else name
    likely = {"weight": ("kernel", "embedding", "scale"), "kernel": ("weight",), "embedding": ("weight",)}
    free = [n for n in (*likely.get(leaf, ()), *other.tensors) if n in other.tensors]
    counterpart = other.name(free[0]) if free else "..."
    source, target = (name, counterpart) if side == "port" else (counterpart, name)
    plain = f"Rule({source!r}, {target!r})"
    if free and {leaf, free[0]} == {"weight", "kernel"}:
        return f"Rule({source!r}, {target!r}, (Transpose(),)) if the weight is (out, in), {plain} if it is (in, out)"
    return plain


def _home(facts: Facts, name: str) -> View:
    """The module that has the tensor."""
    return next(View(facts, p) for p, m in facts.items() if name in {View(facts, p).name(n) for n in m.tensors})


def _other(facts: Facts, path: str | None) -> View | None:
    return None if path is None else View(facts, path)


def _spec(tensor: TensorFacts) -> TensorSpec:
    return TensorSpec(tensor.shape, np.dtype(tensor.dtype))
