"""Faults of multi-head attention: scale, softmax, heads, masks."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from parity.mutations.planting import Kind, Method, class_is, in_method, wide

ATTENTION = class_is("MultiHeadAttention")


def _own(path: str, module: Any) -> bool:
    return ATTENTION(path, module) and path.endswith("self_attn")


def _causal(path: str, module: Any) -> bool:
    return _own(path, module) and path.startswith("decoder")


def _cross(path: str, module: Any) -> bool:
    return ATTENTION(path, module) and path.endswith("cross_attn")


def _windowed(path: str, module: Any) -> bool:
    return _own(path, module)


def _scaled_query(factor: Callable[[Any, int], float]) -> Callable[[Method], Method]:
    """The scores multiplied by `factor(module, head_dim)`."""

    def make(original: Method) -> Method:
        def attend(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, query * factor(self, query.shape[-1]), *args, **kwargs)

        return attend

    return make


def _with_mask(change: Callable[[Any], Any]) -> Callable[[Method], Method]:
    """Another mask handed to the attention itself."""

    def make(original: Method) -> Method:
        def attend(self: Any, query: Any, key_value: Any, *, mask: Any, **kwargs: Any) -> Any:
            return original(self, query, key_value, mask=change(mask), **kwargs)

        return attend

    return make


def _dense(mask: Any, query: Any, key: Any) -> Any:
    return mask.allowed(jnp.arange(query.shape[2]), jnp.arange(key.shape[2]))


def _weighted(weigh: Callable[[Any, Any, Any], Any]) -> Callable[[Method], Method]:
    """Attention by `weigh(scores, mask, allowed)`, without dropout."""

    def make(original: Method) -> Method:
        def attend(self: Any, query: Any, key_value: Any, *, mask: Any, **kwargs: Any) -> Any:
            key, value = key_value
            scores = wide(jnp.einsum("bhqd,bhkd->bhqk", query, key)) / math.sqrt(query.shape[-1])
            weights = weigh(scores, mask, _dense(mask, query, key)).astype(value.dtype)
            output = jnp.einsum("bhqk,bhkd->bhqd", weights, value)
            return original(self, query, key_value, mask=mask, **kwargs)._replace(output=output)

        return attend

    return make


def _softmax(scores: Any, allowed: Any, *, axis: int = -1) -> Any:
    weights = jax.nn.softmax(jnp.where(allowed, scores, jnp.finfo(scores.dtype).min), axis=axis)
    return jnp.where(allowed, weights, 0.0)


def _for_rows(scores: Any, mask: Any, allowed: Any) -> Any:
    """The padding mask on query rows, as `mask[:, :, None]` where `mask[:, None, :]` is meant."""
    structure = dataclasses.replace(mask, keys=None).allowed(jnp.arange(scores.shape[-2]), jnp.arange(scores.shape[-1]))
    return _softmax(scores, structure & mask.keys[:, None, :, None])


def _in_float32(scores: Any, mask: Any, allowed: Any) -> Any:
    return _softmax(scores.astype(jnp.float32), allowed).astype(scores.dtype)


def _later(mask: Any, *, by: int) -> Any:
    """The mask as it is for queries `by` positions later."""

    @dataclasses.dataclass(frozen=True)
    class Later:
        def allowed(self, queries: Any, keys: Any) -> Any:
            return mask.allowed(queries + by, keys)

    return Later()


def _fully_masked(fill: Callable[[Any], Any]) -> Callable[[Method], Method]:
    """Rows in which every key is masked give `fill(values)`; the others what they should."""

    def make(original: Method) -> Method:
        def attend(self: Any, query: Any, key_value: Any, *, mask: Any, **kwargs: Any) -> Any:
            attended = original(self, query, key_value, mask=mask, **kwargs)
            any_key = _dense(mask, query, key_value[0]).any(axis=-1)[..., None]
            return attended._replace(output=jnp.where(any_key, attended.output, fill(key_value[1])))

        return attend

    return make


def _half_width_softmax(original: Method) -> Method:
    wrong = _weighted(lambda scores, mask, allowed: _softmax(scores.astype(jnp.bfloat16), allowed))(original)

    def attend(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return (wrong if query.dtype == jnp.bfloat16 else original)(self, query, *args, **kwargs)

    return attend


def _other_heads(original: Method) -> Method:
    def split_heads(self: Any, x: Any) -> Any:
        batch, length, _ = x.shape
        return jnp.transpose(x.reshape(batch, length, -1, self.num_heads), (0, 3, 1, 2))

    return split_heads


def _not_put_back(original: Method) -> Method:
    def merge_heads(self: Any, x: Any) -> Any:
        batch, _heads, length, _ = x.shape
        return x.reshape(batch, length, -1)

    return merge_heads


def _exchanged(original: Method) -> Method:
    def key_value(self: Any, keys: Any) -> Any:
        found = original(self, keys)
        return type(found)(found[1], found[0])

    return key_value


def _attend(
    name: str, description: str, make: Callable[[Method], Method], *, wanted: Any = ATTENTION, **f: Any
) -> Kind:
    return in_method(name, description, wanted, make, method="attend", **f)


KINDS: tuple[Kind, ...] = (
    _attend("scores not scaled", "no division by √d_k", _scaled_query(lambda m, d: math.sqrt(d))),
    _attend(
        "scores scaled by d_model",
        "divided by √d_model",
        _scaled_query(lambda m, d: 1 / math.sqrt(m.num_heads)),
    ),
    _attend("scores scaled twice", "divided by d_k", _scaled_query(lambda m, d: 1 / math.sqrt(d))),
    _attend("softmax over the wrong axis", "over queries", _weighted(lambda s, m, a: _softmax(s, a, axis=-2))),
    _attend("softmax in float32", "in a float64 run too", _weighted(_in_float32), cases=("P6",)),
    _attend(
        "softmax in bfloat16",
        "not widened in a bfloat16 run",
        _half_width_softmax,
        cases=("P6",),
        beyond="over so few keys it adds no more than the rounding of the weights, which a right port has too",
    ),
    _attend("mask inverted", "True taken for forbidden", _weighted(lambda s, m, a: _softmax(s, ~a)), cases=("P15",)),
    _attend("mask left out", "every key is attended to", _weighted(lambda s, m, a: jax.nn.softmax(s, axis=-1))),
    _attend(
        "masked scores times 0",
        "scores are multiplied by the mask",
        _weighted(lambda s, m, a: jax.nn.softmax(s * a, axis=-1)),
        cases=("P15",),
    ),
    _attend(
        "mask fill too small",
        "-10 is added where masked",
        _weighted(lambda s, m, a: jax.nn.softmax(jnp.where(a, s, s - 10.0), axis=-1)),
        cases=("P17",),
    ),
    _attend(
        "padding mask left out",
        "padding is attended to",
        _with_mask(lambda mask: dataclasses.replace(mask, keys=None)),
        cases=("P15",),
    ),
    _attend(
        "padding mask on query rows",
        "rows of padding are masked, not its columns",
        _weighted(_for_rows),
        wanted=_own,
        cases=("P16",),
    ),
    _attend(
        "causal mask left out",
        "the decoder sees what follows",
        _with_mask(lambda mask: dataclasses.replace(mask, causal=False)),
        wanted=_causal,
    ),
    _attend(
        "causal mask strict",
        "a position does not see itself",
        _with_mask(lambda mask: _later(mask, by=-1)),
        wanted=_causal,
    ),
    _attend(
        "causal mask one too far",
        "a position sees the next",
        _with_mask(lambda mask: _later(mask, by=1)),
        wanted=_causal,
    ),
    _attend(
        "fully masked rows uniform",
        "the mean of the values",
        _fully_masked(lambda value: value.mean(axis=2, keepdims=True)),
        cases=("P17",),
    ),
    _attend("fully masked rows NaN", "0/0", _fully_masked(lambda value: jnp.full((), jnp.nan)), cases=("P17",)),
    _attend(
        "window one too wide",
        "one more position to either side",
        _with_mask(lambda mask: dataclasses.replace(mask, window=mask.window + 1)),
        wanted=_windowed,
        base="blockwise",
    ),
    _attend(
        "window one too narrow",
        "one position less to either side",
        _with_mask(lambda mask: dataclasses.replace(mask, window=max(0, mask.window - 1))),
        wanted=_windowed,
        base="blockwise",
    ),
    in_method("heads split in the other order", "(d_k, heads)", ATTENTION, _other_heads, method="split_heads"),
    in_method("heads not put back", "reshaped, not transposed", ATTENTION, _not_put_back, method="merge_heads"),
    in_method(
        "keys and values exchanged",
        "k where v is meant",
        ATTENTION,
        _exchanged,
        method="key_value",
        cases=("P4",),
    ),
)
