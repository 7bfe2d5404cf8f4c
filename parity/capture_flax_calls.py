"""Records every call of the submodules of an nnx.Module while it is traced, through `__call__` and other methods.

A value of a call in the program itself is kept as it is. Inside a transformation (`nnx.remat`, `nnx.scan`, `nnx.vmap`)
values can leave only through the module's state: there they are sown. Where that is impossible, the module is named.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from parity.trace import Call, Named, in_signature_order, leaves, numbered, positions, substitute

PATH = "_parity_path"
"""Attribute that tells a module its own path: inside a transformation a module is a copy, without a parent."""
SCOPE = "parity:"
"""What stands before a module's path in the names that jax gives to operations."""
_KINDS = ("given", "given_ids", "returned")


@contextlib.contextmanager
def tagged(model: nnx.Module) -> Iterator[None]:
    """Tells every module its path. A string, which nnx carries along as part of the module's structure."""
    modules = list(nnx.iter_modules(model))
    for path, module in modules:
        setattr(module, PATH, ".".join(map(str, path)))
    try:
        yield
    finally:
        for _, module in modules:
            delattr(module, PATH)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Static:
    """Something hashable that goes through jax.jit as a part of the structure."""

    value: Any

    def tree_flatten(self) -> tuple[tuple[()], Any]:
        """No arrays."""
        return (), self.value

    @classmethod
    def tree_unflatten(cls, value: Any, children: Any) -> "Static":
        """The same again."""
        return cls(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """One call, as far as it is known while the program is traced."""

    name: str
    sown: int
    """Its place among what its module has sown; -1 where its arrays were kept as they are."""
    suffixes: tuple[tuple[str, ...], ...]
    """Of given, given_ids and returned."""
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    """As the module saw them: inside `vmap` and `scan` without the axis over which they go."""


class CallRecorder:
    """What every submodule is given and returns.

    `handed`: {name of a call: floating-point arrays by position}, given to the call in place of those of equal shape
    that the model would have given. `sow`: whether to record inside transformations.
    """

    def __init__(self, *, handed: Mapping[str, list[Any]] | None = None, sow: bool = True):
        self._handed = handed or {}
        self._sow = sow
        self._outer = get_opaque_trace_state(convention="nnx")
        self._active: list[str] = []
        self._events: dict[Any, tuple[Event, tuple[Named, ...] | None]] = {}
        self._lost: dict[str, str] = {}
        self._originals: set[int] = set()

    @contextlib.contextmanager
    def recording(self, model: nnx.Module) -> Iterator[None]:
        """Wraps the methods of the classes of all modules, and undoes it."""
        wanted: dict[type, set[str]] = {}
        for path, module in nnx.iter_modules(model):
            self._originals.add(id(module))
            wanted.setdefault(type(module), set()).update(_public_methods(type(module)))
            if path:
                wanted[type(module)].add("__call__")
        undo: list[Callable[[], None]] = []
        _recorders.append(self)
        try:
            for cls, methods in wanted.items():
                for method in methods:
                    original = inspect.getattr_static(cls, method, None)
                    if callable(original):
                        undo.append(replace_method(cls, method, self._wrapped(original, method)))
            yield
        finally:
            _recorders.remove(self)
            for action in reversed(undo):
                action()

    def lose(self, name: str, reason: str) -> None:
        """This module's values cannot be had, and that is to be said."""
        self._lost.setdefault(name, reason)

    def _wrapped(self, original: Any, method: str) -> Any:
        suffix = "" if method == "__call__" else f":{method}"

        def call(module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            path = getattr(module, PATH, None)
            name = f"{path}{suffix}"
            # A module without a path was made during the call; one that calls its own base class does not run twice.
            if path is None or name in ("", *self._active):
                return original(module, *args, **kwargs)
            self._active.append(name)
            try:
                with jax.named_scope(SCOPE + path):
                    arguments = in_signature_order(original, (module, *args), kwargs)[1:]
                    given, ids = positions(arguments, is_floating), positions(arguments, is_discrete)
                    handed = self._handed.get(numbered(name, self._number(module, name)))
                    if handed is not None:
                        args, kwargs = _with_handed(original, module, args, kwargs, handed)
                    returned = original(module, *args, **kwargs)
            finally:
                self._active.pop()
            if not suffix or leaves(returned, is_floating):
                self._add(module, name, (given, ids, leaves(returned, is_floating)))
            return returned

        return call

    def _inside(self) -> bool:
        """Whether a transformation is being traced."""
        return bool(self._outer != get_opaque_trace_state(convention="nnx"))

    def _number(self, module: nnx.Module, name: str) -> int:
        """Of the call that is about to be made, counted from 1. A transformation may trace it more than once."""
        keys = [key for key in self._events if key[0] == name]
        key = (name, "sown", sown(module, f"{name}:returned"))
        return 1 + (keys.index(key) if self._inside() and key in keys else len(keys))

    def _add(self, module: nnx.Module, name: str, values: tuple[Named, ...]) -> None:
        inside = self._inside()
        event = Event(
            name=name,
            sown=sown(module, f"{name}:returned") if inside else -1,
            suffixes=tuple(tuple(suffix for suffix, _ in named) for named in values),
            shapes=tuple(tuple(array.shape for _, array in named) for named in values),
        )
        if not inside:
            self._events[name, "kept", len(self._events)] = (event, values)
            return
        if not self._sow:
            self._lost.setdefault(name, "it is called inside a transformation, out of which its values do not come")
            return
        if id(module) in self._originals:
            # nnx's own transformations call copies: this one has come in on the side, and sowing would leak.
            self._lost[name] = "it is called inside a transformation of jax itself, which does not know of nnx"
            return
        self._events[name, "sown", event.sown] = (event, None)
        try:
            for kind, named in zip(_KINDS, values, strict=True):
                module.sow(nnx.Intermediate, f"{name}:{kind}", tuple(jnp.asarray(array) for _, array in named))
        except Exception as error:  # whatever it is, this module's values are not to be had
            self._lost[name] = f"it is called inside a transformation that nnx does not know ({type(error).__name__})"

    def recorded(self, state: Any) -> tuple[list[Any], Static]:
        """(arrays of each event, the events and what was lost), given the state that `nnx.capture` collected."""
        collected = {}
        for path, variable in nnx.to_flat_state(state):
            collected[str(path[-1])] = variable.get_value()
        arrays, events = [], []
        for event, values in self._events.values():
            if values is not None:
                arrays.append([[jnp.asarray(array) for _, array in named] for named in values])
                events.append(event)
                continue
            every = [collected.get(f"{event.name}:{kind}", ()) for kind in _KINDS]
            if event.name in self._lost or any(len(kind) <= event.sown for kind in every):
                self._lost.setdefault(event.name, "the transformation that it is called inside keeps its values")
                continue
            arrays.append([list(kind[event.sown]) for kind in every])
            events.append(event)
        return arrays, Static((tuple(events), tuple(self._lost.items())))


_recorders: list[CallRecorder] = []


def not_recorded(name: str, reason: str) -> None:
    """Tells whoever is recording that the module of this path was called unseen."""
    for recorder in _recorders:
        recorder.lose(name, reason)


def calls_of(
    arrays: list[Any], events: tuple[Event, ...], places: list[Any] | None, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[Call], dict[str, str]]:
    """Calls in order, and (module: reason) for those that cannot be told apart.

    `places`: like `arrays`, the place where float32 entered each. `shapes`: of the model's variables. Where those of a
    module have the axis over which `vmap` or `scan` went, it is a stack of layers: what was recorded inside it is split
    along that axis, and `layers.attention` becomes `layers.{i}.attention`.
    """
    calls: list[Call] = []
    lost: dict[str, str] = {}
    axes = [_axes(event, values) for event, values in zip(events, arrays, strict=True)]
    whole = {event.name.partition(":")[0] for event, found in zip(events, axes, strict=True) if not any(found)}
    for number, (event, values, found) in enumerate(zip(events, arrays, axes, strict=True)):
        every = [list(zip(suffixes, kind, strict=True)) for suffixes, kind in zip(event.suffixes, values, strict=True)]
        narrow = tuple(place.value for place in places[number][2]) if places is not None else ()
        lengths: set[int | None] = {length for length in found if length}
        stack = _stack_of(event.name.partition(":")[0], lengths, whole, shapes)
        if any(length is None for length in found) or len(lengths) > 1:
            lost[event.name] = "it is called inside several transformations at once"
        elif stack is None:
            calls.append(Call(name=event.name, given=every[0], given_ids=every[1], returned=every[2], narrow=narrow))
        else:
            calls += _layers(event, every, stack, lengths.pop(), narrow)
    return calls, lost


def _axes(event: Event, values: list[Any]) -> list[int | None]:
    """For each array of a call, the length of the axis that the module did not see: 0 if it saw all, None if it did not
    see several."""
    lengths: list[int | None] = []
    for kind, shapes in zip(values, event.shapes, strict=True):
        for array, shape in zip(kind, shapes, strict=True):
            more = array.ndim - len(shape)
            axis = _axis(array.shape, shape) if more == 1 else None
            lengths.append(0 if more == 0 else None if axis is None else array.shape[axis])
    return lengths


def _stack_of(
    path: str, lengths: set[int | None], whole: set[str], shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """The outermost module around `path` whose variables all begin with the axis, and that was not called whole."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        outer = ".".join(parts[:end])
        inner = [shape for name, shape in shapes.items() if name.startswith(outer + ".")]
        called_whole = any(name == outer or name.startswith(outer + ".") for name in whole)
        if inner and not called_whole and len(lengths) == 1 and {shape[:1] for shape in inner} == {tuple(lengths)}:
            return outer
    return None


def _layers(event: Event, every: list[Named], stack: str, count: int | None, narrow: Any) -> Iterator[Call]:
    """The calls of each layer under a name of its own."""
    for i in range(count or 0):
        split = [
            [
                (suffix, np.take(array, i, axis=_axis(array.shape, shape)))
                for (suffix, array), shape in zip(named, shapes, strict=True)
            ]
            for named, shapes in zip(every, event.shapes, strict=True)
        ]
        name = f"{stack}.{i}{event.name[len(stack) :]}"
        yield Call(name=name, given=split[0], given_ids=split[1], returned=split[2], narrow=narrow)


def _axis(stacked: tuple[int, ...], one: tuple[int, ...]) -> int | None:
    return next((axis for axis in range(len(stacked)) if stacked[:axis] + stacked[axis + 1 :] == one), None)


def _with_handed(original: Any, module: nnx.Module, args: Any, kwargs: Any, handed: list[Any]) -> tuple[Any, Any]:
    """Arguments in the order of the signature, floating-point ones replaced where the shapes are equal."""
    try:
        bound = inspect.signature(original).bind(module, *args, **kwargs)
        names = list(bound.arguments)
    except (TypeError, ValueError):
        return args, kwargs
    remaining = iter(handed)

    def next_one(array: Any) -> Any:
        other = next(remaining, None)
        return array if other is None or other.shape != array.shape else jnp.asarray(other, array.dtype)

    for name in names[1:]:
        bound.arguments[name] = substitute(bound.arguments[name], is_floating, next_one)
    return bound.args[1:], bound.kwargs


def _public_methods(cls: type) -> list[str]:
    """Of the classes that are not flax's own; and `attend` of its embedding."""
    found = []
    for base in cls.__mro__:
        own = base.__module__.partition(".")[0] in ("flax", "builtins", "typing")
        for name, function in vars(base).items():
            public = inspect.isfunction(function) and not name.startswith("_") and not hasattr(nnx.Module, name)
            if public and (not own or name == "attend"):
                found.append(name)
    return list(dict.fromkeys(found))


def replace_method(cls: type, method: str, replacement: Any) -> Callable[[], None]:
    """Sets a method of a class; gives the way back, which leaves no trace on a class that had inherited it."""
    own = vars(cls).get(method)
    setattr(cls, method, replacement)

    def undo() -> None:
        if own is None:
            delattr(cls, method)
        else:
            setattr(cls, method, own)

    return undo


def sown(module: nnx.Module, name: str) -> int:
    """How many values the module has sown under this name since `nnx.capture` began."""
    for variable in getattr(module, "__captures__", ()):
        if type(variable) is nnx.Intermediate:
            return len(variable.get_value().get(name, ()))
    return 0


def is_floating(value: Any) -> bool:
    """An array of floating-point numbers."""
    return isinstance(value, (jax.Array, np.ndarray)) and jnp.issubdtype(value.dtype, jnp.floating)


def is_discrete(value: Any) -> bool:
    """An array of ids or booleans."""
    return isinstance(value, (jax.Array, np.ndarray)) and (
        jnp.issubdtype(value.dtype, jnp.integer) or value.dtype == jnp.bool_
    )
