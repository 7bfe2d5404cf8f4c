"""Runs with changed source: a file of a package is replaced when it is imported. And which of it a run executes."""

import dis
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

LOAD_CONST = dis.opmap["LOAD_CONST"]


class _Changed(importlib.abc.Loader):
    def __init__(self, source: str, path: str):
        self.source, self.path = source, path

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """The usual module."""

    def exec_module(self, module: types.ModuleType) -> None:
        """The changed source in place of the file's."""
        exec(compile(self.source, self.path, "exec"), module.__dict__)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, source: str, path: str):
        self.name, self.source, self.path = name, source, path

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Only for the one module."""
        if name != self.name:
            return None
        return importlib.util.spec_from_loader(name, _Changed(self.source, self.path), origin=self.path)


def files_of(package: str) -> dict[str, Path]:
    """The package's files by name, but for `__init__.py`, which only passes names on. Does not import it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"expected an installed package, got {package!r}")
    folder = Path(spec.submodule_search_locations[0])
    return {path.name: path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"}


def install(package: str, file: str, source: str) -> None:
    """Lets the next import of this file of the package find this source. For a process that is used for nothing else.

    Raises RuntimeError if the package is imported already: the old code would go on running.
    """
    if package in sys.modules:
        raise RuntimeError(f"expected {package} not to be imported yet: its modules would not be changed")
    name = f"{package}.{file.removesuffix('.py')}"
    sys.meta_path.insert(0, _Finder(name, source, str(files_of(package)[file])))


class Place(NamedTuple):
    """Where an instruction comes from: a stretch of source, columns in bytes."""

    line: int
    column: int
    last: int
    last_column: int
    constant: bool
    """Whether it only loads a constant, which may be folded out of several: `-1`, `(0, 1)`."""


class Executed:
    """Which stretches of source of some files a run executes. Slows down only functions of these files.

    By instruction, not by line: of `a if x else b` only one branch is executed.
    """

    def __init__(self, files: Mapping[str, Path]):
        self._names = {str(path): name for name, path in files.items()}
        self._places: dict[types.CodeType, list[Place | None]] = {}
        self.places: dict[str, set[Place]] = {name: set() for name in files}

    def during(self, run: Callable[[], Any]) -> Any:
        """What `run` returns."""
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            return run()
        finally:
            sys.settrace(before)

    def _call(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        name = self._names.get(frame.f_code.co_filename)
        if name is None:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        places, executed = self._of(frame.f_code), self.places[name]

        def instruction(frame: types.FrameType, event: str, argument: Any) -> Any:
            if event == "opcode":
                place = places[frame.f_lasti // 2]
                if place is not None:
                    executed.add(place)
            return instruction

        return instruction

    def _of(self, code: types.CodeType) -> list[Place | None]:
        if code not in self._places:
            constants = code.co_code[::2]
            self._places[code] = [
                None
                if None in position
                else Place(position[0], position[2], position[1], position[3], opcode == LOAD_CONST)  # type: ignore[arg-type]
                for position, opcode in zip(code.co_positions(), constants, strict=True)
            ]
        return self._places[code]


def reaches(places: Mapping[int, Sequence[Place]], stretch: Place) -> bool:
    """Whether one of these places, by line, lies within a stretch of source, or is a constant that it is part of."""
    start, end = (stretch.line, stretch.column), (stretch.last, stretch.last_column)
    for line in range(stretch.line, stretch.last + 1):
        for place in places.get(line, ()):
            first, last = (place.line, place.column), (place.last, place.last_column)
            if (start <= first and last <= end) or (place.constant and first <= start and end <= last):
                return True
    return False


def by_line(places: Iterable[Place]) -> dict[int, list[Place]]:
    """{first line: places}."""
    found: dict[int, list[Place]] = {}
    for place in places:
        found.setdefault(place.line, []).append(place)
    return found
