"""How the harness compiles: quickly where only semantics are asked, as users do where rounding is."""

from collections.abc import Callable
from typing import Any

import jax

from parity.pair import Precision

_QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


def jit(function: Callable[..., Any], *, precision: Precision) -> Callable[..., Any]:
    """`jax.jit`; on a CPU, without the compiler's optimisations except in float32.

    A float64 program means the same however it is compiled, and takes a third of the time (a tiny model's gradient
    with every module watched: 2.3 s instead of 5.1). How far float32 is from the answer is asked of the program that
    users run, so that one is compiled as they would.
    """
    return jax.jit(function, compiler_options=_options(precision))


def pmap(function: Callable[..., Any], *, precision: Precision, **options: Any) -> Callable[..., Any]:
    """`jax.pmap`, compiled in the same way, for one call."""
    mapped = jax.pmap(function, **options)

    def call(*arguments: Any) -> Any:
        return mapped.lower(*arguments).compile(compiler_options=_options(precision))(*arguments)

    return call


def _options(precision: Precision) -> dict[str, Any] | None:
    return _QUICKLY if precision != "float32" and jax.default_backend() == "cpu" else None
