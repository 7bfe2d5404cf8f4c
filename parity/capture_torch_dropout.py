"""Dropout masks of torch.nn.Dropout modules: handed in, or drawn by torch itself and kept."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.nn import functional

from parity.rungs import NotComparedError
from parity.trace import numbered

_ELEMENTWISE = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d)
_FUNCTIONS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
    "scaled_dot_product_attention",
)


@contextlib.contextmanager
def handed_to(module: torch.nn.Module, masks: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Each Dropout module returns x * mask / (1 - rate) with the mask of its site: its path, `#2` for a second call.

    Raises ValueError for a site without a mask, for a mask of another shape, and for masks that nobody asked for.
    """
    used: set[str] = set()

    def apply(site: str, called: torch.nn.Module, x: torch.Tensor, native: Callable[..., Any]) -> torch.Tensor:
        if site not in masks:
            raise ValueError(f"expected a dropout mask for {site}, got masks for {sorted(masks) or 'nothing'}")
        used.add(site)
        if masks[site].shape != x.shape:
            expected, got = tuple(x.shape), tuple(masks[site].shape)
            raise ValueError(f"{site}: expected a dropout mask of shape {expected}, got {got}")
        rate = float(called.p)  # type: ignore[arg-type]
        kept = x.new_zeros(()) if rate == 1.0 else x / (1.0 - rate)
        return torch.where(masks[site], kept, x.new_zeros(()))

    with _replaced(module, apply):
        yield
    unused = sorted(masks.keys() - used)
    if unused:
        raise ValueError(f"expected masks for the reference's dropout alone, got some for {unused}")


@contextlib.contextmanager
def drawn(module: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Gives the keep masks by site, as torch itself draws them while the module runs in training mode."""
    masks: dict[str, torch.Tensor] = {}

    def apply(site: str, called: torch.nn.Module, x: torch.Tensor, native: Callable[..., Any]) -> torch.Tensor:
        # Of ones, because where x is 0 the result does not show whether it was kept.
        scale = native(torch.ones_like(x))
        masks[site] = scale != 0
        return x * scale

    with _replaced(module, apply):
        yield masks


@contextlib.contextmanager
def _replaced(
    module: torch.nn.Module, apply: Callable[[str, torch.nn.Module, torch.Tensor, Callable[..., Any]], torch.Tensor]
) -> Iterator[None]:
    """Dropout modules call `apply`; dropout outside of them, for which no mask can be handed in, is refused."""
    inside = [False]
    calls: Counter[str] = Counter()
    undo: list[Callable[[], Any]] = []
    try:
        for path, called in module.named_modules():
            if isinstance(called, torch.nn.RNNBase) and called.dropout > 0:
                _refuse(path or "the model itself")
            if not isinstance(called, torch.nn.modules.dropout._DropoutNd) or called.p == 0.0:
                continue
            if not isinstance(called, _ELEMENTWISE):
                _refuse(f"{path}, a {type(called).__name__},")
            vars(called)["forward"] = _forward(path, called, called.forward, apply, calls, inside)
            undo.append(lambda called=called: vars(called).pop("forward"))  # type: ignore[misc, attr-defined]
        for name in _FUNCTIONS:
            undo.append(_guard(name, inside))
        yield
    finally:
        for action in undo:
            action()


def _forward(
    path: str, called: torch.nn.Module, native: Any, apply: Any, calls: Counter[str], inside: list[bool]
) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if not called.training:
            return x
        calls[path] += 1
        inside[0] = True
        try:
            return apply(numbered(path, calls[path]), called, x, native)
        finally:
            inside[0] = False

    return forward


def _guard(name: str, inside: list[bool]) -> Callable[[], None]:
    """Replaces a function of torch.nn.functional by one that refuses to drop out; gives the way back."""
    original = getattr(functional, name)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not inside[0] and _drops(name, args, kwargs):
            _refuse(f"torch.nn.functional.{name}")
        return original(*args, **kwargs)

    setattr(functional, name, guarded)
    return lambda: setattr(functional, name, original)


def _drops(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if name == "scaled_dot_product_attention":
        return float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)) > 0
    rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", args[2] if len(args) > 2 else "alpha" not in name)
    return bool(training) and rate > 0


def _refuse(where: str) -> NoReturn:
    raise NotComparedError(
        f"{where} drops out outside of torch.nn.Dropout modules: no mask can be handed in unless the reference's side "
        "brings draw_dropout and call_with_dropout"
    )
