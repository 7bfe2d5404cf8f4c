"""Faults of initialisation, and of the trainer's own step."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from parity.mutations.planting import Kind, with_side
from parity.pair import Pair
from parity.runs import Runs


def _drawn(name: str, description: str, ends: tuple[str, ...], change: Callable[[Any, int], Any]) -> Kind:
    """Another draw of one parameter. `change(array, seed)`."""

    def places(pair: Pair) -> list[str]:
        return [] if pair.port.initial is None else [n for n in pair.port.initial(0) if n.endswith(ends)]

    def plant(pair: Pair, place: str) -> Pair:
        original = pair.port.initial

        def initial(seed: int) -> dict[str, Any]:
            values = dict(original(seed))
            return values | {place: change(values[place], seed)}

        return with_side(pair, initial=initial)

    return Kind(name=name, description=description, places=places, plant=plant, cases=("P5",))


def _normal(array: Any, seed: int) -> Any:
    return jnp.std(array) * jax.random.normal(jax.random.key(seed), array.shape, array.dtype)


def _uniform(array: Any, seed: int) -> Any:
    return array + 0.1 * jax.random.uniform(jax.random.key(seed), array.shape, array.dtype, -1.0, 1.0)


def _trained_names(pair: Pair) -> list[str]:
    """All but those whose gradient is zero in exact arithmetic, as of a bias of keys: there is nothing to update."""
    if pair.port.training is None or pair.port.initial is None:
        return []
    zero = Runs(pair).zero_gradients(0)
    return [name for name in pair.port.initial(0) if name not in zero]


def _step(pair: Pair, change: Callable[[Any, Any], Any]) -> Pair:
    """A training step whose state is `change(state before, state after)`."""
    original = pair.port.training

    def step(state: Any, inputs: Mapping[str, Any], masks: Mapping[str, Any]) -> tuple[Any, Any]:
        after, loss = original.step(state, inputs, masks)
        return change(state, after), loss

    return with_side(pair, training=dataclasses.replace(original, step=step))


def _frozen(pair: Pair, place: str) -> Pair:
    return _step(pair, lambda old, new: new._replace(params=new.params | {place: old.params[place]}))


KINDS: tuple[Kind, ...] = (
    _drawn("initial scale by √2", "He's for Xavier's", ("kernel", "weight"), lambda array, seed: array * 2**0.5),
    _drawn("initial values normal", "of the same deviation, for uniform ones", ("kernel",), _normal),
    _drawn("initial bias drawn", "random where it is 0", ("bias",), _uniform),
    Kind(
        name="parameter never updated by the trainer",
        description="dropped between two steps",
        places=_trained_names,
        plant=_frozen,
        cases=("P25",),
    ),
    Kind(
        name="update lost",
        description="every step begins where the first began",
        places=lambda pair: [] if pair.port.training is None else ["training"],
        plant=lambda pair, place: _step(pair, lambda old, new: old),
        cases=("P25",),
        rungs=("trajectory",),
    ),
)
