"""For every bias, the sum of the absolute values of what its gradient is the sum of.

A gradient far smaller than that sum is zero in exact arithmetic (the key projection's bias, a bias before a norm): what
is left of it is rounding noise.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from parity.capture_torch_calls import to_numpy

_POSITION_OF_BIAS = {
    "linear": 2,
    "conv1d": 2,
    "conv2d": 2,
    "conv3d": 2,
    "conv_transpose1d": 2,
    "conv_transpose2d": 2,
    "conv_transpose3d": 2,
    "layer_norm": 3,
    "group_norm": 3,
    "batch_norm": 4,
}


class BiasSums:
    """Watches the functions that add a bias, so that a bias used without its module (a fused projection) counts too."""

    def __init__(self, module: torch.nn.Module):
        self._parameters = {p.untyped_storage()._cdata: (name, p) for name, p in module.named_parameters()}
        self._summed: dict[str, np.ndarray] = {}

    def summed(self) -> dict[str, np.ndarray]:
        """By the parameter's name, after the backward pass."""
        return {name: array.reshape(self._shape(name)) for name, array in self._summed.items()}

    def _shape(self, name: str) -> tuple[int, ...]:
        return next(tuple(p.shape) for n, p in self._parameters.values() if n == name)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While the forward pass runs."""
        undo: list[Callable[[], Any]] = []
        try:
            for name, position in _POSITION_OF_BIAS.items():
                undo.append(self._wrap(functional, name, position, "bias"))
            undo.append(self._wrap(torch, "addmm", 0, "input"))
            yield
        finally:
            for action in undo:
                action()

    def _wrap(self, namespace: Any, name: str, position: int, keyword: str) -> Callable[[], None]:
        original = getattr(namespace, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            bias = kwargs.get(keyword, args[position] if len(args) > position else None)
            if isinstance(bias, torch.Tensor) and output.requires_grad:
                self._watch(bias, output, name)
            return output

        setattr(namespace, name, wrapped)
        return lambda: setattr(namespace, name, original)

    def _watch(self, bias: torch.Tensor, output: torch.Tensor, function: str) -> None:
        parameter = self._parameters.get(bias.untyped_storage()._cdata)
        if parameter is None or not bias.is_contiguous():
            return
        name, whole = parameter
        # A fused projection uses slices of its parameter.
        start, stop = bias.storage_offset() - whole.storage_offset(), None
        stop = start + bias.numel()

        def add(gradient: torch.Tensor) -> None:
            total = self._summed.setdefault(name, np.zeros(whole.numel(), to_numpy(whole).dtype))
            total[start:stop] += to_numpy(_over_bias(gradient.abs(), bias, function)).reshape(-1)

        output.register_hook(add)


def _over_bias(gradient: torch.Tensor, bias: torch.Tensor, function: str) -> torch.Tensor:
    """Summed over every axis along which the bias was broadcast."""
    if function.startswith("conv"):
        channel = gradient.ndim - 1 - int(function[-2])
    elif function in ("group_norm", "batch_norm"):
        channel = 1
    else:
        leading = tuple(range(gradient.ndim - bias.ndim))
        return gradient.sum(leading) if leading else gradient
    axes = tuple(axis for axis in range(gradient.ndim) if axis != channel)
    return gradient.sum(axes) if axes else gradient
