"""Dropout masks of nnx.Dropout modules: handed in, or drawn by flax itself and kept."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from parity.capture_flax_calls import PATH, is_floating, replace_method, sown
from parity.rungs import NotComparedError
from parity.trace import numbered

MASK = "dropout mask"


@contextlib.contextmanager
def handed_to(model: nnx.Module, masks: Mapping[str, jax.Array]) -> Iterator[None]:
    """Each Dropout module returns x * mask / (1 - rate) with the mask of its site: its path, `#2` for a second call.

    Inside `nnx.capture` only. Raises ValueError for a site without a mask, for a mask of another shape, and for masks
    that nobody asked for; NotComparedError where random numbers are drawn outside of Dropout modules.
    """
    used: set[str] = set()

    def apply(module: nnx.Dropout, site: str, x: jax.Array, native: Callable[[Any], Any]) -> jax.Array:
        if site not in masks:
            raise ValueError(f"expected a dropout mask for {site}, got masks for {sorted(masks) or 'nothing'}")
        used.add(site)
        if masks[site].shape != x.shape:
            raise ValueError(f"{site}: expected a dropout mask of shape {x.shape}, got {masks[site].shape}")
        # Sown for the count alone.
        module.sow(nnx.Intermediate, MASK, jnp.zeros((), bool))
        kept = jnp.zeros_like(x) if module.rate == 1.0 else x / (1.0 - module.rate)
        return jnp.where(masks[site], kept, jnp.zeros_like(x))

    def refuse(stream: Any) -> None:
        raise NotComparedError(
            "the port draws random numbers outside of nnx.Dropout modules: no mask can be handed in unless its side "
            "brings draw_dropout and call_with_dropout"
        )

    undo = replace_method(nnx.RngStream, "__call__", refuse)
    try:
        with _replaced(model, apply):
            yield
    finally:
        undo()
    unused = sorted(masks.keys() - used)
    if unused:
        raise ValueError(f"expected masks for the port's dropout alone, got some for {unused}")


@contextlib.contextmanager
def drawn(model: nnx.Module) -> Iterator[None]:
    """Sows the keep masks that flax itself draws while the module runs in training mode. Inside `nnx.capture` only."""

    def apply(module: nnx.Dropout, site: str, x: jax.Array, native: Callable[[Any], Any]) -> jax.Array:
        # Of ones, because where x is 0 the result does not show whether it was kept.
        scale = native(jnp.ones_like(x))
        module.sow(nnx.Intermediate, MASK, scale != 0)
        return x * scale

    with _replaced(model, apply):
        yield


def masks_of(model: nnx.Module, state: Any) -> dict[str, jax.Array]:
    """Site -> mask, out of what `nnx.capture` collected."""
    paths = {path: getattr(module, PATH) for path, module in nnx.iter_modules(model)}
    return {
        numbered(paths[tuple(path[:-1])], number): mask
        for path, variable in nnx.to_flat_state(state)
        if path[-1] == MASK
        for number, mask in enumerate(variable.get_value(), start=1)
    }


@contextlib.contextmanager
def _replaced(
    model: nnx.Module, apply: Callable[[Any, str, jax.Array, Callable[[Any], Any]], jax.Array]
) -> Iterator[None]:
    originals = {
        cls: cls.__call__ for cls in {type(m) for _, m in nnx.iter_modules(model)} if issubclass(cls, nnx.Dropout)
    }
    undo = [replace_method(cls, "__call__", _call(original, apply)) for cls, original in originals.items()]
    try:
        yield
    finally:
        for action in undo:
            action()


def _call(original: Any, apply: Any) -> Any:
    def call(module: nnx.Dropout, inputs: Any, *args: Any, deterministic: bool | None = None, **kwargs: Any) -> Any:
        off = module.deterministic if deterministic is None else deterministic
        path = getattr(module, PATH, None)
        if path is None or off or module.rate == 0.0 or not is_floating(inputs):
            return original(module, inputs, *args, deterministic=deterministic, **kwargs)
        site = numbered(path, 1 + sown(module, MASK))
        return apply(module, site, inputs, lambda x: original(module, x, *args, deterministic=False, **kwargs))

    return call
