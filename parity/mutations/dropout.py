"""Faults of dropout: rates, sites, scales, masks."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from parity.mutations.planting import Kind, Method, class_is, in_method, in_modules, in_side, with_side
from parity.pair import Pair

LAYER = class_is("EncoderLayer", "DecoderLayer")


class Tampered:
    """A source of dropout masks whose masks are changed on their way."""

    def __init__(self, source: Any, change: Callable[[Any], Any]):
        self.source, self.change = source, change

    def at(self, name: str) -> "Tampered":
        """The source for a part."""
        return Tampered(self.source.at(name), self.change)

    def for_rows(self, rows: Any) -> "Tampered":
        """The changed source for other rows."""
        return Tampered(self.source.for_rows(rows), self.change)

    def keep(self, shape: tuple[int, ...], *, rate: float) -> Any:
        """The changed mask."""
        keep = self.source.keep(shape, rate=rate)
        return None if keep is None else self.change(keep)

    def keep_tile(self, *args: Any, **kwargs: Any) -> Any:
        """The changed tile."""
        keep = self.source.keep_tile(*args, **kwargs)
        return None if keep is None else self.change(keep)


def _tampered_after(change: Callable[[Any], Any]) -> Callable[[Method], Method]:
    def make(original: Method) -> Method:
        def after(self: Any, norm: Any, x: Any, sublayer: Any, *dropout: Any) -> Any:
            return original(self, norm, x, sublayer, *(Tampered(source, change) for source in dropout))

        return after

    return make


def _is_active(dropout: tuple[Any, ...]) -> bool:
    return bool(dropout) and type(dropout[0]).__name__ != "NoDropout"


def _not_scaled(original: Method) -> Method:
    def after(self: Any, norm: Any, x: Any, sublayer: Any, *dropout: Any) -> Any:
        return original(self, norm, x, sublayer * (1.0 - self.rate) if _is_active(dropout) else sublayer, *dropout)

    return after


def _left_out(original: Method) -> Method:
    return lambda self, norm, x, sublayer, *dropout: original(self, norm, x, sublayer)


def _in_evaluation(original: Method) -> Method:
    """Dropout that does not know that training is over."""

    def after(self: Any, norm: Any, x: Any, sublayer: Any, *dropout: Any) -> Any:
        if not _is_active(dropout):
            keep = jax.random.bernoulli(jax.random.key(0), 1.0 - self.rate, sublayer.shape)
            sublayer = jnp.where(keep, sublayer / (1.0 - self.rate), 0.0).astype(sublayer.dtype)
        return original(self, norm, x, sublayer, *dropout)

    return after


def _on_the_sum(original: Method) -> Method:
    """Dropout of x + sublayer, where only the sublayer is to be dropped out."""

    def after(self: Any, norm: Any, x: Any, sublayer: Any, *dropout: Any) -> Any:
        return original(self, norm, jnp.zeros_like(x), x + sublayer, *dropout)

    return lambda self, norm, x, sublayer, *dropout: (
        after(self, norm, x, sublayer, *dropout) if _is_active(dropout) else original(self, norm, x, sublayer, *dropout)
    )


def _rate_doubled(layer: Any) -> None:
    layer.rate = 2 * layer.rate


def _before_softmax(original: Method) -> Method:
    """No dropout on attention weights."""

    def attend(self: Any, *args: Any, dropout: Any = None, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    return attend


def _every_other_site(original: Any) -> Any:
    """Masks handed in under each other's names, where they fit."""

    def call(module: Any, inputs: Any, masks: Any) -> Any:
        names = list(masks)
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            by_shape.setdefault(tuple(masks[name].shape), []).append(name)
        moved: dict[str, Any] = {}
        for alike in by_shape.values():
            moved |= dict(zip(alike, (masks[name] for name in [*alike[1:], alike[0]]), strict=True))
        return original(module, inputs, moved)

    return call


def _for_all_rows(masks: Mapping[str, Any], site: str) -> Any:
    return jnp.broadcast_to(masks[site][:1], masks[site].shape)


def _of_another_site(masks: Mapping[str, Any], site: str) -> Any:
    alike = [name for name, mask in masks.items() if name != site and mask.shape == masks[site].shape]
    return masks[alike[0]]


def _drawn(name: str, description: str, change: Callable[[Mapping[str, Any], str], Any], **fields: Any) -> Kind:
    """Another mask drawn at one site by the port's own dropout; masks handed in are not touched."""

    def places(pair: Pair) -> list[str]:
        if pair.port.draw_dropout is None or pair.port.dropout_rates is None:
            return []
        return list(pair.port.dropout_rates(pair.port.module("float32"), pair.batches(seed=0)[0]))

    def plant(pair: Pair, place: str) -> Pair:
        original = pair.port.draw_dropout

        def draw(module: Any, inputs: Mapping[str, Any], seed: int) -> dict[str, Any]:
            masks = dict(original(module, inputs, seed))
            return masks | {place: change(masks, place)}

        return with_side(pair, draw_dropout=draw)

    return Kind(name=name, description=description, places=places, plant=plant, **fields)


def _after(name: str, description: str, make: Callable[[Method], Method], **fields: Any) -> Kind:
    return in_method(name, description, LAYER, make, method="after", **fields)


KINDS: tuple[Kind, ...] = (
    in_modules("dropout rate doubled", "0.2 for 0.1", LAYER, _rate_doubled),
    _after("dropout not scaled", "no division by 1 - rate", _not_scaled),
    _after("dropout left out", "of the sublayer's output", _left_out),
    _after("dropout in evaluation", "never switched off", _in_evaluation),
    _after("dropout of the sum", "x is dropped out too", _on_the_sum),
    _after("dropout mask inverted", "keeps what should go", _tampered_after(lambda keep: ~keep)),
    _drawn("dropout mask for the whole batch", "every row the same", _for_all_rows, cases=("P21",)),
    _drawn("dropout key not folded", "the same mask as at another site", _of_another_site),
    in_method(
        "attention dropout left out",
        "weights are not dropped out",
        class_is("MultiHeadAttention"),
        _before_softmax,
        method="attend",
    ),
    in_side(
        "dropout masks exchanged",
        "one site's for another's",
        "call_with_dropout",
        _every_other_site,
        rungs=("dropout",),
    ),
)
