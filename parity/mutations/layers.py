"""Faults of layers and feed-forward networks: residual connections, order, activations; and of stacks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from parity.mutations.planting import Kind, Method, at, class_is, in_method, in_modules, modules_of, with_port
from parity.pair import Pair

LAYER = class_is("EncoderLayer", "DecoderLayer")
FEED_FORWARD = class_is("FeedForward")
THE_MODEL = "the model itself"
"""Where the harness says that a fault is between modules."""


def _after(change: Callable[[Method, Any, Any, Any, Any, Any], Any]) -> Callable[[Method], Method]:
    def make(original: Method) -> Method:
        def after(self: Any, norm: Any, x: Any, sublayer: Any, *dropout: Any) -> Any:
            return change(original, self, norm, x, sublayer, dropout)

        return after

    return make


def _other_norm_order(layer: Any) -> None:
    layer.norm_order = "pre" if layer.norm_order == "post" else "post"


def _feed_forward_first(original: Method) -> Method:
    """An encoder layer whose sublayers stand in the other order."""

    def call(self: Any, x: Any, **kwargs: Any) -> Any:
        returned = original(self, x, **kwargs)
        mask = kwargs["mask"]
        y = self.after(self.norm2, x, self.feed_forward(self.before(self.norm2, x)))
        z = self.before(self.norm1, y)
        return returned._replace(hidden=self.after(self.norm1, y, self.self_attn(z, z, mask=mask).output))

    return call


def _identity(original: Method) -> Method:
    """A layer that is left out."""
    return lambda self, x, *args, **kwargs: original(self, x, *args, **kwargs)._replace(hidden=x)


def _no_gradient_to_memory(original: Method) -> Method:
    def call(self: Any, x: Any, memory: Any, **kwargs: Any) -> Any:
        return original(self, x, jax.lax.stop_gradient(memory), **kwargs)

    return call


def _doubled_gradient(original: Method) -> Method:
    """Twice the gradient, as of a sum over two devices that should be a mean."""

    def call(self: Any, x: Any, **kwargs: Any) -> Any:
        y = original(self, x, **kwargs)
        return 2.0 * y - jax.lax.stop_gradient(y)

    return call


def _activated(activation: Callable[[Any], Any]) -> Callable[[Method], Method]:
    """Another activation, whatever the attribute says."""

    def make(original: Method) -> Method:
        return lambda self, x, **kwargs: self.linear2(activation(self.linear1(x)))

    return make


def _set_activation(name: str) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        module.activation = name

    return change


def _also_after(original: Method) -> Method:
    return lambda self, x, **kwargs: jax.nn.gelu(original(self, x, **kwargs), approximate=False)


def _feed(name: str, description: str, make: Callable[[Method], Method], **fields: Any) -> Kind:
    return in_method(name, description, FEED_FORWARD, make, **fields)


def _last_of_stack(pair: Pair) -> list[str]:
    return [path for path, module in modules_of(pair).items() if class_is("Encoder", "Decoder")(path, module)]


def _no_final_norm(pair: Pair, place: str) -> Pair:
    def change(model: Any) -> None:
        at(model, place).final_norm = None

    return with_port(pair, change)


def _extra_final_norm(pair: Pair, place: str) -> Pair:
    def change(model: Any) -> None:
        stack = at(model, place)
        stack.final_norm = nnx.data(type(stack.layers[0].norm1)(model.config))

    return with_port(pair, change)


def _final_norm_of(place: str) -> tuple[str, ...]:
    return (f"{place}.final_norm",)


def _unnormed_memory(original: Method) -> Method:
    """The decoder reads the embedded source, not what the encoder made of it."""

    def encode(self: Any, src: Any, **kwargs: Any) -> Any:
        memory = original(self, src, **kwargs)
        return memory * 0 + self.src_embedding(src)

    return encode


KINDS: tuple[Kind, ...] = (
    in_method(
        "residual left out",
        "sublayers without the connection around them",
        LAYER,
        _after(lambda f, self, norm, x, y, d: f(self, norm, jnp.zeros_like(x), y, *d)),
        method="after",
    ),
    in_method(
        "residual halved",
        "(x + sublayer) / 2 and no norm to hide it",
        LAYER,
        _after(lambda f, self, norm, x, y, d: f(self, norm, x / 2, y / 2, *d)),
        method="after",
        base="pre-norm",
    ),
    in_method(
        "residual from behind the norm",
        "norm(x) + sublayer(norm(x))",
        LAYER,
        _after(lambda f, self, norm, x, y, d: f(self, norm, norm(x), y, *d)),
        method="after",
        base="pre-norm",
    ),
    in_method(
        "norm applied twice",
        "norm(norm(x + sublayer(x)))",
        LAYER,
        _after(lambda f, self, norm, x, y, d: norm(f(self, norm, x, y, *d))),
        method="after",
    ),
    in_modules("norm before, not after", "pre-norm for post-norm", LAYER, _other_norm_order, cases=("P14",)),
    in_modules(
        "norm after, not before",
        "post-norm for pre-norm",
        LAYER,
        _other_norm_order,
        cases=("P14",),
        base="pre-norm",
    ),
    in_method(
        "sublayers in the other order",
        "feed-forward, then attention",
        class_is("EncoderLayer"),
        _feed_forward_first,
    ),
    in_method("layer left out", "x goes past it", LAYER, _identity),
    in_method(
        "memory of another layer",
        "the decoder reads the source's embedding",
        class_is("Transformer"),
        _unnormed_memory,
        method="encode",
        shows=lambda place: (THE_MODEL,),
    ),
    in_method(
        "no gradient to the encoder",
        "the memory is cut off",
        class_is("DecoderLayer"),
        _no_gradient_to_memory,
        # The gradient is missing on the other side of the cut: in what the encoder does last.
        shows=lambda place: (place, f"{place}.cross_attn", "encoder", "encoder.layers.1.norm2"),
    ),
    _feed(
        "gradient doubled",
        "the backward pass counts it twice",
        _doubled_gradient,
        # The module has no parameters of its own: the last of its parts gets the wrong gradient first.
        shows=lambda place: (place, f"{place}.linear2"),
    ),
    _feed("gelu by tanh", "the approximation for erf", _activated(jax.nn.gelu), cases=("P2",)),
    _feed("relu for gelu", "another activation", _activated(jax.nn.relu)),
    _feed("silu for gelu", "another activation", _activated(jax.nn.silu)),
    _feed("gelu by sigmoid", "x σ(1.702 x)", _activated(lambda x: x * jax.nn.sigmoid(1.702 * x))),
    _feed("activation left out", "two linear maps", _activated(lambda x: x)),
    _feed("activation twice", "behind the second linear map too", _also_after),
    in_modules(
        "gelu for relu", "another activation, by its name", FEED_FORWARD, _set_activation("gelu"), base="pre-norm"
    ),
    _feed("leaky relu", "0.01 x below 0", _activated(jax.nn.leaky_relu), base="pre-norm"),
    Kind(
        name="final norm left out",
        description="a pre-norm stack without the norm at its end",
        places=_last_of_stack,
        plant=_no_final_norm,
        cases=("P13",),
        base="pre-norm",
        shows=_final_norm_of,
    ),
    Kind(
        name="final norm too many",
        description="a post-norm stack with a norm at its end",
        places=_last_of_stack,
        plant=_extra_final_norm,
        cases=("P13",),
        shows=_final_norm_of,
    ),
)
