"""Runs with changed source: a file of a package is replaced when it is imported. And which lines a run executes."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


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


class Lines:
    """Which lines of some files a run executes. Slows down only functions of these files."""

    def __init__(self, files: Mapping[str, Path]):
        self._names = {str(path): name for name, path in files.items()}
        self.executed: set[tuple[str, int]] = set()

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

        def line(frame: types.FrameType, event: str, argument: Any) -> Any:
            self.executed.add((name, frame.f_lineno))
            return line

        self.executed.add((name, frame.f_lineno))
        return line


def variants_executing(
    file: str, lines: Iterable[int], executed: Mapping[str, frozenset[tuple[str, int]]]
) -> Sequence[str]:
    """Those of the runs, by name, that execute one of these lines."""
    wanted = {(file, line) for line in lines}
    return [name for name, found in executed.items() if wanted & found]
