"""What it takes to plant a known porting fault in a pair: a kind of fault, the places where it fits, the faulty pair.

Nothing is planted in a file: the port is built as it is, and then an attribute of one module, one of its methods, or
one of the functions that the pair brings along is replaced. Modules are told by the names of their classes and
attributes, so nothing here imports a model.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from parity.pair import Pair, Side
from parity.runs import Runs
from parity.weights.mapping import Rule, WeightMapping

MODEL = ""
"""The path of the model itself."""

Method = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of porting fault."""

    name: str
    """Short, and unique: `norm eps`."""
    description: str
    """What the port does, in a few words: `eps of 1e-6 where the reference has 1e-5`."""
    places: Callable[[Pair], Sequence[str]]
    """Where it fits in this pair: paths of modules, names of parameters, or the name of a part of the pair."""
    plant: Callable[[Pair, str], Pair]
    """The pair with the fault at one of these places."""
    cases: tuple[str, ...] = ()
    """Public reports of it, by their number in the list of cases: `P1`."""
    base: str = "twins"
    """Name of the pair it is planted in."""
    shows: Callable[[str], tuple[str, ...]] = lambda place: (place,)
    """Names that locate the fault at this place. Besides the place itself only where the fault cannot show there."""
    rungs: tuple[str, ...] = ()
    """For a fault outside every module: rungs about nothing but the part of the pair it is in. They locate it."""
    beyond: str = ""
    """Why the harness cannot be expected to see it. Such a kind is planted and shown, and not counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planting:
    """A kind at a place."""

    kind: Kind
    place: str

    def __str__(self) -> str:
        return f"{self.kind.name} at {self.place or 'the model'}"

    def pair(self, base: Pair) -> Pair:
        """`base` with the fault."""
        faulty = self.kind.plant(base, self.place)
        return dataclasses.replace(faulty, name=f"{base.name}: {self}")

    @property
    def shows(self) -> tuple[str, ...]:
        """Names that locate it."""
        return self.kind.shows(self.place)


def plantings(kind: Kind, base: Pair) -> tuple[Planting, ...]:
    """The kind at the first, a middle and the last place where it fits.

    Raises ValueError if it fits nowhere: a kind that is never planted would be counted as never missed.
    """
    places = list(kind.places(base))
    if not places:
        raise ValueError(f"{kind.name}: expected a place for it in {base.name}, found none")
    chosen = dict.fromkeys((places[0], places[len(places) // 2], places[-1]))
    return tuple(Planting(kind=kind, place=place) for place in chosen)


def modules_of(pair: Pair) -> dict[str, nnx.Module]:
    """The port's modules by path, in the order of the graph."""
    return {".".join(map(str, path)): module for path, module in nnx.iter_modules(pair.port.module("float32"))}


def is_a(module: Any, *names: str) -> bool:
    """Whether the module's class, or one that it inherits from, has one of these names."""
    return any(base.__name__ in names for base in type(module).__mro__)


def at(model: nnx.Module, path: str) -> Any:
    """The module, or whatever else is found at this path."""
    found: Any = model
    for name in path.split(".") if path else ():
        found = found[int(name)] if name.isdigit() else getattr(found, name)
    return found


def with_port(pair: Pair, change: Callable[[Any], None]) -> Pair:
    """The pair whose port, once built, is changed in place."""
    side: Side = pair.port

    # Bears the signature of the original, off which the harness reads whether a builder takes a precision or a seed.
    @functools.wraps(side.build)
    def build(*args: Any, **kwargs: Any) -> Any:
        module = side.build(*args, **kwargs)
        change(module)
        return module

    return dataclasses.replace(pair, port=dataclasses.replace(side, build=build))


def with_side(pair: Pair, **fields: Any) -> Pair:
    """The pair whose port brings other functions along."""
    return dataclasses.replace(pair, port=dataclasses.replace(pair.port, **fields))


def override(module: Any, method: str, make: Callable[[Method], Method]) -> None:
    """Gives one module another method; other modules of its class keep theirs. `make` is given the original."""
    cls = type(module)
    # Taken from the class that defines it, now: while a run is recorded, classes bear recording methods.
    original = getattr(cls, method)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    changed = functools.wraps(original)(make(original))
    module.__class__ = type(cls.__name__, (cls,), {**names, method: changed})


def explicit_rules(pair: Pair) -> tuple[list[Rule], WeightMapping]:
    """The pair's mapping with one rule for every tensor, names filled in; and the mapping itself."""
    runs = Runs(pair)
    mapping = runs.mapping
    names = [name for name in runs.weights if runs.derived.travels(name)]
    return [Rule(step.sources, step.targets, step.ops) for step in mapping.plan(names)], mapping


def with_rules(pair: Pair, change: Callable[[list[Rule]], list[Rule]]) -> Pair:
    """The pair with another mapping of its weights."""
    rules, mapping = explicit_rules(pair)
    aliases = {"source_aliases": mapping.source_aliases, "target_aliases": mapping.target_aliases}
    return dataclasses.replace(pair, mapping=WeightMapping(change(rules), **aliases))


def in_modules(
    name: str,
    description: str,
    wanted: Callable[[str, Any], bool],
    change: Callable[[Any], None],
    **fields: Any,
) -> Kind:
    """A kind that changes one module, wherever there is one that is wanted."""

    def places(pair: Pair) -> list[str]:
        return [path for path, module in modules_of(pair).items() if wanted(path, module)]

    def plant(pair: Pair, place: str) -> Pair:
        return with_port(pair, lambda model: change(at(model, place)))

    return Kind(name=name, description=description, places=places, plant=plant, **fields)


def in_method(
    name: str,
    description: str,
    wanted: Callable[[str, Any], bool],
    make: Callable[[Method], Method],
    *,
    method: str = "__call__",
    **fields: Any,
) -> Kind:
    """A kind that changes one method of one module."""
    return in_modules(name, description, wanted, lambda module: override(module, method, make), **fields)


RUNGS = {"loss": "loss", "clip": "clipping", "optimizer": "optimizer", "schedule": "schedule", "decode": "decoding"}
"""The rung that is about a part of the pair."""


def in_side(name: str, description: str, field: str, change: Callable[[Any], Any], **fields: Any) -> Kind:
    """A kind that changes one function the port's side brings along; its place is that function's name."""

    def places(pair: Pair) -> list[str]:
        return [field] if getattr(pair.port, field) is not None else []

    def plant(pair: Pair, place: str) -> Pair:
        return with_side(pair, **{place: change(getattr(pair.port, place))})

    fields = {"rungs": (RUNGS[field],) if field in RUNGS else ()} | fields
    return Kind(name=name, description=description, places=places, plant=plant, **fields)


def class_is(*names: str) -> Callable[[str, Any], bool]:
    """For `wanted`: modules of these classes."""
    return lambda path, module: is_a(module, *names)


def wide(x: Any) -> Any:
    """`x` in float32, or as it is where that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def few_bits(x: Any, *, mantissa: int) -> Any:
    """`x` with so many explicit bits of its mantissa: 10 is TF32. The gradient passes as if nothing were rounded."""
    exponent = jnp.exp2(jnp.floor(jnp.log2(jnp.where(x == 0, 1.0, jnp.abs(x)))) - mantissa)
    return x + jax.lax.stop_gradient(jnp.round(x / exponent) * exponent - x)
