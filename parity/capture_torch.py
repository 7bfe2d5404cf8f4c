"""Runs a torch.nn.Module and keeps what every submodule was given and what it returned, the loss, every gradient."""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from parity.capture_torch_calls import CallRecorder, is_floating, to_numpy
from parity.capture_torch_dropout import drawn, handed_to
from parity.capture_torch_precision import PrecisionWatch
from parity.capture_torch_sums import BiasSums
from parity.facts import Facts
from parity.facts_torch import describe
from parity.pair import Inputs, Masks, Precision, Side
from parity.part import submodule
from parity.trace import LOSS, OUTPUT, Trace, by_name, leaves, narrow_by_name, projection, substitute

__all__ = ["TorchRunner", "load_reference", "tensors_of", "to_numpy"]


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
        return {name: to_numpy(tensor.detach().to(torch.float32)).copy() for name, tensor in named}

    def trained(self) -> frozenset[str]:
        """Names of the parameters that a training step changes."""
        return frozenset(name for name, p in self.module("float32").named_parameters() if p.requires_grad)

    def built_tables(self) -> dict[str, np.ndarray]:
        """What is not trained, with the values it is built with, in float64: nothing has been loaded into it yet."""
        module = self.side.module("float64")
        named = [*module.named_buffers(), *((n, p) for n, p in module.named_parameters() if not p.requires_grad)]
        return {name: to_numpy(tensor.detach().to(torch.float64)).copy() for name, tensor in named}

    def facts(self) -> Facts:
        """Types, tensors and settings of every module."""
        return describe(self.module("float32"))

    @property
    def device(self) -> str:
        """Where its parameters are: `cpu`, `cuda`, ..."""
        return device_of(self.module("float32")).type

    def trace(
        self,
        inputs: Inputs,
        *,
        weights: Mapping[str, np.ndarray],
        precision: Precision,
        training: bool = False,
        masks: Masks | None = None,
        valid: np.ndarray | None = None,
        seed: int = 0,
    ) -> Trace:
        """One forward and backward pass with these weights, in evaluation mode unless `training`.

        `masks`: keep masks by site for the model's dropout, which implies training mode. `valid`: which leading
        positions of an output count in the loss of a pair that brings none. `seed`: of torch's own random numbers.

        Raises ValueError that names parameters without a weight, or masks without a place.
        """
        module = self.module(precision)
        load_reference(module, weights, precision=precision)
        recorder, sums = CallRecorder(module), BiasSums(module)
        arrays = tensors_of(inputs, precision, device=device_of(module))
        watch = PrecisionWatch(module, recorder.current) if precision == "float64" else None
        recorder.watch = watch
        with _settings(module, seed=seed, training=training or masks is not None):
            with recorder.recording(), sums.recording(), watch or contextlib.nullcontext():
                output = self._call(module, arrays, masks)
                results = {OUTPUT + suffix: tensor for suffix, tensor in leaves(output, is_floating)}
                loss = self._loss(output, results, arrays, valid)
            # Recording has ended: in the backward pass, gradient checkpointing calls modules once more.
            if loss.requires_grad:
                loss.backward()
            buffers = {name: to_numpy(buffer).copy() for name, buffer in module.named_buffers()}
        given, given_ids, outputs = by_name(recorder.calls)
        narrow = narrow_by_name(recorder.calls)
        if watch is not None:
            narrow |= watch.of_each(results | {LOSS: loss})
        return Trace(
            given=given,
            given_ids=given_ids,
            outputs=outputs,
            results={name: to_numpy(tensor) for name, tensor in results.items()},
            loss=to_numpy(loss),
            gradients=_gradients_of(module),
            buffers=buffers,
            summed=sums.summed(),
            narrow=narrow,
        )

    def results(
        self,
        inputs: Inputs,
        *,
        weights: Mapping[str, np.ndarray],
        precision: Precision = "float64",
        fast_path: bool = False,
        seed: int = 0,
    ) -> dict[str, np.ndarray]:
        """What the model returns, not watched and without gradients, with or without torch's encoder fast path."""
        module = self.module(precision)
        load_reference(module, weights, precision=precision)
        arrays = tensors_of(inputs, precision, device=device_of(module))
        settings = _settings(module, seed=seed, training=False, fast_path=fast_path)
        with settings, torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")  # the fast path's own
            output = self.side.call(module, arrays)
        return {OUTPUT + suffix: to_numpy(tensor) for suffix, tensor in leaves(output, is_floating)}

    def gradients(self, inputs: Inputs, *, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Of every trained parameter, in float64 and evaluation mode, not watched: for whoever has hooks of his own."""
        module = self.module("float64")
        load_reference(module, weights, precision="float64")
        arrays = tensors_of(inputs, "float64", device=device_of(module))
        with _settings(module, seed=0, training=False):
            output = self.side.call(module, arrays)
            results = {OUTPUT + suffix: tensor for suffix, tensor in leaves(output, is_floating)}
            loss = self._loss(output, results, arrays, None)
            if loss.requires_grad:
                loss.backward()
        return _gradients_of(module)

    def has_fast_path(self) -> bool:
        """Whether torch's encoder is among its modules, whose fast path changes what padded positions hold (P18)."""
        kinds = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
        return any(isinstance(module, kinds) for module in self.module("float32").modules())

    def product(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Of two float32 matrices, on its device, under the settings that its runs have."""
        module = self.module("float32")
        with _settings(module, seed=0, training=False), torch.no_grad():
            return to_numpy(_tensor(left).to(device_of(module)) @ _tensor(right).to(device_of(module)))

    def given_to(self, part: str, inputs: Inputs, *, weights: Mapping[str, np.ndarray] | None = None) -> dict[str, Any]:
        """Runs in float64; returns what the submodule `part` was given in its first call, by the names of its
        parameters: arrays, structures of arrays, and whatever else. What only repeats a default at the end is left out.

        Raises ValueError if there is no such submodule, or it is not called.
        """
        module = self.module("float64")
        if weights is not None:
            load_reference(module, weights, precision="float64")
        found: list[dict[str, Any]] = []

        def keep(called: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if not found:
                found.append(_by_parameter(called.forward, args, kwargs))

        handle = submodule(module, part).register_forward_pre_hook(keep, with_kwargs=True)
        try:
            with _settings(module, seed=0, training=False), torch.no_grad():
                self.side.call(module, tensors_of(inputs, "float64", device=device_of(module)))
        finally:
            handle.remove()
        if not found:
            raise ValueError(f"expected the reference to call its submodule {part!r}, got no call")
        return found[0]

    def draw_masks(
        self, inputs: Inputs, seed: int, *, weights: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """Keep masks by site, as the model's own dropout draws them: by the side's `draw_dropout`, or by watching its
        Dropout modules."""
        module = self.module("float32")
        if weights is not None:
            load_reference(module, weights, precision="float32")
        arrays = tensors_of(inputs, "float32", device=device_of(module))
        with _settings(module, seed=seed, training=True), torch.no_grad():
            if self.side.draw_dropout is not None:
                masks = dict(self.side.draw_dropout(module, arrays, seed))
            else:
                with drawn(module) as masks:
                    self.side.call(module, arrays)
        return {
            site: np.asarray(to_numpy(mask) if isinstance(mask, torch.Tensor) else mask, bool)
            for site, mask in masks.items()
        }

    def _call(self, module: torch.nn.Module, arrays: dict[str, Any], masks: Masks | None) -> Any:
        if masks is None:
            return self.side.call(module, arrays)
        device = device_of(module)
        tensors = {site: torch.from_numpy(np.array(mask, bool)).to(device) for site, mask in masks.items()}
        if self.side.call_with_dropout is not None:
            return self.side.call_with_dropout(module, arrays, tensors)
        with handed_to(module, tensors):
            return self.side.call(module, arrays)

    def _loss(
        self, output: Any, results: Mapping[str, torch.Tensor], inputs: Mapping[str, Any], valid: np.ndarray | None
    ) -> torch.Tensor:
        if self.side.loss is not None:
            loss = self.side.loss(output, inputs)
            return loss[0] / loss[1] if isinstance(loss, tuple) else loss
        if not results:
            raise ValueError(f"expected the reference to return floating-point tensors, got {type(output).__name__}")
        terms = []
        for name, tensor in results.items():
            counted = tensor
            if valid is not None and tuple(tensor.shape[: valid.ndim]) == valid.shape:
                # By selection: an invalid position may be NaN, which times 0 is NaN.
                counted = tensor[torch.from_numpy(valid).to(tensor.device)]
            weight = torch.from_numpy(projection(name, tuple(counted.shape)))
            terms.append((counted * weight.to(counted.device, counted.dtype)).sum())
        return torch.stack([term.to(terms[0].dtype) for term in terms]).sum()


def _gradients_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Of every trained parameter; zeros where the backward pass did not reach it."""
    return {
        name: np.zeros(tuple(p.shape), to_numpy(p).dtype) if p.grad is None else to_numpy(p.grad).copy()
        for name, p in module.named_parameters()
        if p.requires_grad
    }


def _by_parameter(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **kwargs)
    given: dict[str, Any] = {}
    parameters = bound.signature.parameters
    for name, value in bound.arguments.items():
        if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            given |= {f"{name}.{i}": item for i, item in enumerate(value)}
        elif parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            given |= value
        else:
            given[name] = value
    while given and _is_default(parameters.get(last := list(given)[-1]), given[last]):
        given.popitem()
    return {
        name: substitute(value, lambda x: isinstance(x, torch.Tensor), lambda x: to_numpy(x).copy())
        for name, value in given.items()
    }


def _is_default(parameter: Any, value: Any) -> bool:
    return parameter is not None and not isinstance(value, torch.Tensor) and parameter.default is value


@contextlib.contextmanager
def _settings(module: torch.nn.Module, *, seed: int, training: bool, fast_path: bool = False) -> Iterator[None]:
    """Mode, random numbers, full precision (P6) and the encoder's fast path (P18) for one run; all of it undone after.

    Integer buffers too: a training run counts them up, and they are no weights that the next run would set.
    """
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    before = (
        torch.backends.mha.get_fastpath_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
    )
    module.train(training)
    torch.backends.mha.set_fastpath_enabled(fast_path)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        device = device_of(module)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield
    finally:
        module.eval()
        torch.backends.mha.set_fastpath_enabled(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.backends.cudnn.allow_tf32 = before[2]
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in buffers and buffer.shape == buffers[name].shape:
                    buffer.copy_(buffers[name])


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
            parameter.copy_(_tensor(weights[name]))
            parameter.grad = None
        for name, buffer in module.named_buffers():
            if name in weights:
                buffer.copy_(_tensor(weights[name]))


def tensors_of(inputs: Inputs, precision: Precision, *, device: torch.device | None = None) -> dict[str, Any]:
    """Inputs as tensors; floating-point ones in the precision of the run."""

    def place(array: np.ndarray) -> torch.Tensor:
        tensor = _tensor(array).to(device)
        return tensor.to(getattr(torch, precision)) if tensor.is_floating_point() else tensor

    return {name: substitute(value, lambda x: isinstance(x, np.ndarray), place) for name, value in inputs.items()}


def device_of(module: torch.nn.Module) -> torch.device:
    """That of its first parameter or buffer."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def _tensor(array: np.ndarray) -> torch.Tensor:
    # torch neither takes negative strides nor wants memory that it may not write.
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
