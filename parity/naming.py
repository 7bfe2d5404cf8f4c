"""The port's trace under the reference's names."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from parity.trace import Trace, call_of, module_of
from parity.weights.patterns import Pattern


class Names:
    """Which module of the reference a module of the port stands for.

    `modules`: {port's path: reference's}, where they differ; `stacked`: {port's path: the reference's, of the layers it
    holds along a first axis}; `patterns`: (reference's, port's) of modules, for names that come up in a run alone.
    """

    def __init__(
        self,
        modules: Mapping[str, str],
        stacked: Mapping[str, Sequence[str]],
        patterns: Iterable[tuple[str, str]],
    ):
        self._modules = modules
        self._stacked = stacked
        self._patterns = [(Pattern(theirs), Pattern(ours)) for theirs, ours in patterns if "," not in theirs + ours]

    def of(self, path: str) -> str:
        """The reference's path for one of the port's."""
        if path in self._modules:
            return self._modules[path]
        for outer, layers in self._stacked.items():
            number, _, rest = path[len(outer) + 1 :].partition(".")
            if path.startswith(outer + ".") and number.isdecimal() and int(number) < len(layers):
                renamed = self._by_pattern(path)
                return renamed if renamed != path else layers[int(number)] + ("." + rest if rest else "")
        return path

    def every(self, path: str) -> list[str]:
        """The same for a path that may lie inside stacked layers: one for each of them."""
        for outer, layers in self._stacked.items():
            if path == outer or path.startswith(outer + "."):
                return [self.of(f"{outer}.{i}{path[len(outer) :]}") for i in range(len(layers))]
        return [self.of(path)]

    def port_names(self, reference: Iterable[str], port_paths: Iterable[str]) -> dict[str, str]:
        """{reference's path: port's} of these paths, as far as there is one."""
        there = {self.of(path): path for path in port_paths}
        return {path: there[path] for path in reference if path in there}

    def _by_pattern(self, path: str) -> str:
        parts = path.split(".")
        for end in range(len(parts), 0, -1):
            head, tail = ".".join(parts[:end]), "".join("." + part for part in parts[end:])
            for theirs, ours in self._patterns:
                bindings = ours.match(head)
                if bindings is not None:
                    return theirs.fill(bindings) + tail
        return path

    def apply(self, trace: Trace) -> Trace:
        """The trace with the calls under the reference's names. Gradients and buffers keep the port's."""
        return dataclasses.replace(
            trace,
            given=self._renamed(trace.given),
            given_ids=self._renamed(trace.given_ids),
            outputs=self._renamed(trace.outputs),
            not_captured={name: why for path, why in trace.not_captured.items() for name in self.every(path)},
            narrow=self._renamed(trace.narrow),
        )

    def _renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {self.of(module_of(name)) + name[len(module_of(name)) :]: value for name, value in values.items()}


def by_position(trace: Trace, expected: Mapping[str, Sequence[str]]) -> tuple[Trace, list[str]]:
    """Arrays of a call that bear other keys than the reference's, but are as many, under the reference's: one side
    returned a dictionary, the other a tuple, say. Also gives the names of those calls.

    `expected`: {call: the reference's names of its arrays, in order}.
    """
    names: dict[str, str] = {}
    calls = []
    for call, ours in names_by_call([*trace.outputs, *trace.results]).items():
        theirs = expected.get(call, ())
        if len(ours) == len(theirs) and set(ours) != set(theirs):
            names |= zip(ours, theirs, strict=True)
            calls.append(call)
    if not calls:
        return trace, []

    def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in values.items()}

    fields: dict[str, Any] = {field: renamed(getattr(trace, field)) for field in ("outputs", "results", "narrow")}
    return dataclasses.replace(trace, **fields), calls


def names_by_call(names: Iterable[str]) -> dict[str, list[str]]:
    """{call: names of its arrays, in order}."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(call_of(name), []).append(name)
    return found


def selected(trace: Trace, valid: np.ndarray) -> Trace:
    """Arrays whose leading axes are those of `valid`, at the positions that count alone: (positions, ...).

    By selection, never by zeroing: what stands at the others may be anything, NaN too.
    """

    def at(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {n: a[valid] if a.shape[: valid.ndim] == valid.shape else a for n, a in arrays.items()}

    return dataclasses.replace(
        trace,
        given=at(trace.given),
        given_ids=at(trace.given_ids),
        outputs=at(trace.outputs),
        results=at(trace.results),
    )
