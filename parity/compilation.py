"""How the harness compiles: quickly, but once as users do."""

from collections.abc import Callable
from typing import Any

import jax

from parity import xla_flags

_QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


def jit(function: Callable[..., Any], *, quickly: bool = True) -> Callable[..., Any]:
    """`jax.jit`; on a CPU, without the compiler's optimisations.

    A float64 program means the same however it is compiled, and takes a third of the time (a tiny model's gradient
    with every module watched: 2.3 s instead of 5.1). How far float32 is from the answer is asked once of the program
    that users run, nobody watching: not `quickly`, but as they compile it.
    """
    return jax.jit(function, compiler_options=_options(quickly=quickly))


def pmap(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.pmap`, compiled in the same way, for one call."""
    mapped = jax.pmap(function, **options)

    def call(*arguments: Any) -> Any:
        return mapped.lower(*arguments).compile(compiler_options=_options(quickly=True))(*arguments)

    return call


def _options(*, quickly: bool) -> dict[str, Any] | None:
    if jax.default_backend() != "cpu":
        return None
    return _QUICKLY if quickly else dict(xla_flags.changed)
