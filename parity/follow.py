"""Two ways of looking for the first difference of two runs, on traces alone.

*Following*: the first call, in the order in which calls end, that was given the same and returned something else.
*Handing*: every module of the port was given the reference's own inputs, so that errors do not add up and each fault
shows by itself, several of them at once.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from parity.compare import relative_error
from parity.diagnose.by_rung import MODEL
from parity.diagnose.case import CaseBuilder, conventions_of, owner_of, same_ids
from parity.tolerances import FLOAT64_RELATIVE
from parity.trace import LOSS, Trace, call_of, method_of, module_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Followed:
    """What following the values through finds."""

    call: str
    """Empty for the model itself."""
    error: float
    explanation: str = ""
    called: bool = True


def follow(
    port: Trace, reference: Trace, *, names: frozenset[str], bounds: Mapping[str, float] | None = None
) -> Followed | None:
    """The first call, in the order in which calls end, that was given the same and returned something else.

    A call that the port did not make counts as one: the outermost of them. If whatever differs was given something
    that differs already, the fault is in the code of the module around it, at last in the model itself.
    """
    last_equal, first = "the start", None
    idle: Followed | None = None
    conventions = conventions_of(reference, port)
    for name, expected in reference.outputs.items():
        call, made = call_of(name), name in port.outputs
        if name not in names or (not made and method_of(call)):
            continue
        if not made:
            if not _returns_what_it_is_given(reference, call):
                return _not_made(port, reference, call, names)
            idle = idle or _not_made(port, reference, call, names)  # dropout, in evaluation: not what differs
            continue
        error = relative_error(port.outputs[name], expected)
        if error <= (bounds or {}).get(name, FLOAT64_RELATIVE):
            last_equal = last_equal if first else call
        elif _given_the_same(port, reference, call, conventions, bounds or {}):
            return Followed(call=call, error=error)
        elif first is None:
            between = f"between {last_equal}, the last that is equal, and {call}, which is given something else"
            first = Followed(call="", error=error, explanation=between)
    return first or _in_results(port, reference, bounds or {}) or idle


def _in_results(port: Trace, reference: Trace, bounds: Mapping[str, float]) -> Followed | None:
    """What the model makes of modules that are all equal."""
    for name, expected in {**reference.results, LOSS: reference.loss}.items():
        got = port.everything.get(name)
        error = float("inf") if got is None else relative_error(got, expected)
        if error > bounds.get(name, FLOAT64_RELATIVE):
            return Followed(call="", error=error, explanation=f"every module is equal, its {name} not")
    return None


def _returns_what_it_is_given(reference: Trace, call: str) -> bool:
    given = [array for name, array in reference.given.items() if call_of(name) == call]
    returned = [array for name, array in reference.outputs.items() if call_of(name) == call]
    return len(given) == len(returned) == 1 and np.array_equal(given[0], returned[0])


def _not_made(port: Trace, reference: Trace, call: str, names: frozenset[str]) -> Followed:
    """The outermost call around it that the port does not make either."""
    made = {call_of(name) for name in port.outputs}
    number = call.partition("#")[2]
    outermost = call
    path = owner_of(call)
    while path:
        around = f"{path}#{number}" if number else path
        known = any(call_of(name) == around for name in reference.outputs if name in names)
        if known and around not in made:
            outermost = around
        path = owner_of(path)
    return Followed(call=outermost, error=float("inf"), explanation="the port does not call it", called=False)


def _given_the_same(
    port: Trace, reference: Trace, call: str, conventions: frozenset[str], bounds: Mapping[str, float]
) -> bool:
    for key in (key for key in reference.given if call_of(key) == call):
        bound = max(FLOAT64_RELATIVE, bounds.get(key, 0.0))
        if key not in port.given or relative_error(port.given[key], reference.given[key]) > bound:
            return False
    return same_ids(reference, port, call, conventions)


def local_differences(
    handed: Trace,
    reference: Trace,
    cases_of: CaseBuilder,
    *,
    names: frozenset[str],
    bounds: Mapping[str, float] | None = None,
) -> list[str]:
    """Modules that differ by themselves, in the order in which their calls end.

    A module does if it returns something else though it was handed the reference's inputs, and its submodules do not;
    or if it gives one of them something else, though none before did wrong.
    """
    found: list[str] = []
    wrong: set[str] = set()
    for call in (*cases_of.calls, ""):
        children = cases_of.children(call)
        below = any(child in wrong for child in children)
        own = any(
            _returns_otherwise(handed, reference, one, names, bounds or {})
            for one in (call, *cases_of.methods(call))
            if one == call or call_of(one) in made_by_both(handed, reference)
        )
        gives = any(
            _gives_otherwise(handed, reference, one, cases_of.conventions)
            for one in (*children, *cases_of.methods(call))
        )
        if not _handed_over(handed, reference, call, cases_of.conventions):
            own = gives = False  # it could not be given the reference's inputs: whoever gave it others is at fault
        if (own or gives) and not below:
            found.append(module_of(call) or MODEL)
        if own or gives or below:
            wrong.add(call)
    return list(dict.fromkeys(found))


def made_by_both(handed: Trace, reference: Trace) -> frozenset[str]:
    """Calls that both made."""
    return frozenset(map(call_of, handed.outputs)) & frozenset(map(call_of, reference.outputs))


def _handed_over(handed: Trace, reference: Trace, call: str, conventions: frozenset[str]) -> bool:
    """Whether its arrays could be replaced, and its ids, which cannot be, are the same."""
    keys = [key for key in reference.given if call_of(key) == call]
    return same_ids(reference, handed, call, conventions) and all(
        key in handed.given and handed.given[key].shape == reference.given[key].shape for key in keys
    )


def _returns_otherwise(
    handed: Trace, reference: Trace, call: str, names: frozenset[str], bounds: Mapping[str, float]
) -> bool:
    if not call:
        pairs = [(name, handed.results.get(name), array) for name, array in reference.results.items()]
    else:
        own = [name for name in reference.outputs if call_of(name) == call and name in names]
        pairs = [(name, handed.outputs.get(name), reference.outputs[name]) for name in own]
    return any(
        got is None or relative_error(got, expected) > bounds.get(name, FLOAT64_RELATIVE)
        for name, got, expected in pairs
    )


def _gives_otherwise(handed: Trace, reference: Trace, call: str, conventions: frozenset[str]) -> bool:
    if not same_ids(reference, handed, call, conventions):
        return True
    keys = [key for key in reference.given if call_of(key) == call and key in handed.given]
    return any(relative_error(handed.given[key], reference.given[key]) > FLOAT64_RELATIVE for key in keys)
