"""Loads a user's file: a Python file with a function `pair()` that returns a parity.Pair."""

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from parity.pair import Pair

FUNCTION = "pair"


class PortFileError(ValueError):
    """The file cannot be used. The message names it, and says what was expected."""


def load_pair(path: Path) -> Pair:
    """The Pair that `pair()` of this file returns.

    As when a script is run, modules beside the file can be imported. The file's own module gets a name that no import
    statement can collide with.

    Raises PortFileError where the file is missing, is no Python, cannot import something, has no `pair`, or returns
    something else; and whatever `pair()` itself raises.
    """
    module = _load(path)
    function = getattr(module, FUNCTION, None)
    if not callable(function):
        found = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise PortFileError(
            f"{path}: expected a function {FUNCTION}() that returns a parity.Pair, "
            + ("got a file without it" if function is None else f"got {FUNCTION} = {function!r}")
            + (f" (it has {', '.join(found)})" if found else "")
        )
    try:
        made = function()
    except ImportError as error:
        raise _cannot_import(path, error) from error
    if not isinstance(made, Pair):
        raise PortFileError(f"{path}: expected {FUNCTION}() to return a parity.Pair, got {type(made).__name__}")
    return made


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise PortFileError(f"expected a Python file with a function {FUNCTION}(), got {path}, which is no file")
    path = path.resolve()
    name = f"_port_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PortFileError(f"{path}: expected a Python file (.py), got suffix {path.suffix!r}")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # dataclasses and nnx look a class's module up
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        del sys.modules[name]
        raise PortFileError(
            f"{error.filename or path}, line {error.lineno}: expected Python, got {error.msg}"
        ) from error
    except ImportError as error:
        del sys.modules[name]
        raise PortFileError(f"{path}: expected its imports to succeed, got {error}") from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _cannot_import(path: Path, error: ImportError) -> PortFileError:
    hint = ""
    if (error.name or "").partition(".")[0] == "torch":
        hint = "; to check it against a golden file without torch, import torch inside the functions that need it"
    return PortFileError(f"{path}: expected its imports to succeed, got {error}{hint}")
