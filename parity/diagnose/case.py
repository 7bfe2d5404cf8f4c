"""What a suspect is shown: one value that differs, and everything it may have been computed from."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from parity.compare import relative_error
from parity.facts import ModuleFacts
from parity.pair import Inputs
from parity.tolerances import FLOAT64_RELATIVE
from parity.trace import Trace, call_of, method_of, module_of

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The first value that the code of one module makes differently on both sides, though it was given the same.

    That is what the module returns or, where it has submodules, what it gives to the first of them that is given
    something else. Arrays are those of the float64 runs.
    """

    module: str
    """The reference's path; empty for the model itself."""
    child: str = ""
    """Full path of the submodule that is given something else; empty: the value is what the module returns."""
    types: tuple[str, str] = ("", "")
    """Class names, reference first."""
    child_type: str = ""
    method: str = ""
    """Where it is not the module that was called, but one of its methods."""
    expected: np.ndarray
    """The reference's."""
    got: np.ndarray
    """The port's."""
    given: tuple[np.ndarray, ...] = ()
    """Floating-point inputs of the module's call."""
    given_ids: tuple[np.ndarray, ...] = ()
    """Its other inputs: ids and boolean masks."""
    inside: Mapping[str, tuple[np.ndarray, np.ndarray | None]] = dataclasses.field(default_factory=dict)
    """By name, what its submodules returned before: on the reference's side and, if the port called it, the port's."""
    later: Arrays = dataclasses.field(default_factory=dict)
    """What other submodules returned on the port's side: it may have called them earlier."""
    afterwards: Arrays = dataclasses.field(default_factory=dict)
    """What the port goes on with: its own arrays given to later submodules, and what the module returns."""
    child_returned: np.ndarray | None = None
    """The port's output of the child."""
    inside_types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Class names of these submodules, by their full paths."""
    weights: Arrays = dataclasses.field(default_factory=dict)
    """The module's parameters in the port's layout, and those of its submodules, by names relative to it."""
    other_weights: Arrays = dataclasses.field(default_factory=dict)
    """Every parameter of the port that is not this module's, by its full name."""
    settings: Mapping[str, tuple[object, object]] = dataclasses.field(default_factory=dict)
    """Hyper-parameters read off the module, reference first."""
    elsewhere: Callable[[], tuple[Arrays, Arrays]] = lambda: ({}, {})
    """What every other module was given or returned, by name, reference first."""
    inputs: Inputs = dataclasses.field(default_factory=dict)
    """The model's."""
    masks: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Dropout masks handed to both, by site; True = keep. None in evaluation."""
    rerun: Callable[[Arrays], np.ndarray | None] | None = None
    """Runs the port with some of the module's parameters changed (by their relative names); gives the same value."""

    @property
    def discrete(self) -> bool:
        """Whether the value is an array of ids or a mask."""
        return not np.issubdtype(self.expected.dtype, np.floating)

    @property
    def leaf(self) -> bool:
        """Whether the value is all that the module computes from its own inputs and parameters."""
        return not self.child and not self.inside

    @property
    def x(self) -> np.ndarray:
        """The first floating-point input. Raises ValueError if there is none."""
        if not self.given:
            raise ValueError(f"{self.module}: expected a floating-point input, got none")
        return self.given[0]

    @property
    def where(self) -> str:
        """`what self_attn is given in encoder.layers.0`, for sentences."""
        owner = self.module or "the model"
        if not self.child:
            return f"what {owner} returns"
        return f"what {owner} gives to {self.child.removeprefix(self.module + '.')}"


def _is_at(site: str, path: str) -> bool:
    """Whether a site of dropout belongs to a module, and to none below another one."""
    return not path or module_of(site) == path or module_of(site).startswith(path + ".")


def owner_of(call: str) -> str:
    """`layers.0.norm#2` -> `layers.0`."""
    return module_of(call).rpartition(".")[0]


def same_ids(reference: Trace, port: Trace, call: str, conventions: frozenset[str] = frozenset()) -> bool:
    """Whether a call was given the same ids and masks, as far as they are of one shape and type.

    `conventions`: names of modules to which True means something else on the other side.
    """
    if module_of(call).rpartition(".")[2] in conventions:
        return True
    return all(
        _same_array(array, port.given_ids.get(name))
        for name, array in reference.given_ids.items()
        if call_of(name) == call
    )


def conventions_of(reference: Trace, port: Trace) -> frozenset[str]:
    """Names of modules that return the same although their masks differ."""
    return frozenset(
        module_of(name).rpartition(".")[2]
        for name, array in reference.outputs.items()
        if name in port.outputs
        and not same_ids(reference, port, call_of(name))
        and relative_error(port.outputs[name], array) <= FLOAT64_RELATIVE
    )


def _same_array(one: np.ndarray, other: np.ndarray | None) -> bool:
    if other is None or one.shape != other.shape or one.dtype.kind != other.dtype.kind:
        return True
    return np.array_equal(one, other)


class CaseBuilder:
    """Makes cases out of two traces of the same inputs."""

    def __init__(
        self,
        reference: Trace,
        port: Trace,
        *,
        facts: tuple[Mapping[str, ModuleFacts], Mapping[str, ModuleFacts]] = ({}, {}),
        paths: Mapping[str, str] | None = None,
        port_weights: Arrays | None = None,
        inputs: Inputs | None = None,
        run: Callable[[Arrays], Trace] | None = None,
        masks: Mapping[str, np.ndarray] | None = None,
    ):
        """`paths`: reference's module path -> port's, where they differ. `run`: the port with other weights."""
        self.reference, self.port = reference, port
        self.facts, self.paths = facts, paths or {}
        self.port_weights, self.inputs, self.run, self.masks = port_weights or {}, inputs or {}, run, masks or {}

    @functools.cached_property
    def calls(self) -> tuple[str, ...]:
        """Calls of the reference, in the order in which they ended, but for those of a module's own methods.

        A method that another module calls (an embedding's `attend`) is one of them. It is told from those that the
        module calls itself by the order: these end before the call that they are part of.
        """
        every = list(dict.fromkeys(call_of(name) for name in self.reference.outputs))
        last = {call: i for i, call in enumerate(every) if not method_of(call)}
        plain = {module_of(call): i for call, i in last.items()}
        return tuple(
            call
            for i, call in enumerate(every)
            if not method_of(call) or (module_of(call) and i > plain.get(module_of(call), -1))
        )

    @functools.cached_property
    def conventions(self) -> frozenset[str]:
        """Names of modules to which the masks of either side mean something else."""
        return conventions_of(self.reference, self.port)

    def around(self, call: str) -> str:
        """The call of a module that one of its methods was part of, if that was given the same; or the call itself."""
        if not method_of(call):
            return call
        path = module_of(call)
        if not path:
            return ""
        every = list(dict.fromkeys(call_of(name) for name in self.reference.outputs))
        later = every[every.index(call) :]
        whole = next((c for c in later if module_of(c) == path and not method_of(c)), None)
        return whole if whole is not None and same_given(self.reference, self.port, whole) else call

    @functools.cached_property
    def called(self) -> frozenset[str]:
        """Paths of modules that were called on the reference's side."""
        return frozenset(module_of(call) for call in self.calls)

    def case(self, call: str) -> Case | None:
        """Of a call that was given the same and returned something else; empty for the model itself.

        None if nothing that can be compared differs, or a submodule's argument is missing.
        """
        for child in self.children(call):
            for name in _arrays_of(self.reference.given_ids, child):
                theirs, ours = self.reference.given_ids[name], self.port.given_ids.get(name)
                if not _same_array(theirs, ours) and not same_ids(self.reference, self.port, child, self.conventions):
                    assert ours is not None, "an array that is missing counts as the same"
                    return self._made(call, child, theirs, ours, rerun=None)
            for name in _arrays_of(self.reference.given, child):
                found = self._differing(self.reference.given[name], self.port.given.get(name))
                if found is not None:
                    return self._made(call, child, *found, rerun=self._rerun(call, lambda t, n=name: t.given.get(n)))  # type: ignore[misc]
        expected, got = ((trace.everything if not call else trace.outputs) for trace in (self.reference, self.port))
        names = _arrays_of(expected, call) if call else [*self.reference.results]
        for name in names:
            found = self._differing(expected[name], got.get(name))
            if found is not None:
                rerun = self._rerun(call, lambda t, n=name: (t.outputs if call else t.results).get(n))  # type: ignore[misc]
                return self._made(call, "", *found, rerun=rerun)
        return None

    def _rerun(self, call: str, value: Callable[[Trace], np.ndarray | None]) -> Any:
        run, path = self.run, self.paths.get(module_of(call), module_of(call))
        if run is None:
            return None

        def rerun(changed: Arrays) -> np.ndarray | None:
            names = {f"{path}.{name}" if path else name: array for name, array in changed.items()}
            return value(run({**self.port_weights, **names}))

        return rerun

    def methods(self, call: str) -> list[str]:
        """Calls of the module's own methods that were part of this one."""
        path = module_of(call)
        if method_of(call):
            return []
        every = list(dict.fromkeys(call_of(name) for name in self.reference.outputs))
        own = [(i, other) for i, other in enumerate(every) if method_of(other) and module_of(other) == path]
        ends = [i for i, other in enumerate(every) if other == call] or [len(every)]
        starts = [
            i for i, other in enumerate(every) if module_of(other) == path and not method_of(other) and i < ends[0]
        ]
        return [other for i, other in own if (starts[-1] if starts else -1) < i < ends[0]]

    def children(self, call: str) -> list[str]:
        """Calls that the call of a module made itself, in order: those of submodules below no other called one."""
        if method_of(call):
            return []
        path = module_of(call)
        prefix = path + "." if path else ""
        direct = [
            other
            for other in self.calls
            if module_of(other).startswith(prefix) and module_of(other) != path and not self._between(path, other)
        ]
        total, number = self._count(path), _number(call)
        own = []
        for other in direct:
            each = max(1, self._count(module_of(other)) // max(1, total))
            if (number - 1) * each < _number(other) <= number * each:
                own.append(other)
        return own

    def _between(self, path: str, call: str) -> bool:
        parent = owner_of(call)
        while len(parent) > len(path):
            if parent in self.called:
                return True
            parent = parent.rpartition(".")[0]
        return False

    def _count(self, path: str) -> int:
        return sum(module_of(call) == path and not method_of(call) for call in self.calls) if path else 1

    def _differing(self, expected: np.ndarray, got: np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
        if got is None or relative_error(got, expected) <= FLOAT64_RELATIVE:
            return None
        return expected, got

    def _made(self, call: str, child: str, expected: np.ndarray, got: np.ndarray, *, rerun: Any) -> Case:
        path = module_of(call)
        before: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
        later: dict[str, np.ndarray] = {}
        reached = False
        children = self.children(call)
        for other in children:
            reached = reached or other == child
            for name in _arrays_of(self.reference.outputs, other):
                if not reached:
                    before[name] = (self.reference.outputs[name], self.port.outputs.get(name))
                elif other != child and name in self.port.outputs:
                    later[name] = self.port.outputs[name]
        ours = {module_of(other) for other in children} - {module_of(child)}
        known = before.keys() | later.keys() | self.reference.outputs.keys()
        later |= {n: a for n, a in self.port.outputs.items() if module_of(n) in ours and n not in known}
        afterwards = {n: a for other in children for n, a in self.port.given.items() if call_of(n) == other}
        afterwards |= {n: a for n, a in self.port.outputs.items() if call_of(n) == call}
        own, others = self._weights(path)
        facts, port_facts = self.facts[0].get(path), self.facts[1].get(self.paths.get(path, path))
        settings = {
            name: (facts.settings.get(name) if facts else None, port_facts.settings.get(name) if port_facts else None)
            for name in {**(facts.settings if facts else {}), **(port_facts.settings if port_facts else {})}
        }
        return Case(
            module=path,
            child=module_of(child),
            types=(facts.type if facts else "", port_facts.type if port_facts else ""),
            child_type=self._type(module_of(child)),
            method=method_of(call),
            expected=expected,
            got=got,
            given=tuple(self.reference.given[name] for name in _arrays_of(self.reference.given, call)) if call else (),
            given_ids=tuple(self.reference.given_ids[name] for name in _arrays_of(self.reference.given_ids, call))
            if call
            else (),
            inside=before,
            later=later,
            afterwards=afterwards,
            child_returned=self.port.outputs.get(child) if child else None,
            inside_types={module_of(name): self._type(module_of(name)) for name in (*before, *later)},
            weights=own,
            other_weights=others,
            settings=settings,
            elsewhere=lambda: (
                _all_values(self.reference, path, module_of(child) or path),
                _all_values(self.port, path, module_of(child) or path),
            ),
            inputs=self.inputs,
            masks={site: mask for site, mask in self.masks.items() if _is_at(site, path)},
            rerun=rerun,
        )

    def _type(self, path: str) -> str:
        facts = self.facts[0].get(path) or self.facts[1].get(self.paths.get(path, path))
        return facts.type if facts else ""

    def _weights(self, path: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        prefix = self.paths.get(path, path)
        prefix = prefix + "." if prefix else ""
        own = {n.removeprefix(prefix): a for n, a in self.port_weights.items() if n.startswith(prefix)}
        others = {n: a for n, a in self.port_weights.items() if not n.startswith(prefix)}
        return _wide(own), _wide(others)


def same_given(reference: Trace, port: Trace, call: str) -> bool:
    """Whether a call was given the same floating-point arrays on both sides."""
    return all(
        name in port.given and relative_error(port.given[name], reference.given[name]) <= FLOAT64_RELATIVE
        for name in _arrays_of(reference.given, call)
    )


def _arrays_of(arrays: Arrays, call: str) -> list[str]:
    return [name for name in arrays if call_of(name) == call]


def _number(call: str) -> int:
    _, _, number = call.partition("#")
    return int(number) if number else 1


def _all_values(trace: Trace, path: str, target: str) -> dict[str, np.ndarray]:
    """Everything that was there before the value was made, but what the module's own methods were given and returned.

    `target`: the submodule that is given it, whose insides come later, or the module that returns it. A value explained
    by what is made of it would be explained by itself.
    """
    ended: list[str] = []
    for name in trace.outputs:
        call = call_of(name)
        if module_of(call) == target or module_of(call).startswith(target + "."):
            if target != path:
                break
            continue
        if module_of(call) != path and call not in ended:
            ended.append(call)
    made = {n: a for n, a in trace.outputs.items() if call_of(n) in ended}
    given = {f"what {n} is given": a for n, a in trace.given.items() if call_of(n) in ended}
    return {**made, **given}


def _wide(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.asarray(array, np.float64) for name, array in arrays.items()}
