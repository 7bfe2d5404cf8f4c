"""Runs a model and keeps what every module was given and what it returned, the loss, and every gradient.

Names are dotted module paths; a module called again gets `#2`, `#3`, ...; an output of several arrays gets `[0]`,
`[1]`, ... behind the name. Only floating-point arrays are kept.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from parity.pair import Inputs, Precision


@dataclasses.dataclass(kw_only=True)
class Trace:
    """What one run of one model left behind, as numpy arrays."""

    given: dict[str, np.ndarray]
    """Floating-point inputs of every module call."""
    outputs: dict[str, np.ndarray]
    """Of every module call, in the order in which the calls ended (for the reference)."""
    logits: np.ndarray
    loss: np.ndarray
    gradients: dict[str, np.ndarray]
    """By the names of that side's parameters."""
    summed: dict[str, np.ndarray]
    """Reference only: for a bias, the sum of the absolute values of what its gradient is the sum of."""

    @property
    def everything(self) -> dict[str, np.ndarray]:
        """Outputs of modules, logits and loss."""
        return self.outputs | {"logits": self.logits, "loss": self.loss}


def run_reference(
    module: torch.nn.Module, run: Any, inputs: Inputs, *, weights: Mapping[str, np.ndarray], precision: Precision
) -> Trace:
    """One forward and backward pass of the torch module, with these weights.

    Raises ValueError that names parameters without a weight.
    """
    load_reference(module, weights, precision=precision)
    recorder = _TorchRecorder()
    with recorder.recording(module):
        logits, loss = run(module, {name: torch.from_numpy(array) for name, array in inputs.items()})
    # Recording has ended: in the backward pass, gradient checkpointing calls modules once more.
    loss.backward()
    outputs = _named(recorder.returned)
    rank = {name: i for i, name in enumerate(recorder.order)}
    return Trace(
        given=_named(recorder.given),
        outputs=dict(sorted(outputs.items(), key=lambda item: rank[item[0].split("[")[0]])),
        logits=_numpy(logits),
        loss=_numpy(loss),
        gradients={
            name: np.zeros(tuple(p.shape), _numpy(p).dtype) if p.grad is None else _numpy(p.grad)
            for name, p in module.named_parameters()
        },
        summed=recorder.summed,
    )


class _TorchRecorder:
    """What every submodule is given and returns, and what the gradients of biases are sums of."""

    def __init__(self) -> None:
        self.given: dict[str, list[list[np.ndarray]]] = {}
        self.returned: dict[str, list[list[np.ndarray]]] = {}
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
            given = [_numpy(tensor) for tensor in _tensors((args, list(kwargs.values())))]
            self.given.setdefault(name, []).append(given)
            self.returned.setdefault(name, []).append([_numpy(tensor) for tensor in _tensors(output)])
            self.order.append(_numbered(name, len(self.returned[name])))
            if isinstance(called, torch.nn.Linear) and called.bias is not None and output.requires_grad:
                output.register_hook(self._on_gradient(f"{name}.bias"))

        return hook

    def _on_gradient(self, bias: str) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            total = _numpy(gradient.abs().flatten(0, -2).sum(0))
            self.summed[bias] = self.summed[bias] + total if bias in self.summed else total

        return hook


def load_reference(module: torch.nn.Module, weights: Mapping[str, np.ndarray], *, precision: Precision) -> None:
    """Sets every parameter, cast up exactly. Raises ValueError that names parameters without a weight."""
    parameters = dict(module.named_parameters())
    missing = sorted(parameters.keys() - weights.keys())
    if missing:
        raise ValueError(f"expected a weight for every parameter of the reference, got none for {missing}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(weights[name].astype(precision)))
            parameter.grad = None


class PortRunner:
    """Jitted forward and backward passes of the Flax module in one precision; compiled once for each shape of inputs.

    The float64 run is traced inside `jax.enable_x64`, the float32 run freshly outside it: with x64 on, a function
    meant for float32 is another program.
    """

    def __init__(self, build: Callable[[Precision], nnx.Module], run: Any, *, precision: Precision):
        self._precision = precision
        with self._numerics():
            module = build(precision)
        graphdef, parameters, *others = nnx.split(module, nnx.Param, ...)
        self._variables = {".".join(map(str, path)): (path, var) for path, var in nnx.to_flat_state(parameters)}

        def loss_and_more(arrays: dict[str, jax.Array], inputs: dict[str, jax.Array]) -> Any:
            filled = [(path, variable.replace(arrays[name])) for name, (path, variable) in self._variables.items()]
            model = nnx.merge(graphdef, nnx.from_flat_state(filled), *others)
            with _recorded_calls(model):
                (logits, loss), recorded = nnx.capture(lambda m: run(m, inputs), nnx.Intermediate)(model)
            calls = {".".join(map(str, path)): value.get_value() for path, value in nnx.to_flat_state(recorded)}
            return loss, (logits, calls)

        self._compiled = jax.jit(jax.value_and_grad(loss_and_more, has_aux=True))

    def __call__(self, weights: Mapping[str, np.ndarray], inputs: Inputs) -> Trace:
        """Runs with these weights, by the names of the port."""
        with self._numerics():
            arrays = {name: jax.numpy.asarray(weights[name].astype(self._precision)) for name in self._variables}
            given = {name: jax.numpy.asarray(array) for name, array in inputs.items()}
            (loss, (logits, calls)), gradients = self._compiled(arrays, given)
            loss, logits, calls, gradients = jax.tree.map(np.asarray, (loss, logits, calls, gradients))
        return Trace(
            given=_named(_calls_of(calls, "__given__")),
            outputs=_named(_calls_of(calls, "__returned__")),
            logits=logits,
            loss=loss,
            gradients=gradients,
            summed={},
        )

    @contextlib.contextmanager
    def _numerics(self) -> Iterator[None]:
        with jax.enable_x64(self._precision == "float64"), jax.default_matmul_precision("highest"):
            yield


def parameter_specs(module: nnx.Module) -> dict[str, Any]:
    """Name to an object with shape and dtype, for every parameter of the port."""
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): variable.get_value() for path, variable in state}


@contextlib.contextmanager
def _recorded_calls(model: nnx.Module) -> Iterator[None]:
    """Makes every submodule sow what it is given and what it returns, for `nnx.capture` to collect.

    Sowing, and not a list on the side, because values inside `nnx.remat` must leave it through the module's state.
    """
    classes = {type(module) for path, module in nnx.iter_modules(model) if path}
    # By the class that defines it, not by getattr: a class is itself callable, and a method may be inherited.
    defined = {
        cls: next((base.__dict__["__call__"] for base in cls.__mro__ if "__call__" in base.__dict__), None)
        for cls in classes
    }

    def recording(original: Any) -> Any:
        def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            returned = original(self, *args, **kwargs)
            self.sow(nnx.Intermediate, "__given__", _floating(jax.tree.leaves((args, list(kwargs.values())))))
            self.sow(nnx.Intermediate, "__returned__", _floating(jax.tree.leaves(returned)))
            return returned

        return call

    wrapped = {cls: recording(original) for cls, original in defined.items() if original is not None}
    own = {cls: cls.__dict__.get("__call__") for cls in wrapped}
    try:
        for cls, call in wrapped.items():
            setattr(cls, "__call__", call)  # noqa: B010
        yield
    finally:
        for cls, original in own.items():
            if original is None:
                delattr(cls, "__call__")
            else:
                setattr(cls, "__call__", original)  # noqa: B010


def _floating(leaves: Iterable[Any]) -> tuple[jax.Array, ...]:
    return tuple(x for x in leaves if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.numpy.floating))


def _tensors(value: Any) -> list[torch.Tensor]:
    """Floating-point tensors anywhere in tuples, lists, dicts and dataclasses, in the order of jax.tree.leaves."""
    if isinstance(value, torch.Tensor):
        return [value.detach()] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        return [tensor for key in sorted(value) for tensor in _tensors(value[key])]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    if dataclasses.is_dataclass(value):
        return [tensor for field in dataclasses.fields(value) for tensor in _tensors(getattr(value, field.name))]
    return []


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def _calls_of(calls: Mapping[str, Any], kind: str) -> dict[str, Sequence[Sequence[np.ndarray]]]:
    return {name.removesuffix("." + kind): value for name, value in calls.items() if name.endswith("." + kind)}


def _named(calls: Mapping[str, Sequence[Sequence[np.ndarray]]]) -> dict[str, np.ndarray]:
    named = {}
    for name, every in calls.items():
        for number, arrays in enumerate(every, start=1):
            for i, array in enumerate(arrays):
                suffix = f"[{i}]" if len(arrays) > 1 else ""
                named[_numbered(name, number) + suffix] = array
    return named


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}#{number}"
