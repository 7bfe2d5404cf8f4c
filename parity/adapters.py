"""Linen modules, and functions with a tree of parameters, as nnx.Modules: so that they can be a pair's port.

    Pair(reference=TorchModel, port=lambda: from_linen(LinenModel(), rngs=jax.random.key(0), args=(example,)), ...)

Parameters bear the names they have there, as dotted paths (`layers_0.Dense_0.kernel`), so that rules apply. What the
modules inside are called with is recorded as for any other port; those inside `nn.scan`, `nn.remat` or `nn.vmap` are
named as not captured.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from parity.capture_flax_calls import PATH, not_recorded

_pending: list[Callable[..., Any]] = []
"""What the part that is about to be called stands for; an innermost call is the last."""


def from_linen(
    module: linen.Module,
    variables: Mapping[str, Any] | None = None,
    *,
    rngs: Any = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> "Adapted":
    """The Linen module with these variables, or with those that `module.init(rngs, *args, **kwargs)` gives.

    `params` become nnx.Param, `batch_stats` nnx.BatchStat, other collections plain variables; what a call changes in
    them is kept. The result is called as the module is; `rngs` and `method` go to `module.apply`. With `args` the
    modules without parameters (dropout, activations) are known too, and recorded.

    Raises ValueError without variables and without `rngs`, or if two collections have a variable of the same name.
    """
    if not isinstance(module, linen.Module):
        raise ValueError(f"expected a flax.linen.Module, got {type(module).__name__}")
    if variables is None:
        if rngs is None:
            raise ValueError("expected variables, or rngs and args to draw them with, got neither")
        variables = module.init(rngs, *args, **(kwargs or {}))
    classes: dict[tuple[str, ...], str] = {}

    def look(next_function: Any, given: Any, named: Any, context: Any) -> Any:
        classes.setdefault(context.module.path, type(context.module).__name__)
        return next_function(*given, **named)

    if args or kwargs:
        with linen.intercept_methods(look):
            jax.eval_shape(lambda: module.apply(variables, *args, rngs=rngs, mutable=True, **(kwargs or {})))
    return Adapted(functools.partial(_apply_linen, module), dict(variables), classes=classes)


def from_function(apply: Callable[..., Any], params: Any) -> "Adapted":
    """`apply(params, *args)` with its parameters, a tree of dicts, lists and tuples. There are no modules inside to
    record: what the function returns, and every gradient, is compared."""
    if not jax.tree.leaves(params):
        raise ValueError("expected a tree of parameters, got one without arrays")
    return Adapted(functools.partial(_apply_function, apply), {"params": params})


class Part(nnx.Module):
    """A module inside: its parameters, and a place at which its calls are recorded."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What it stands for."""
        return _pending.pop()(*args, **kwargs)


class Adapted(Part):
    """Something else than an nnx.Module, as one."""

    def __init__(
        self,
        apply: Callable[..., Any],
        variables: Mapping[str, Any],
        *,
        classes: Mapping[tuple[str, ...], str] | None = None,
    ):
        self._apply = _Held(apply)
        self._structures = _Held({name: jax.tree.structure(tree) for name, tree in variables.items()})
        self._paths = _Held({name: [path for path, _ in _leaves(tree)] for name, tree in variables.items()})
        for path, name in sorted((classes or {}).items()):
            self._part(path, name)
        for collection, tree in variables.items():
            for path, array in _leaves(tree):
                owner = self._part(path[:-1])
                if path[-1] in vars(owner):
                    raise ValueError(f"expected one variable {'.'.join(path)!r}, got one in {collection} besides")
                setattr(owner, path[-1], _kind(collection, array)(array))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As it is called there."""
        variables = {
            name: jax.tree.unflatten(structure, [self._at(path).get_value() for path in self._paths.value[name]])
            for name, structure in self._structures.value.items()
        }
        output, changed = self._apply.value(self, variables, *args, **kwargs)
        for tree in changed.values():
            for path, array in _leaves(tree):
                self._at(path).set_value(array)
        return output

    def part(self, path: Sequence[str]) -> Part | None:
        """The module inside at this path, if it has parameters or was seen."""
        node: Any = self
        for name in path:
            node = vars(node).get(name)
            if not isinstance(node, Part):
                return None
        return node

    def _at(self, path: Sequence[str]) -> Any:
        return functools.reduce(getattr, path, self)

    def _part(self, path: Sequence[str], name: str = "") -> Part:
        node: Part = self
        for i, step in enumerate(path, start=1):
            if step not in vars(node):
                setattr(node, step, _part_called(name if i == len(path) else "")())
            node = getattr(node, step)
        return node


class _Held:
    """Something that need not be hashable, as a static attribute."""

    def __init__(self, value: Any):
        self.value = value


@functools.cache
def _part_called(name: str) -> type[Part]:
    """A class of that name, for whoever reads types off the model."""
    return type(name, (Part,), {"__doc__": f"Stands for a {name}."}) if name else Part


def _kind(collection: str, array: Any) -> type[nnx.Variable]:
    if not jnp.issubdtype(jnp.asarray(array).dtype, jnp.floating):
        return nnx.Variable
    return {"params": nnx.Param, "batch_stats": nnx.BatchStat}.get(collection, nnx.Variable)


def _leaves(tree: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        yield tuple(jax.tree_util.keystr((key,), simple=True) for key in path) or ("value",), array


def _apply_function(
    apply: Callable[..., Any], adapted: Adapted, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> tuple[Any, Mapping[str, Any]]:
    for path, part in nnx.iter_modules(adapted):
        if path:
            name = getattr(part, PATH, ".".join(map(str, path)))
            not_recorded(name, "it holds parameters of a function, inside which there are no modules")
    return apply(variables["params"], *args, **kwargs), {}


def _apply_linen(
    module: linen.Module,
    adapted: Adapted,
    variables: Mapping[str, Any],
    *args: Any,
    rngs: Any = None,
    method: Any = None,
    **kwargs: Any,
) -> tuple[Any, Mapping[str, Any]]:
    def record(next_function: Any, given: Any, named: Any, context: Any) -> Any:
        path = context.module.path
        if not path or context.method_name != "__call__":
            return next_function(*given, **named)
        part = adapted.part(path)
        if part is None:
            own = getattr(adapted, PATH, "")
            name = ".".join((own, *path) if own else path)
            not_recorded(name, "a Linen module without parameters: give from_linen example arguments")
            return next_function(*given, **named)
        _pending.append(next_function)
        return part(*given, **named)

    mutable = [name for name in variables if name != "params"]
    with linen.intercept_methods(record):
        found = module.apply(variables, *args, rngs=rngs, method=method, mutable=mutable or False, **kwargs)
    output, changed = found if mutable else (found, {})
    return output, {name: tree for name, tree in changed.items() if name in variables}
