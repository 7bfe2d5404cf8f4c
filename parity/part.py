"""A port of one submodule of the reference: both are given what the reference, run whole, gives that submodule."""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.pair import Inputs, Pair, Side


class PartInputs(dict[str, Any]):
    """What the submodule was given, by the names of its parameters: arrays, structures of arrays, and whatever else."""

    def __init__(self, given: Mapping[str, Any], *, whole: Inputs):
        super().__init__(given)
        self.whole = whole
        """What the whole reference was given."""


def derived(inputs: Inputs, changed: Inputs) -> Inputs:
    """What was made out of inputs: still those of a part, if they were, not of the whole model."""
    return PartInputs(changed, whole=inputs.whole) if isinstance(inputs, PartInputs) else changed


def pair_of_part(pair: Pair) -> Pair:
    """The same pair with the submodule as its reference, without what belongs to the whole model: a loss, a decoder.

    Raises ValueError if the reference has no such submodule, when it is built.
    """
    without: dict[str, Any] = {
        "loss": None,
        "decode": None,
        "draw_dropout": None,
        "call_with_dropout": None,
        "dropout_rates": None,
        "initial": None,
        "training": None,
    }
    reference, port = pair.reference, pair.port
    if reference is not None:
        build = _build_of_part(reference, pair.part)
        reference = dataclasses.replace(reference, build=build, call=_call, **without)
    if port is not None:
        port = dataclasses.replace(port, **without)
    return dataclasses.replace(pair, reference=reference, port=port, weights=_of_part(pair))


class Replay:
    """The reference of this pair, run whole, and always the same one."""

    def __init__(self, pair: Pair):
        from parity.capture_torch import TorchRunner

        self.part = pair.part
        self.runner = TorchRunner(pair.reference)
        self.weights = pair.weights if pair.weights is not None and _of_part(pair) is not pair.weights else None

    def __call__(self, inputs: Inputs) -> PartInputs:
        """What its submodule is given in float64. Raises ValueError if it is not called."""
        return PartInputs(self.runner.given_to(self.part, inputs, weights=self.weights), whole=inputs)


def _of_part(pair: Pair) -> Mapping[str, np.ndarray] | None:
    """Weights by the submodule's own names, whether they were given by those or by the whole model's."""
    prefix = pair.part + "."
    if pair.weights is None or not any(name.startswith(prefix) for name in pair.weights):
        return pair.weights
    return {name[len(prefix) :]: array for name, array in pair.weights.items() if name.startswith(prefix)}


def _build_of_part(side: Side, part: str) -> Any:
    @functools.wraps(side.build, updated=())
    def build(*args: Any, **kwargs: Any) -> Any:
        whole = side.build(*args, **kwargs)
        return submodule(whole, part)

    return build


def submodule(whole: Any, part: str) -> Any:
    """Of a torch.nn.Module. Raises ValueError that names those it has."""
    try:
        return whole.get_submodule(part)
    except AttributeError:
        near = ", ".join(name for name, _ in whole.named_children())
        raise ValueError(f"expected part to be a submodule of the reference ({near}, ...), got {part!r}") from None


def _call(module: Any, inputs: Mapping[str, Any]) -> Any:
    """By position where the parameter has one, by name otherwise; `name.0`, `name.1` are those of `*name`."""
    args, kwargs = [], {}
    parameters = inspect.signature(module.forward).parameters
    for name, value in inputs.items():
        parameter = parameters.get(name)
        by_position = "." in name or (
            parameter is not None
            and parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        )
        if by_position:
            args.append(value)
        else:
            kwargs[name] = value
    return module(*args, **kwargs)
