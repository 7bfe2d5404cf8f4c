"""Faults of convolutions, their norms, recurrent cells, rotary attention and fused projections."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from parity.mutations.layers import THE_MODEL
from parity.mutations.planting import Kind, Method, class_is, in_method, in_modules


def _in(base: str, *classes: str) -> Callable[..., Kind]:
    def kind(name: str, description: str, make: Callable[[Method], Method], method: str, **fields: Any) -> Kind:
        return in_method(name, description, class_is(*classes), make, method=method, base=base, **fields)

    return kind


_convolution = _in("convolutional", "Convolution")
_batch_norm = _in("convolutional", "ChannelNorm")
_lstm, _gru = _in("recurrent", "LSTMCell"), _in("recurrent", "GRUCell")
_rotary, _gated = _in("decoder-only", "Rotary"), _in("decoder-only", "Gated")


def _set(**values: Any) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        for name, value in values.items():
            setattr(module, name, value)

    return change


def _flipped(original: Method) -> Method:
    return lambda self, x, kernel: original(self, x, kernel[..., ::-1, ::-1])


def _height_for_width(original: Method) -> Method:
    return lambda self, x, kernel: original(self, x, jnp.swapaxes(kernel, -1, -2))


def _other_groups(original: Method) -> Method:
    def normalise(self: Any, x: Any) -> Any:
        order = jnp.arange(x.shape[1]).reshape(-1, self.groups).T.reshape(-1)
        back = jnp.argsort(order)
        plain = original(self, x[:, order])
        # Scale and shift are put back to their own channels.
        normalised = (plain - self.bias[...][:, None, None]) / self.weight[...][:, None, None]
        return normalised[:, back] * self.weight[...][:, None, None] + self.bias[...][:, None, None]

    return normalise


def _batch_statistics(original: Method) -> Method:
    def call(self: Any, x: Any) -> Any:
        original(self, x)
        return self.normalised(x, x.mean(axis=(0, 2, 3)), x.var(axis=(0, 2, 3)))

    return call


def _statistics_trained(module: Any) -> None:
    module.running_mean = nnx.Param(module.running_mean.get_value())


def _padding_not_counted(original: Method) -> Method:
    return lambda self, x: self.summed(x) / self.summed(jnp.ones_like(x))


def _channels_last(original: Method) -> Method:
    return lambda self, x: original(self, jnp.moveaxis(x, 1, -1))


def _gates(*order: int) -> Callable[[Method], Method]:
    def make(original: Method) -> Method:
        def gates(self: Any, summed: Any) -> list[Any]:
            found = original(self, summed)
            return [found[i] for i in order]

        return gates

    return make


def _forget_more(original: Method) -> Method:
    def gates(self: Any, summed: Any) -> list[Any]:
        i, f, g, o = original(self, summed)
        return [i, f + 1.0, g, o]

    return gates


def _no_state_bias(original: Method) -> Method:
    return lambda self, hidden: original(self, hidden) - self.bias_hh[...]


def _reset_before(original: Method) -> Method:
    def call(self: Any, x: Any, state: Any) -> Any:
        r, z, n = self.gates(self.of_input(x))
        hr, hz, _ = self.gates(self.of_state(state))
        _, _, hn = self.gates(self.of_state(jax.nn.sigmoid(r + hr) * state))
        update = jax.nn.sigmoid(z + hz)
        return (1 - update) * jnp.tanh(n + hn) + update * state

    return call


def _update_reversed(original: Method) -> Method:
    def call(self: Any, x: Any, state: Any) -> Any:
        # u s + (1 - u) n for (1 - u) s + u n: what one paper calls z is 1 - z of the other.
        right = original(self, x, state)
        (r, _z, n), (hr, _hz, hn) = self.gates(self.of_input(x)), self.gates(self.of_state(state))
        new = jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn)
        return state + new - right

    return call


def _neighbours(original: Method) -> Method:
    """Pairs (2i, 2i + 1), the paper's arrangement, for (i, i + d/2)."""

    def rotate(self: Any, x: Any) -> Any:
        sine, cosine = self.turns(x)
        first, second = x[..., ::2], x[..., 1::2]
        turned = jnp.stack([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
        return turned.reshape(x.shape)

    return rotate


def _turned_back(original: Method) -> Method:
    def turns(self: Any, x: Any) -> Any:
        sine, cosine = original(self, x)
        return -sine, cosine

    return turns


def _keys_only(original: Method) -> Method:
    return lambda self, x: original(self, x) if x.shape[1] == 2 else x


def _tiled(original: Method) -> Method:
    return lambda self, x: jnp.tile(x, (1, 2, 1, 1))


def _from_one(original: Method) -> Method:
    """Keys stand one position later than queries."""
    return lambda self, x: original(self, x, start=int(x.shape[1] == 2))


def _by_head(original: Method) -> Method:
    """The fused matrix read head by head, each with its query, key and value."""

    def projections(self: Any, fused: Any) -> list[Any]:
        batch, length, _ = fused.shape
        heads = jnp.swapaxes(fused.reshape(batch, length, 3, 12), 1, 2)
        return list(jnp.split(heads, 3, axis=-1))

    return projections


KINDS: tuple[Kind, ...] = (
    _convolution("convolution flipped", "a convolution for a correlation", _flipped, "convolve"),
    _convolution("height and width exchanged", "of a square kernel", _height_for_width, "convolve", cases=("P3",)),
    in_modules(
        "convolution padded on one side",
        "as SAME does with a stride",
        class_is("Convolution"),
        _set(padding=((0, 2), (0, 2))),
        base="convolutional",
    ),
    in_modules(
        "batch norm eps", "1e-3 for 1e-5", class_is("ChannelNorm"), _set(eps=1e-3), base="convolutional", cases=("P1",)
    ),
    in_modules(
        "batch norm momentum",
        "0.9 where 0.1 is meant",
        class_is("ChannelNorm"),
        _set(momentum=0.9),
        base="convolutional",
    ),
    _batch_norm("batch statistics in evaluation", "running ones are not used", _batch_statistics, "__call__"),
    in_modules(
        "running statistics trained",
        "a parameter for a buffer",
        class_is("ChannelNorm"),
        _statistics_trained,
        base="convolutional",
        cases=("P26",),
    ),
    in_modules("group norm of other groups", "2 for 3", class_is("GroupedNorm"), _set(groups=2), base="convolutional"),
    _in("convolutional", "GroupedNorm")("group norm of far channels", "every third one", _other_groups, "__call__"),
    _in("convolutional", "Pool")("padding not counted", "in an average", _padding_not_counted, "__call__"),
    _in("convolutional", "Convolutional")(
        "channels last when flattened",
        "another order for the linear map",
        _channels_last,
        "flattened",
        shows=lambda place: (THE_MODEL,),
    ),
    _lstm("LSTM gates in another order", "input, forget, output, cell", _gates(0, 1, 3, 2), "gates"),
    _lstm("LSTM input and forget gate exchanged", "as in another library", _gates(1, 0, 2, 3), "gates"),
    _lstm("forget gate one more", "a bias of 1 added when read", _forget_more, "gates"),
    _lstm("hidden bias left out", "one bias a gate, not two", _no_state_bias, "of_state"),
    _gru("GRU gates exchanged", "update, reset, new", _gates(1, 0, 2), "gates"),
    _gru("GRU resets before the product", "as in the paper", _reset_before, "__call__"),
    _gru("GRU update gate the other way round", "z for 1 - z", _update_reversed, "__call__"),
    in_modules(
        "row of padding trained",
        "no padding_idx",
        lambda path, module: class_is("Embedding")(path, module) and module.padding_idx is not None,
        _set(padding_idx=None),
        base="recurrent",
        cases=("P20",),
    ),
    _rotary("rotary pairs of neighbours", "(2i, 2i + 1)", _neighbours, "rotate", cases=("P12",)),
    _rotary("rotary turned back", "by minus the angle", _turned_back, "turns"),
    _rotary("rotary of keys only", "queries are not turned", _keys_only, "rotate"),
    _rotary("rotary positions one apart", "keys one later", _from_one, "turns"),
    in_modules("rotary base", "1,000", class_is("Rotary"), _set(base=1_000.0), base="decoder-only"),
    _rotary("shared heads tiled", "0, 1, 0, 1 for 0, 0, 1, 1", _tiled, "shared"),
    _gated(
        "gate and value exchanged",
        "silu of the other one",
        lambda original: lambda self, gate, up: original(self, up, gate),
        "gated",
    ),
    in_modules(
        "RMS norm eps", "1e-6 for 1e-5", class_is("RMSNorm"), _set(eps=1e-6), base="decoder-only", cases=("P1",)
    ),
    _in("decoder-only", "Fused")(
        "fused projections in another order",
        "keys, queries, values",
        lambda original: lambda self, fused: [original(self, fused)[i] for i in (1, 0, 2)],
        "projections",
        cases=("P4",),
    ),
    _in("decoder-only", "Fused")(
        "fused projections head by head", "(heads, 3, d)", _by_head, "projections", cases=("P4",)
    ),
)
