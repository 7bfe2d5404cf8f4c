"""Compiled functions: for shapes known beforehand, ahead of their first call, and counted (T6)."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


class Compiled(Generic[P, R]):
    """A function with one compiled program for every shape of its arguments.

    `jitted` is what `jax.jit` or `jax.pmap` returned.
    """

    def __init__(self, jitted: Any):
        self._jitted = jitted
        self._programs: dict[Any, Any] = {}

    @property
    def compilations(self) -> int:
        """Programs compiled so far, or loaded from the cache of programs."""
        return len(self._programs)

    def prepare(self, *args: Any) -> Any:
        """The program for arguments of these shapes (arrays or `jax.ShapeDtypeStruct`), compiled now if need be."""
        key = _shapes(args)
        if key not in self._programs:
            self._programs[key] = self._jitted.lower(*args).compile()
        return self._programs[key]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the program for the shapes of `args`."""
        return self.prepare(*args)(*args, **kwargs)


def _shapes(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def prepare_all(
    compiled: Compiled[..., Any], arguments: Iterable[tuple[Any, ...]], *, done: Callable[[], None] = lambda: None
) -> None:
    """Compiles for each of the arguments, and tells after each."""
    for args in arguments:
        compiled.prepare(*args)
        done()


def keep_programs(folder: Path) -> None:
    """Has jax keep every program it compiles in `folder`, and take from there what has been compiled before.

    However short the compilation: with jax's own threshold of a second the cache of a small model stays empty (T8).
    A setting of the whole process, so only a command line calls this.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
