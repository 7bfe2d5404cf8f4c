"""Rung 2: which tensors there are, which are trained, and the hyper-parameters that can be read off the modules.

Nothing is run: what fails here would be a riddle in a later rung (P13, P22, P26).
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from parity.compare import Comparison
from parity.facts import Facts, ModuleFacts, Setting, join, tensor_names
from parity.rungs import Outcome, Section, section
from parity.runs import Runs
from parity.tolerances import EXACT_RULE
from parity.weights.derived import Derived
from parity.weights.problems import MappingError, quote


def climb(runs: Runs) -> Outcome:
    """Tensors first; what is trained and how much of it, where every tensor has its place; settings in any case."""
    derived, reference, port = runs.derived, runs.reference_facts, runs.port_facts
    alone = list(_modules_of_one_side(derived, reference, port))
    problems = list(_problems(runs))
    sections: list[Section] = []
    if problems:
        sections.append(section("tensors", "static", EXACT_RULE, [*alone, *problems]))
    else:
        sections.append(section("tensors", "static", EXACT_RULE, _tensors(runs)))
        sections.append(section("what is trained", "static", EXACT_RULE, [*_trained(runs), _count(runs)]))
    settings = list(_settings(derived, reference))
    if settings:
        sections.append(section("settings", "static", EXACT_RULE, settings))
    return Outcome(sections=tuple(sections), known=runs.known, notes=tuple(_notes(derived, reference)))


def _problems(runs: Runs) -> Iterator[Comparison]:
    """One for each line of what does not fit; none if every tensor has its place."""
    lines: Iterable[str] = runs.derived.problems
    if not lines:
        try:
            _ = runs.port_weights
        except MappingError as error:
            lines = error.problems
    for line in lines:
        named = re.search(r"'([^']*)'", line)
        yield Comparison(tensor=named[1] if named else "mapping", error=math.inf, bound=0.0, detail=line)


def _modules_of_one_side(derived: Derived, reference: Facts, port: Facts) -> Iterator[Comparison]:
    """Modules none of whose trained tensors has a place on the other side: a final norm, for one (P13)."""
    for side, facts, used in (("reference", reference, derived.table.takes), ("port", port, derived.table.gives)):
        for path, module in facts.items():
            trained = [name for name, tensor in module.tensors.items() if tensor.trained and not tensor.same_as]
            if trained and not any(used(join(path, name)) for name in trained):
                detail = f"only the {side} has it: {module.type} with {', '.join(trained)}"
                yield Comparison(tensor=path or "the model itself", error=math.inf, bound=0.0, detail=detail)


def _tensors(runs: Runs) -> Iterator[Comparison]:
    """Every tensor of the port, filled with an array of its shape: `port_weights` has seen to that."""
    for name in runs.port_weights:
        yield Comparison(tensor=name, error=0.0, bound=0.0)


def _trained(runs: Runs) -> Iterator[Comparison]:
    """What is trained on one side and fixed on the other: equal outputs, and every later step differs (P26)."""
    ours, theirs = runs.port_runner("float32").trained(), runs.reference_runner.trained()
    for step in runs.mapping.plan(name for name in runs.weights if runs.derived.travels(name)):
        sources = {name in theirs for name in step.sources}
        for target in step.targets:
            same = sources == {target in ours}
            words = {True: "trained", False: "not trained"}
            theirs_words = " and ".join(sorted(words[s] for s in sources))
            detail = f"{quote(step.sources)} is {theirs_words} in the reference, {words[target in ours]} in the port"
            yield Comparison(tensor=target, error=0.0 if same else math.inf, bound=0.0, detail="" if same else detail)


def _count(runs: Runs) -> Comparison:
    """Elements that an optimizer changes; without those that a known difference leaves no place for."""
    theirs = runs.reference_runner.trained() - runs.derived.held
    expected = sum(int(np.size(array)) for name, array in runs.weights.items() if name in theirs)
    ours = runs.port_runner("float32").trained()
    found = sum(math.prod(spec.shape) for name, spec in runs.port_runner("float32").specs().items() if name in ours)
    detail = f"{expected:,} in the reference, {found:,} in the port"
    return Comparison(tensor="number of trained parameters", error=abs(expected - found), bound=0.0, detail=detail)


def _settings(derived: Derived, reference: Facts) -> Iterator[Comparison]:
    """Of every pair of modules, what both sides say of themselves; in the reference's order, which is that of use."""
    order = {path: number for number, path in enumerate(reference)}
    for path, other in sorted(derived.pairs.items(), key=lambda pair: order[pair[1]]):
        yield from compare_settings(other or "the model itself", reference[other], derived.port[path])


def compare_settings(name: str, reference: ModuleFacts, port: ModuleFacts) -> Iterator[Comparison]:
    """Every setting that both have. Of users' own modules only those of one type: a name may mean two things."""
    both_known = bool(reference.layer and port.layer)
    for setting, expected in reference.settings.items():
        if setting not in port.settings:
            continue
        found = port.settings[setting]
        if not both_known and _kind(expected) != _kind(found):
            continue
        same = _equal(expected, found)
        detail = f"reference {_said(expected)}, port {_said(found)}"
        yield Comparison(tensor=f"{name}: {setting}", error=0.0 if same else math.inf, bound=0.0, detail=detail)


def _kind(value: Setting) -> type:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float
    return type(value)


def _equal(expected: Setting, found: Setting) -> bool:
    if _kind(expected) != _kind(found):
        return False
    if isinstance(expected, str) and isinstance(found, str):
        # A bare `gelu`, out of a config, does not say which.
        bare = "(" not in expected or "(" not in found
        return expected == found or (bare and expected.partition(" (")[0] == found.partition(" (")[0])
    if isinstance(expected, float) and isinstance(found, (int, float)):
        return math.isclose(expected, found, rel_tol=1e-9)
    if isinstance(expected, tuple) and isinstance(found, tuple):
        return len(expected) == len(found) and all(map(_equal, expected, found))
    return expected == found


def _said(value: Setting) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


_ONE_SIDED: Mapping[str, str] = {
    "padding_idx": "in torch its row gets no gradient; the gradients tell whether the port's does",
    "max_norm": "torch rescales rows that are longer; the outputs tell whether the port does",
}


def _notes(derived: Derived, reference: Facts) -> Iterator[str]:
    for path, other in derived.pairs.items():
        port = derived.port[path]
        for setting, meaning in _ONE_SIDED.items():
            value = reference[other].settings.get(setting)
            if value is not None and setting not in port.settings:
                yield f"{other} has {setting}={value}, which the port's {port.type} does not know: {meaning}"
    frozen = [n for n, t in tensor_names(reference).items() if n in derived.stays and not t.same_as]
    if frozen:
        yield f"the reference alone keeps {', '.join(frozen)}: not trained"
    if derived.own:
        yield f"the port alone keeps {', '.join(sorted(derived.own))}: not trained"
