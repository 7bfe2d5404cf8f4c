"""Faults of decoding, and of how a program is run: what only the eager, the watched or the half-width run shows."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from parity.mutations.planting import Kind, Method, class_is, in_method, in_side

DECODER_LAYER = class_is("DecoderLayer")
DECODED_LEN = 12
"""Positions that the pair's decoder has room for; no batch is as long."""
DECODING = "decode"
"""A decoder is judged by the ids it gives: no module of it is named, the part of the pair is."""


def _ids(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Other ids given."""

    def make(original: Any) -> Any:
        def decode(module: Any, inputs: Mapping[str, Any]) -> Any:
            decoded = original(module, inputs)
            return {**decoded, "ids": change(decoded["ids"])} if isinstance(decoded, Mapping) else change(decoded)

        return decode

    return make


def _no_end(module: Any, original: Any, inputs: Mapping[str, Any]) -> Any:
    module.config = module.config.replace(eos_id=module.config.pad_id)
    return original(module, inputs)


def _of_other_source(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda original: lambda module, inputs: original(module, {**inputs, "src": change(inputs["src"])})


def _cache_position(original: Method) -> Method:
    def step(self: Any, x: Any, cache: Any, *, slot: Any, **kwargs: Any) -> Any:
        return original(self, x, cache, slot=jnp.maximum(slot - x.shape[1], 0), **kwargs)

    return step


def _sees_empty_places(original: Method) -> Method:
    def step(self: Any, x: Any, cache: Any, *, allowed: Any, **kwargs: Any) -> Any:
        return original(self, x, cache, allowed=jnp.ones_like(allowed), **kwargs)

    return step


def _sees_other_beams(original: Method) -> Method:
    def step(self: Any, x: Any, cache: Any, *, allowed: Any, **kwargs: Any) -> Any:
        return original(self, x, cache, allowed=allowed.any(axis=2, keepdims=True), **kwargs)

    return step


def _sees_padding(original: Method) -> Method:
    def step(self: Any, x: Any, cache: Any, *, memory_allowed: Any, **kwargs: Any) -> Any:
        return original(self, x, cache, memory_allowed=jnp.ones_like(memory_allowed), **kwargs)

    return step


def _position_late(original: Method) -> Method:
    """In decoding, whose length is fixed, a token stands one position too far."""
    return lambda self, length: original(self, length + 1)[1:] if length == DECODED_LEN else original(self, length)


def _only_eager(original: Method) -> Method:
    """Right under jit, where the values are not known; wrong without."""

    def call(self: Any, x: Any) -> Any:
        y = original(self, x)
        return y if isinstance(x, jax.core.Tracer) else y * (1 + 1e-6)

    return call


def _only_unwatched(original: Method) -> Method:
    """Right while a run is recorded, wrong in the program that users run."""

    def call(self: Any, x: Any) -> Any:
        unwatched = getattr(type(self).__dict__.get("__call__"), "planted", False)
        return original(self, x) * (1 + 1e-6 * unwatched)

    call.planted = True  # type: ignore[attr-defined]
    return call


def _of_neighbours(original: Method) -> Method:
    """A row that is alone gives something else, as of a mean over the batch that one device sees."""
    return lambda self, x: original(self, x) * (1 + 1e-6 * (x.shape[0] == 1))


def _step(name: str, description: str, make: Callable[[Method], Method]) -> Kind:
    return in_method(name, description, DECODER_LAYER, make, method="step", rungs=("decoding",))


NORM = class_is("LayerNorm")

KINDS: tuple[Kind, ...] = (
    in_side("decoded ids shifted", "begin of sentence is given too", DECODING, _ids(lambda ids: jnp.roll(ids, 1, 1))),
    in_side("last id lost", "one step too few", DECODING, _ids(lambda ids: ids.at[:, -1].set(0))),
    in_side("end of sentence ignored", "decoding goes on", DECODING, lambda o: lambda m, i: _no_end(m, o, i)),
    in_side("source read backwards", "as some models are trained", DECODING, _of_other_source(lambda s: s[:, ::-1])),
    _step("cache written one place early", "the newest overwrites the one before", _cache_position),
    _step("cache read too far", "empty places are attended to", _sees_empty_places),
    _step("other beams read", "a beam reads what others have written at earlier positions", _sees_other_beams),
    _step("padding of the source decoded", "the memory's mask is not used", _sees_padding),
    in_method(
        "decoding position late",
        "the first token stands at position 1",
        lambda path, module: class_is("Positions")(path, module) and path.startswith("tgt"),
        _position_late,
        rungs=("decoding",),
    ),
    in_method("wrong without jit", "a branch on whether values are known", NORM, _only_eager),
    in_method("wrong unless watched", "another program when nobody looks", NORM, _only_unwatched, cases=("P24",)),
    in_method("depends on the batch", "on how many rows a device has", NORM, _of_neighbours, cases=("P7",)),
)
