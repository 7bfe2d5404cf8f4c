"""Adam's state between `torch.optim.Adam` (or AdamW) and optax: stop in one framework, go on in the other.

Both keep a running mean of gradients, one of their squares, and a number of steps; both divide by √(second moment) +
eps after the same correction of the bias. Moments go through the mapping of the weights, as moments: what scales a
weight divides its first moment by the same factor and its second by the square (see rules.py).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parity.weights.mapping import WeightMapping
from parity.weights.store_torch import array_of, tensor_of

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamState:
    """Of all parameters, by name."""

    step: int
    """Steps taken."""
    first: Arrays
    """Running means of gradients."""
    second: Arrays
    """Running means of their squares."""

    def __post_init__(self) -> None:
        if self.first.keys() != self.second.keys():
            odd = sorted(self.first.keys() ^ self.second.keys())
            raise ValueError(f"expected both moments of every parameter, got one of {', '.join(odd)}")

    def carried(self, mapping: WeightMapping) -> "AdamState":
        """On the other side of the mapping of the weights. Raises MappingError as that does."""
        return AdamState(
            step=self.step,
            first=mapping.apply(self.first, kind="first_moment"),
            second=mapping.apply(self.second, kind="second_moment"),
        )


def from_torch(state: Mapping[str, Any], *, names: Sequence[str] | None = None) -> AdamState:
    """Of `optimizer.state_dict()`. Names are in the order of the parameters that the optimizer was given:
    `[name for name, _ in model.named_parameters()]`; not needed where torch keeps them itself (`param_names`).

    Raises ValueError for parameters without a state, with another number of steps, or with a third moment (amsgrad).
    """
    groups = state["param_groups"]
    order = [number for group in groups for number in group["params"]]
    kept = [name for group in groups for name in group.get("param_names", ())]
    names = kept if names is None else list(names)
    if len(names) != len(order):
        raise ValueError(f"expected a name for each of {len(order)} parameters, in their order, got {len(names)}")
    of_names = {name: state["state"].get(number) for name, number in zip(names, order, strict=True)}
    missing = [name for name, each in of_names.items() if each is None]
    if missing:
        raise ValueError(f"expected a state of every parameter, got none of {', '.join(missing)}")
    extra = {key for each in of_names.values() for key in each} - {"step", "exp_avg", "exp_avg_sq"}
    if extra:
        raise ValueError(f"expected the state of Adam or AdamW, got {', '.join(sorted(extra))} besides")
    steps = {int(each["step"]) for each in of_names.values()}
    if len(steps) != 1:
        raise ValueError(f"expected one number of steps, got {sorted(steps)}")
    return AdamState(
        step=steps.pop(),
        first={name: array_of(each["exp_avg"].cpu()) for name, each in of_names.items()},
        second={name: array_of(each["exp_avg_sq"].cpu()) for name, each in of_names.items()},
    )


def to_torch(adam: AdamState, state: Mapping[str, Any], *, names: Sequence[str]) -> dict[str, Any]:
    """The state dict of an optimizer, as `state` (that of a new one), with these moments: for `load_state_dict`.

    `names` as for `from_torch`. Raises ValueError for parameters that have none.
    """
    import torch

    order = [number for group in state["param_groups"] for number in group["params"]]
    if len(names) != len(order) or set(names) != set(adam.first):
        odd = sorted(set(names) ^ set(adam.first))
        raise ValueError(f"expected moments of the optimizer's {len(order)} parameters, got a difference in {odd}")
    return {
        "param_groups": state["param_groups"],
        "state": {
            number: {
                "step": torch.tensor(float(adam.step)),
                "exp_avg": tensor_of(adam.first[name]).clone(),
                "exp_avg_sq": tensor_of(adam.second[name]).clone(),
            }
            for name, number in zip(names, order, strict=True)
        },
    }


def from_optax(state: Any) -> AdamState:
    """Of whatever optax state has Adam in it. Raises ValueError unless it has it once, over a flat dictionary."""
    (adam,) = _adams(state)
    return AdamState(
        step=int(adam.count),
        first={name: np.asarray(array) for name, array in adam.mu.items()},
        second={name: np.asarray(array) for name, array in adam.nu.items()},
    )


def to_optax(adam: AdamState, state: Any) -> Any:
    """An optax state as `state`, with these moments; whatever else counts steps there (schedules) counts them too.

    Raises ValueError for other parameters than it has.
    """
    import jax
    import optax

    (old,) = _adams(state)
    if old.mu.keys() != adam.first.keys():
        raise ValueError(
            f"expected moments of the parameters, got a difference in {sorted(old.mu.keys() ^ adam.first.keys())}"
        )

    def changed(node: Any) -> Any:
        if isinstance(node, optax.ScaleByAdamState):
            count = np.asarray(adam.step, np.asarray(node.count).dtype)
            return node._replace(count=count, mu=dict(adam.first), nu=dict(adam.second))
        if isinstance(node, optax.ScaleByScheduleState):
            return node._replace(count=np.asarray(adam.step, np.asarray(node.count).dtype))
        return node

    kinds = (optax.ScaleByAdamState, optax.ScaleByScheduleState)
    return jax.tree.map(changed, state, is_leaf=lambda node: isinstance(node, kinds))


def _adams(state: Any) -> list[Any]:
    import jax
    import optax

    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    found = [leaf for leaf in leaves if isinstance(leaf, optax.ScaleByAdamState)]
    if len(found) != 1 or not isinstance(found[0].mu, Mapping):
        raise ValueError(f"expected one state of Adam over a dictionary of parameters, got {len(found)}")
    return found
