"""Builds a port: compiled as one program where it can be, because drawing weights operation by operation is slow."""

from typing import Any

import jax
from flax import nnx

from parity.compilation import jit
from parity.pair import Precision, Side


class _ShapesOnly(Exception):  # noqa: N818 - no error: what the builder returned
    """The builder returns a module of shapes, out of which no program can be made, nor need be."""

    def __init__(self, graphdef: Any, state: Any):
        super().__init__()
        self.parts = graphdef, state


def built(side: Side, precision: Precision) -> nnx.Module:
    """What the builder returns. A small convolutional network is built in 2 s instead of 13, a large part compilation.

    Raises TypeError if it returns anything but an nnx.Module, and whatever it raises itself.
    """
    try:
        return _compiled(side, precision)
    except _ShapesOnly as found:
        # Put together here: a module can only be changed outside of what it was made in.
        return nnx.merge(*found.parts)
    except Exception:
        # A builder that reads files or looks at values cannot be traced. If it is broken, it raises once more here.
        module = side.module(precision)
    return _expect_module(module)


def _compiled(side: Side, precision: Precision) -> nnx.Module:
    graphs: list[Any] = []

    def build() -> Any:
        graphdef, state = nnx.split(_expect_module(side.module(precision)))
        leaves = jax.tree.leaves(state)
        if leaves and all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            raise _ShapesOnly(graphdef, state)
        graphs.append(graphdef)
        return state

    state = jit(build)()
    leaves = jax.tree.leaves(state)
    if not all(isinstance(leaf, jax.Array) for leaf in leaves):
        raise TypeError("expected arrays")
    return nnx.merge(graphs[0], state)


def _expect_module(module: Any) -> nnx.Module:
    if not isinstance(module, nnx.Module):
        raise TypeError(f"expected the port's builder to return an nnx.Module, got {type(module)}")
    return module
