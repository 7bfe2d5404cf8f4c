"""What one run of one model leaves behind, as numpy arrays under names that are the same in both frameworks.

Names are dotted module paths; a module called through another method than `__call__` or `forward` gets `:method`; one
called again `#2`, `#3`, ...; an output of several arrays `[0]`, `[1]`, ..., or `[key]` from a dict, behind the name.
What the model itself returns is called `output`.
"""

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

OUTPUT = "output"
LOSS = "loss"

Named = list[tuple[str, Any]]
"""(suffix, array), in order."""


@dataclasses.dataclass(kw_only=True)
class Trace:
    """One run: forward, and backward where there is a loss."""

    given: dict[str, np.ndarray]
    """Floating-point inputs of every module call, counted `[0]`, `[1]`, ... where there are several."""
    given_ids: dict[str, np.ndarray]
    """Its other inputs: ids, boolean masks."""
    outputs: dict[str, np.ndarray]
    """Floating-point outputs of every module call, in the order in which the calls ended."""
    results: dict[str, np.ndarray]
    """What the model itself returned."""
    loss: np.ndarray
    gradients: dict[str, np.ndarray]
    """Of every trained parameter, by the side's own names and layouts."""
    buffers: dict[str, np.ndarray]
    """After the run: running statistics and whatever else is not trained."""
    summed: dict[str, np.ndarray]
    """Reference only: for a bias, the sum of the absolute values of what its gradient is the sum of."""
    not_captured: dict[str, str] = dataclasses.field(default_factory=dict)
    """Module to the reason why its values could not be recorded."""
    narrow: dict[str, str] = dataclasses.field(default_factory=dict)
    """Float64 runs only: tensor (of outputs, results, loss) to the place where float32, or less, entered it: a module,
    then ` at file:line` where that is known."""

    @property
    def everything(self) -> dict[str, np.ndarray]:
        """Outputs of modules, results and loss."""
        return self.outputs | self.results | {LOSS: self.loss}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a module, by the module's path (and `:method`)."""

    name: str
    given: Named
    given_ids: Named
    returned: Named
    narrow: tuple[str | None, ...] = ()
    """For each of `returned`, the place where float32 entered it; empty where nothing was watched."""


def narrow_by_name(calls: Iterable[Call]) -> dict[str, str]:
    """Tensor -> place where float32 entered it, of the calls in order."""
    narrow: dict[str, str] = {}
    number: Counter[str] = Counter()
    for call in calls:
        number[call.name] += 1
        for (suffix, _), place in zip(call.returned, call.narrow, strict=False):
            if place is not None:
                narrow[numbered(call.name, number[call.name]) + suffix] = place
    return narrow


def by_name(calls: Iterable[Call]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Calls in the order in which they ended -> what they were given, its ids, what they returned; each by name."""
    given: dict[str, Any] = {}
    given_ids: dict[str, Any] = {}
    returned: dict[str, Any] = {}
    number: Counter[str] = Counter()
    for call in calls:
        number[call.name] += 1
        name = numbered(call.name, number[call.name])
        for kept, arrays in ((given, call.given), (given_ids, call.given_ids), (returned, call.returned)):
            kept.update({name + suffix: array for suffix, array in arrays})
    return given, given_ids, returned


def call_of(name: str) -> str:
    """`layers.0#2[1]` -> `layers.0#2`: the call that an array belongs to."""
    return name.partition("[")[0]


def method_of(name: str) -> str:
    """`embed:attend#2[1]` -> `attend`; empty for `__call__` and `forward`."""
    return call_of(name).partition("#")[0].partition(":")[2]


def module_of(name: str) -> str:
    """`layers.0#2[1]` -> `layers.0`; `embed:attend` -> `embed`."""
    return call_of(name).partition("#")[0].partition(":")[0]


def numbered(name: str, number: int) -> str:
    """The name of a module's call, counted from 1."""
    return name if number == 1 else f"{name}#{number}"


def leaves(value: Any, wanted: Callable[[Any], bool]) -> Named:
    """(suffix, array) of every array that is wanted, in tuples, lists, dicts and dataclasses; `""` if there is one."""
    found = list(_walk(value, wanted, ()))
    if len(found) == 1:
        return [("", found[0][1])]
    return [("[" + ".".join(path) + "]", array) for path, array in found]


def positions(value: Any, wanted: Callable[[Any], bool]) -> Named:
    """The same, counted: whether an argument was given by position or by name is no difference between two models."""
    found = [array for _, array in leaves(value, wanted)]
    return [("", found[0])] if len(found) == 1 else [(f"[{i}]", array) for i, array in enumerate(found)]


def in_signature_order(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments in the order of the function's parameters, however they were given."""
    try:
        return list(inspect.signature(function).bind(*args, **kwargs).arguments.values())
    except (TypeError, ValueError):  # a call that raises by itself, or a function without a signature
        return [*args, *kwargs.values()]


def substitute(value: Any, wanted: Callable[[Any], bool], replacement: Callable[[Any], Any]) -> Any:
    """The same structure with every wanted array replaced, in the order of `leaves`."""
    if wanted(value):
        return replacement(value)
    if isinstance(value, Mapping):
        items = {key: substitute(item, wanted, replacement) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, (tuple, list)):
        every = [substitute(item, wanted, replacement) for item in value]
        return type(value)(*every) if hasattr(value, "_fields") else type(value)(every)
    if _is_data(value):
        changed = {
            field.name: substitute(getattr(value, field.name), wanted, replacement)
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **changed)
    return value


def _walk(value: Any, wanted: Callable[[Any], bool], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if wanted(value):
        yield path, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _walk(value[key], wanted, (*path, str(key)))
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _walk(item, wanted, (*path, str(i)))
    elif _is_data(value):
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name), wanted, (*path, field.name))


def _is_data(value: Any) -> bool:
    """A dataclass, but no module: one that is handed around (a shared embedding) is not made of values."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    return all(base.__name__ != "Module" for base in type(value).__mro__)


def projection(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Fixed random weights for an output: their sum of products is the loss of a pair that brings none."""
    seed = [*name.encode(), *shape]
    return np.random.default_rng(seed).standard_normal(shape) / np.sqrt(max(1, int(np.prod(shape))))
