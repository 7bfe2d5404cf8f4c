"""Rung 3: what is neither trained nor given: running statistics, and tables of positions, stored or computed.

Evidence: `tables` {name: (the reference's, the port's)}, of tables as built that differ.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from parity.compare import Comparison, relative_error
from parity.facts import Facts, tensor_names
from parity.rungs import NotComparedError, Outcome, section
from parity.rungs.forward import compare_all, label, labelled
from parity.runs import Runs
from parity.tolerances import BITS_RULE, FLOAT64_RELATIVE, FLOAT64_RULE
from parity.trace import Trace, call_of, module_of
from parity.weights.mapping import Step

POSITIONAL = ("position", "rotary", "rope", "sinusoid", "alibi")
"""What stands in the name or the type of a module that makes a table of positions."""

STATISTICS = ("running_mean", "running_var")
"""torch's buffers that training changes: as built they are of no interest."""


def climb(runs: Runs) -> Outcome:
    """Tables as both sides build them; every buffer after a run; tables that modules compute. Others are named."""
    sections, notes = [], list(_of_one_side(runs))
    steps = _buffer_steps(runs)
    differing: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    tables, unknown = _as_built(runs, [s for s in steps if not s.sources[0].endswith(STATISTICS)], differing)
    notes += unknown
    if tables:
        sections.append(section("tables as built", "float64", FLOAT64_RULE, tables))
    kept = list(_after_a_run(runs, steps))
    if kept:
        rule = f"{BITS_RULE}: a run in evaluation mode changes no buffer"
        sections.append(section("buffers after a run", "float64", rule, kept))
    computed = [c for number in range(len(runs.batches)) for c in _computed(runs, number)]
    if computed:
        sections.append(section("tables of positions, computed", "float64", FLOAT64_RULE, computed))
    if not sections:
        raise NotComparedError("; ".join(["no buffer and no module of positions is on both sides", *notes]))
    return Outcome(sections=tuple(sections), notes=tuple(notes), evidence={"tables": differing})


def _buffer_steps(runs: Runs) -> list[Step]:
    """The part of the mapping that carries what is trained on neither side."""
    trained = runs.reference_runner.trained()
    names = [name for name in runs.weights if runs.derived.travels(name)]
    return [step for step in runs.mapping.plan(names) if not trained & {*step.sources}]


def _as_built(
    runs: Runs, steps: list[Step], differing: dict[str, tuple[np.ndarray, np.ndarray]]
) -> tuple[list[Comparison], list[str]]:
    """Values before any weight is loaded, in float64: what each side works out for itself. Fills `differing`."""
    named = [(step, target) for step in steps for target in step.targets]
    plain = _plain_arrays(runs)
    if not named and not plain:
        return [], []
    try:
        reference = runs.live_reference().built_tables()
    except NotComparedError as reason:
        return [], [f"tables as built: {reason}"]
    port = {name: spec for name, spec in runs.port_runner("float64").specs().items()}
    comparisons, abstract = [], []
    for step, target in named:
        if not hasattr(port[target], "__array__"):  # a port of shapes only
            abstract.append(target)
            continue
        expected = step.apply(reference)[target]
        comparisons.append(_table(target, np.asarray(port[target]), expected))
        if not comparisons[-1].passed:
            differing[target] = (expected, np.asarray(port[target]))
    for name, array in plain.items():
        if name in reference:
            comparisons.append(_table(name, array, reference[name]))
            if not comparisons[-1].passed:
                differing[name] = (reference[name], array)
    notes = (
        [f"the port is one of shapes only: {', '.join(abstract)} could not be compared as built"] if abstract else []
    )
    return comparisons, notes


def _plain_arrays(runs: Runs) -> dict[str, np.ndarray]:
    """Arrays of the port that are no variables, and bear the name of a buffer of the reference."""
    reference = tensor_names(runs.reference_facts)
    found = {}
    for name, tensor in tensor_names(runs.port_facts).items():
        path, _, leaf = name.rpartition(".")
        other = runs.derived.pairs.get(path)
        counterpart = None if other is None else f"{other}.{leaf}" if other else leaf
        if not tensor.settable and counterpart in reference and not reference[counterpart].trained:
            found[counterpart] = np.asarray(_attribute(runs.port_runner("float64").model, name))
    return found


def _attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = module[int(part)] if part.isdecimal() else getattr(module, part)
    return module


def _table(name: str, got: np.ndarray, expected: np.ndarray) -> Comparison:
    """In float64, or in the reference's precision where that is less."""
    detail = ""
    if _is_rounded(expected) and not _is_rounded(got):
        got, detail = got.astype(np.float32), "the reference's is rounded to float32, and so was the port's"
    error = relative_error(got.astype(np.float64), expected.astype(np.float64))
    if error > FLOAT64_RELATIVE and _is_rounded(got) and not _is_rounded(expected):
        rounded = np.array_equal(got.astype(np.float32), expected.astype(np.float32))
        detail = "the port's is rounded to float32, the reference's is not" if rounded else ""
    if error > FLOAT64_RELATIVE and not detail.startswith("the port's"):
        detail = _first_difference(got, expected)
    return Comparison(tensor=name, error=error, bound=FLOAT64_RELATIVE, detail=detail)


def _is_rounded(array: np.ndarray) -> bool:
    """Whether every value is one of float32."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(array, array.astype(np.float32), equal_nan=True))


def _first_difference(got: np.ndarray, expected: np.ndarray) -> str:
    if got.shape != expected.shape:
        return f"shape {expected.shape} in the reference, {got.shape} in the port"
    # `~ <=` finds NaN too.
    differ = np.argwhere(~(np.abs(got - expected) <= FLOAT64_RELATIVE * (np.abs(expected) + 1)))
    if not len(differ):
        return ""
    index = tuple(int(i) for i in differ[0])
    return f"first at {index}: {expected[index]:.9g} in the reference, {got[index]:.9g} in the port"


def _after_a_run(runs: Runs, steps: list[Step]) -> Iterator[Comparison]:
    """Running statistics and tables as the float64 runs leave them."""
    for number in range(len(runs.batches)):
        reference, port = runs.reference("float64", number).buffers, runs.port("float64", number).buffers
        for step in steps:
            if not reference.keys() >= {*step.sources}:
                continue
            for target, expected in step.apply(reference).items():
                got = port.get(target)
                same = got is not None and np.array_equal(got, expected, equal_nan=True)
                detail = (
                    "" if same else "no such buffer in the port" if got is None else _first_difference(got, expected)
                )
                name = target + label(runs, number)
                yield Comparison(tensor=name, error=0.0 if same else math.inf, bound=0.0, detail=detail)


def _computed(runs: Runs, number: int) -> Iterator[Comparison]:
    """What modules of positions return that were given no floating-point input: a table, or rows of one."""
    reference, port = runs.reference("float64", number), runs.port("float64", number)
    ours = {runs.names.of(path): facts for path, facts in runs.port_facts.items()}
    paths = {
        module_of(name)
        for trace in (reference, port)
        for name in trace.outputs
        if _is_positional(module_of(name), runs.reference_facts) or _is_positional(module_of(name), ours)
    }
    paths &= runs.reference_facts.keys() & ours.keys()
    expected, got = (_tables(trace, paths) for trace in (reference, port))
    yield from labelled(compare_all(got, expected), runs, number)


def _is_positional(path: str, facts: Facts) -> bool:
    words = [path.rpartition(".")[2], facts[path].type, *facts[path].bases] if path in facts else []
    return any(word in text.lower() for text in words for word in POSITIONAL)


def _tables(trace: Trace, paths: set[str]) -> Mapping[str, np.ndarray]:
    given = {call_of(name) for name in trace.given}
    return {n: a for n, a in trace.outputs.items() if module_of(n) in paths and call_of(n) not in given}


def _of_one_side(runs: Runs) -> Iterator[str]:
    for side, facts, names in (
        ("reference", runs.reference_facts, runs.derived.stays),
        ("port", runs.port_facts, runs.derived.own),
    ):
        floating = [n for n, t in tensor_names(facts).items() if n in names and "float" in t.dtype]
        if floating:
            yield f"only the {side} keeps {', '.join(floating)}: not compared as such, only in what modules return"
