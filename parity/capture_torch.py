"""Runs a torch.nn.Module and keeps what every submodule was given and what it returned, the loss, every gradient."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from parity.facts import Facts
from parity.facts_torch import describe
from parity.pair import Inputs, Precision, Side
from parity.trace import OUTPUT, Trace, by_call, leaves, numbered, projection


class TorchRunner:
    """The reference, alive: built once in each precision."""

    def __init__(self, side: Side):
        self.side = side

    @functools.cache  # noqa: B019 - lives as long as the check
    def module(self, precision: Precision) -> torch.nn.Module:
        """The reference in evaluation mode. Raises TypeError if the builder returns anything else."""
        module = self.side.module(precision)
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"expected the reference's builder to return a torch.nn.Module, got {type(module)}")
        # Whoever is told the precision decides, say, that parameters stay float32 where it computes in bfloat16.
        return (module if self.side.takes_precision else module.to(getattr(torch, precision))).eval()

    def weights(self) -> dict[str, np.ndarray]:
        """Parameters and floating-point buffers as built, in float32; a tied one under its first name."""
        module = self.module("float32")
        named = [*module.named_parameters(), *((n, b) for n, b in module.named_buffers() if b.is_floating_point())]
        return {name: tensor.detach().to(torch.float32).numpy().copy() for name, tensor in named}

    def trained(self) -> frozenset[str]:
        """Names of the parameters that a training step changes."""
        return frozenset(name for name, p in self.module("float32").named_parameters() if p.requires_grad)

    def facts(self) -> Facts:
        """Types, tensors and settings of every module."""
        return describe(self.module("float32"))

    def trace(self, inputs: Inputs, *, weights: Mapping[str, np.ndarray], precision: Precision) -> Trace:
        """One forward and backward pass with these weights.

        Raises ValueError that names parameters without a weight.
        """
        module = self.module(precision)
        load_reference(module, weights, precision=precision)
        recorder = _Recorder()
        arrays = tensors_of(inputs, precision)
        with recorder.recording(module):
            output = self.side.call(module, arrays)
        results = {OUTPUT + suffix: tensor for suffix, tensor in leaves(output, _is_floating)}
        loss = self._loss(output, results, arrays)
        # Recording has ended: in the backward pass, gradient checkpointing calls modules once more.
        loss.backward()
        rank = {name: i for i, name in enumerate(recorder.order)}
        outputs = by_call(recorder.returned)
        return Trace(
            given=by_call(recorder.given),
            given_ids=by_call(recorder.given_ids),
            outputs=dict(sorted(outputs.items(), key=lambda item: rank[item[0].split("[")[0]])),
            results={name: to_numpy(tensor) for name, tensor in results.items()},
            loss=to_numpy(loss),
            gradients={
                name: np.zeros(tuple(p.shape), to_numpy(p).dtype) if p.grad is None else to_numpy(p.grad)
                for name, p in module.named_parameters()
                if p.requires_grad
            },
            buffers={name: to_numpy(buffer) for name, buffer in module.named_buffers()},
            summed=recorder.summed,
        )

    def _loss(self, output: Any, results: Mapping[str, torch.Tensor], inputs: Mapping[str, Any]) -> torch.Tensor:
        if self.side.loss is None:
            terms = [
                (tensor * torch.from_numpy(projection(name, tuple(tensor.shape))).to(tensor.dtype)).sum()
                for name, tensor in results.items()
            ]
            return torch.stack(terms).sum()
        loss = self.side.loss(output, inputs)
        return loss[0] / loss[1] if isinstance(loss, tuple) else loss


class _Recorder:
    """What every submodule is given and returns, and what the gradients of biases are sums of."""

    def __init__(self) -> None:
        self.given: dict[str, list[list[tuple[str, np.ndarray]]]] = {}
        self.given_ids: dict[str, list[list[tuple[str, np.ndarray]]]] = {}
        self.returned: dict[str, list[list[tuple[str, np.ndarray]]]] = {}
        self.order: list[str] = []
        self.summed: dict[str, np.ndarray] = {}

    @contextlib.contextmanager
    def recording(self, module: torch.nn.Module) -> Iterator[None]:
        handles = [
            submodule.register_forward_hook(self._on_call(name), with_kwargs=True)
            for name, submodule in module.named_modules()
            if name
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_call(self, name: str) -> Any:
        def hook(called: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = (args, list(kwargs.values()))
            self.given.setdefault(name, []).append(_arrays(given, _is_floating))
            self.given_ids.setdefault(name, []).append(_arrays(given, _is_discrete))
            self.returned.setdefault(name, []).append(_arrays(output, _is_floating))
            self.order.append(numbered(name, len(self.returned[name])))
            if isinstance(called, torch.nn.Linear) and called.bias is not None and output.requires_grad:
                output.register_hook(self._on_gradient(f"{name}.bias"))

        return hook

    def _on_gradient(self, bias: str) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            total = to_numpy(gradient.abs().flatten(0, -2).sum(0))
            self.summed[bias] = self.summed[bias] + total if bias in self.summed else total

        return hook


def load_reference(module: torch.nn.Module, weights: Mapping[str, np.ndarray], *, precision: Precision) -> None:
    """Sets every parameter and every buffer that has a weight, cast up exactly.

    Raises ValueError that names parameters without a weight.
    """
    parameters = dict(module.named_parameters())
    missing = sorted(parameters.keys() - weights.keys())
    if missing:
        raise ValueError(f"expected a weight for every parameter of the reference, got none for {missing}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(weights[name])))
            parameter.grad = None
        for name, buffer in module.named_buffers():
            if name in weights:
                buffer.copy_(torch.from_numpy(np.ascontiguousarray(weights[name])))


def tensors_of(inputs: Inputs, precision: Precision) -> dict[str, torch.Tensor]:
    """Inputs as tensors; floating-point ones in the precision of the run."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in inputs.items()}
    return {name: t.to(getattr(torch, precision)) if t.is_floating_point() else t for name, t in tensors.items()}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """On the host; bfloat16 as float32, which holds it exactly."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _arrays(value: Any, wanted: Any) -> list[tuple[str, np.ndarray]]:
    # A copy: a module may change its input in place.
    return [(suffix, to_numpy(tensor).copy()) for suffix, tensor in leaves(value, wanted)]


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_discrete(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point()
