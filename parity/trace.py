"""What one run of one model leaves behind, as numpy arrays under names that are the same in both frameworks.

Names are dotted module paths; a module called again gets `#2`, `#3`, ...; an output of several arrays gets `[0]`,
`[1]`, ..., or `[key]` from a dict, behind the name. What the model itself returns is called `output`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

OUTPUT = "output"
LOSS = "loss"


@dataclasses.dataclass(kw_only=True)
class Trace:
    """One run: forward, and backward where there is a loss."""

    given: dict[str, np.ndarray]
    """Floating-point inputs of every module call."""
    given_ids: dict[str, np.ndarray]
    """Its other inputs: ids, boolean masks."""
    outputs: dict[str, np.ndarray]
    """Floating-point outputs of every module call, in the order in which the calls ended (for the reference)."""
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

    @property
    def everything(self) -> dict[str, np.ndarray]:
        """Outputs of modules, results and loss."""
        return self.outputs | self.results | {LOSS: self.loss}


def call_of(name: str) -> str:
    """`layers.0#2[1]` -> `layers.0#2`: the call that an array belongs to."""
    return name.split("[")[0]


def module_of(name: str) -> str:
    """`layers.0#2[1]` -> `layers.0`."""
    return call_of(name).split("#")[0]


def numbered(name: str, number: int) -> str:
    """The name of a module's call, counted from 1."""
    return name if number == 1 else f"{name}#{number}"


def leaves(value: Any, wanted: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    """(suffix, array) of every array that is wanted, in tuples, lists, dicts and dataclasses; `""` if there is one."""
    found = list(_walk(value, wanted, ()))
    if len(found) == 1:
        return [("", found[0][1])]
    return [("[" + ".".join(path) + "]", array) for path, array in found]


def _walk(value: Any, wanted: Callable[[Any], bool], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if wanted(value):
        yield path, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _walk(value[key], wanted, (*path, str(key)))
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _walk(item, wanted, (*path, str(i)))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name), wanted, (*path, field.name))


def by_call(calls: Mapping[str, Sequence[Sequence[tuple[str, np.ndarray]]]]) -> dict[str, np.ndarray]:
    """{module: its calls, each a list of (suffix, array)} -> {name: array}."""
    return {
        numbered(name, number) + suffix: array
        for name, every in calls.items()
        for number, arrays in enumerate(every, start=1)
        for suffix, array in arrays
    }


def projection(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Fixed random weights for an output: their sum of products is the loss of a pair that brings none."""
    seed = [*name.encode(), *shape]
    return np.random.default_rng(seed).standard_normal(shape) / np.sqrt(max(1, int(np.prod(shape))))
