"""Records every call of the submodules of a torch.nn.Module, through `forward` and through other public methods."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from parity.trace import Call, Named, in_signature_order, leaves, method_of, positions


class CallRecorder:
    """What every submodule is given and returns, in the order in which calls end."""

    def __init__(self, root: torch.nn.Module):
        self.root = root
        self.calls: list[Call] = []
        self.watch: Any = None
        self._open: list[tuple[str, Named, Named]] = []

    def current(self) -> str:
        """Path of the module that is running."""
        return self._open[-1][0].partition(":")[0] if self._open else ""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Hooks for `forward`, which torch calls; wrapped methods otherwise, for which torch has no hooks."""
        undo: list[Callable[[], Any]] = []
        try:
            for path, module in self.root.named_modules():
                if path:
                    before = module.register_forward_pre_hook(self._on_start(path), with_kwargs=True, prepend=True)
                    after = module.register_forward_hook(self._on_end)
                    undo += [before.remove, after.remove]
                for method in _public_methods(type(module)):
                    if method not in vars(module):
                        vars(module)[method] = self._wrapped(f"{path}:{method}", getattr(module, method))
                        undo.append(lambda module=module, method=method: vars(module).pop(method))  # type: ignore[misc, attr-defined]
            yield
        finally:
            for action in undo:
                action()

    def _on_start(self, path: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            self._start(path, module.forward, args, kwargs)

        return hook

    def _on_end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._end(output)

    def _wrapped(self, name: str, original: Any) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            self._start(name, original, args, kwargs)
            output = original(*args, **kwargs)
            self._end(output)
            return output

        return method

    def _start(self, name: str, function: Any, args: Any, kwargs: Any) -> None:
        # Before the call, and as copies: a module may change what it is given in place.
        given = in_signature_order(function, args, kwargs)
        self._open.append((name, _copies(positions(given, is_floating)), _copies(positions(given, _is_discrete))))

    def _end(self, output: Any) -> None:
        name, given, given_ids = self._open.pop()
        tensors = leaves(output, is_floating)
        if not tensors and method_of(name):
            return  # a method that computes no values
        narrow = tuple(self.watch.of(tensor) for _, tensor in tensors) if self.watch is not None else ()
        self.calls.append(Call(name=name, given=given, given_ids=given_ids, returned=_copies(tensors), narrow=narrow))


def _public_methods(cls: type) -> list[str]:
    """Of the classes that are not torch's own."""
    found = []
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "torch" or base is object:
            continue
        for name, function in vars(base).items():
            if inspect.isfunction(function) and not name.startswith("_") and not hasattr(torch.nn.Module, name):
                found.append(name)
    return [name for name in dict.fromkeys(found) if name != "forward"]


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """On the host; bfloat16 as float32, which holds it exactly."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def is_floating(value: Any) -> bool:
    """A tensor of floating-point numbers."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_discrete(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _copies(tensors: Named) -> Named:
    return [(suffix, to_numpy(tensor).copy()) for suffix, tensor in tensors]
