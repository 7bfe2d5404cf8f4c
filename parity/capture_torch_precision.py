"""Watches a float64 run of torch for the places where float32, or less, enters it, and follows what comes of it."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MOVES = frozenset(
    name
    for names in (
        (
            "embedding",
            "index",
            "index_select",
            "gather",
            "view",
            "_unsafe_view",
            "reshape",
            "transpose",
            "t",
            "permute",
        ),
        ("expand", "slice", "select", "cat", "stack", "clone", "detach", "unsqueeze", "squeeze", "alias", "copy_"),
        ("copy", "where", "masked_fill", "masked_fill_", "split", "split_with_sizes", "unbind", "as_strided", "narrow"),
        ("flip", "lift_fresh", "roll", "repeat", "unfold", "diagonal", "tril", "triu", "constant_pad_nd", "neg"),
        ("_to_copy",),
    )
    for name in names
)
"""Operations that compute nothing: what comes out is as exact as what went in."""


class PrecisionWatch(TorchDispatchMode):
    """A cast to a narrower type, a computation in one, or a table held in one: named, with the module it happened in.

    Values that a narrower type holds exactly (masks, counts, powers of two) and the model's own weights, which both
    sides are given as float32, lose nothing and do not count.
    """

    def __init__(self, module: torch.nn.Module, current: Callable[[], str]):
        super().__init__()
        self._current = current
        tensors = (*module.parameters(), *module.buffers())
        # Storages are kept, so that their addresses are not given to others.
        self._exact = {_key(t): t.untyped_storage() for t in tensors if t.dtype != torch.float64}
        self._narrow: dict[int, tuple[Any, str]] = {}

    def of(self, tensor: torch.Tensor) -> str | None:
        """Where float32 entered this tensor; None if it did not."""
        found = self._narrow.get(_key(tensor))
        return found[1] if found else None

    def of_each(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Those of the tensors that float32 entered."""
        return {name: where for name, tensor in tensors.items() if (where := self.of(tensor)) is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, then looks at what it did."""
        outputs = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if _is_floating(t)]
        computed = [t for t in tree_leaves(outputs) if _is_floating(t)]
        if func._schema.is_mutable:
            computed += [t for t in given if any(t is x for x in args[:1])]
        where = next((found for t in given if (found := self.of(t)) is not None), None)
        if where is None:
            where = self._enters(func, given, computed)
        if where is not None:
            self._narrow |= {_key(t): (t.untyped_storage(), where) for t in computed}
        return outputs

    def _enters(self, func: Any, given: list[torch.Tensor], computed: list[torch.Tensor]) -> str | None:
        narrow = [t for t in computed if t.dtype != torch.float64]
        held = [t for t in given if t.dtype != torch.float64 and _key(t) not in self._exact]
        widened = any(t.dtype == torch.float64 for t in computed) and held and not all(map(_is_simple, held))
        if widened:
            return self._place()
        if not narrow:
            return None
        name = func._schema.name.partition("::")[2]
        cast_down = any(t.dtype == torch.float64 for t in given)
        if name in _MOVES and not cast_down:
            if given and not held:  # moved weights
                self._exact |= {_key(t): t.untyped_storage() for t in narrow}
            return None
        if not given and all(map(_is_simple, narrow)):
            return None
        return None if all(map(_is_simple, narrow)) else self._place()

    def _place(self) -> str:
        line = _line_of_the_model()
        return self._current() + (f" at {line}" if line else "")


def _line_of_the_model() -> str:
    """file:line of the innermost frame that is neither torch's nor the harness's."""
    frame = sys._getframe()
    here = Path(__file__).name
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and path.name != here and not path.name.startswith("<"):
            own = path.name.startswith("capture_torch")
            return "" if own else f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whole numbers, infinities and numbers of at most 8 bits: none of them shows that anything was rounded."""
    wide = tensor.detach().double()
    return bool(((wide == wide.bfloat16().double()) | (wide == wide.round()) | ~wide.isfinite()).all())
