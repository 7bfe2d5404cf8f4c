"""Facts of an nnx.Module."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from parity.facts import Facts, ModuleFacts, Setting, TensorFacts, join, plain_settings, setting_name

Read = Callable[[Any], dict[str, Setting]]


def describe(module: nnx.Module) -> Facts:
    """Types, tensors and settings of every module, shared ones under each of their paths."""
    named = [(_dotted(path), m) for path, m in nnx.iter_modules(module)]
    paths = {id(m): path for path, m in named}
    tensors, names = _tensors(module, [path for path, _ in named])
    facts: dict[str, ModuleFacts] = {}
    for path, m in named:
        own = dict(tensors.get(path, {}))
        for attribute, value in vars(m).items():
            met = names.get(id(value))
            if met is not None and met != join(path, attribute):  # a second name
                own[attribute] = _tensor(value, same_as=met)
        facts[path] = _module(m, own)
    for path, m in named:
        for attribute, value in vars(m).items():
            if id(value) in paths and paths[id(value)] != join(path, attribute):  # a second path
                facts |= _again(facts, paths[id(value)], join(path, attribute))
    # From the model inwards, in the order of torch's named_modules as far as there is one.
    return dict(sorted(facts.items(), key=lambda item: item[0].split(".") if item[0] else []))


def _module(m: nnx.Module, tensors: Mapping[str, TensorFacts]) -> ModuleFacts:
    return ModuleFacts(
        type=type(m).__name__,
        bases=tuple(base.__name__ for base in type(m).__mro__[1:-1]),
        layer=_layer(type(m)),
        tensors=tensors,
        settings=settings_of(m),
    )


def _again(facts: Mapping[str, ModuleFacts], first: str, second: str) -> dict[str, ModuleFacts]:
    """The facts of a module and all inside it, under its second path."""
    again = {}
    for path, module in facts.items():
        if path == first or path.startswith(first + "."):
            renamed = second + path[len(first) :]
            tensors = {
                name: TensorFacts(
                    shape=t.shape,
                    dtype=t.dtype,
                    trained=t.trained,
                    same_as=t.same_as or join(path, name),
                    settable=t.settable,
                )
                for name, t in module.tensors.items()
            }
            again[renamed] = ModuleFacts(
                type=module.type,
                bases=module.bases,
                layer=module.layer,
                tensors=tensors,
                settings=module.settings,
                same_as=path,
            )
    return again


def _tensors(module: nnx.Module, paths: list[str]) -> tuple[dict[str, dict[str, TensorFacts]], dict[int, str]]:
    """{module path: its tensors}, as nnx.state names them, and {id of a variable: its full name}."""
    found: dict[str, dict[str, TensorFacts]] = {}
    names: dict[int, str] = {}
    known = set(paths)
    for keys, value in nnx.to_flat_state(nnx.state(module)):
        if isinstance(value, (nnx.RngState, nnx.Intermediate)) or _array(value) is None:
            continue
        parts = [str(key) for key in keys]
        # The innermost module; what is left may be several parts, where a module keeps variables in a dict.
        depth = next(n for n in range(len(parts) - 1, -1, -1) if ".".join(parts[:n]) in known)
        found.setdefault(".".join(parts[:depth]), {})[".".join(parts[depth:])] = _tensor(value)
    for keys, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable):
            names.setdefault(id(node), _dotted(keys))
    return found, names


def _tensor(value: Any, *, same_as: str = "") -> TensorFacts:
    array = _array(value)
    return TensorFacts(
        shape=tuple(array.shape),
        dtype=str(array.dtype),
        trained=isinstance(value, nnx.Param),
        same_as=same_as,
        settable=isinstance(value, nnx.Variable),
    )


def _array(value: Any) -> Any:
    array = value.get_value() if isinstance(value, nnx.Variable) else value
    return array if hasattr(array, "shape") and hasattr(array, "dtype") else None


def _dotted(path: Any) -> str:
    return ".".join(map(str, path))


def _layer(cls: type) -> str:
    for base in cls.__mro__:
        if base is nnx.Sequential or (base.__module__.startswith("flax.nnx.nn.") and base.__name__ != "RNNCellBase"):
            return base.__name__
    return ""


def settings_of(module: nnx.Module) -> dict[str, Setting]:
    """Hyper-parameters of one module, its activations among them."""
    read = next((READERS[base] for base in type(module).__mro__ if base in READERS), None)
    settings = plain_settings(_without_variables(module)) if read is None else read(module)
    attributes = dict(vars(module))
    for attribute in vars(type(module)):  # `activation = staticmethod(nnx.relu)`
        attributes.setdefault(attribute, getattr(module, attribute, None))
    if isinstance(module, nnx.Sequential):
        attributes = {str(i): layer for i, layer in enumerate(module.layers)}
    for attribute, value in attributes.items():
        name = activation_name(value)
        if name is not None and not attribute.startswith("_") and (read is None or attribute in ACTIVATIONS_OF_CELLS):
            settings[ACTIVATIONS_OF_CELLS.get(attribute, setting_name(attribute))] = name
    return settings


ACTIVATIONS_OF_CELLS = {"gate_fn": "gate activation", "activation_fn": "activation"}


def _without_variables(module: nnx.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not isinstance(value, (nnx.Variable, nnx.Pytree))}


def activation_name(value: Any) -> str | None:
    """`gelu (tanh)` for jax.nn.gelu, whose default it is (P2), or a partial of it; None for anything unknown."""
    options: dict[str, Any] = {}
    while isinstance(value, functools.partial):
        options = {**value.keywords, **options}
        value = value.func
    try:
        if value is jax.nn.gelu:
            return "gelu (tanh)" if options.get("approximate", True) else "gelu (erf)"
        if value is jax.nn.leaky_relu:
            return f"leaky_relu ({float(options.get('negative_slope', 0.01)):g})"
        if value is jax.nn.elu:
            return f"elu ({float(options.get('alpha', 1.0)):g})"
        return FUNCTIONS.get(value)
    except TypeError:  # not hashable: no function
        return None


FUNCTIONS: dict[Any, str] = {
    jax.nn.relu: "relu",
    jax.nn.relu6: "relu6",
    jax.nn.silu: "silu",
    jax.nn.mish: "mish",
    jax.nn.selu: "selu",
    jax.nn.softplus: "softplus",
    jax.nn.sigmoid: "sigmoid",
    jax.lax.logistic: "sigmoid",
    jnp.tanh: "tanh",
    jax.lax.tanh: "tanh",
    jax.nn.hard_tanh: "hard_tanh",
    jax.nn.hard_silu: "hard_silu",
    jax.nn.hard_sigmoid: "hard_sigmoid",
    jax.nn.log_sigmoid: "log_sigmoid",
}


def _linear(m: Any) -> dict[str, Setting]:
    return {"in features": _one(m.in_features), "features": _one(m.out_features), "bias": m.use_bias}


def _one(sizes: Any) -> Setting:
    """The number of features, however many axes they are spread over."""
    return int(math.prod(sizes)) if isinstance(sizes, (tuple, list)) else int(sizes)


def _embed(m: nnx.Embed) -> dict[str, Setting]:
    return {"rows": m.num_embeddings, "features": m.features}


def _norm(m: Any) -> dict[str, Setting]:
    bias = {"bias": m.use_bias} if hasattr(m, "use_bias") else {}
    return {"eps": m.epsilon, "features": m.num_features, "scale": m.use_scale} | bias


def _group_norm(m: nnx.GroupNorm) -> dict[str, Setting]:
    features = m.num_groups * m.group_size
    return {"eps": m.epsilon, "groups": m.num_groups, "features": features, "scale": m.use_scale, "bias": m.use_bias}


def _batch_norm(m: nnx.BatchNorm) -> dict[str, Setting]:
    # Flax's momentum is the share of the old average; the shared convention is torch's, the share of the new batch.
    momentum = None if m.momentum is None else round(1.0 - float(m.momentum), 12)
    return _norm(m) | {"momentum": momentum, "running statistics": True}


def _instance_norm(m: Any) -> dict[str, Setting]:
    return _norm(m) | {"running statistics": False}


def _conv(m: nnx.Conv) -> dict[str, Setting]:
    rank = len(m.kernel_size)
    strides, dilation = _each(m.strides, rank), _each(m.kernel_dilation, rank)
    total = [d * (k - 1) for d, k in zip(dilation, m.kernel_size, strict=True)]
    circular = {"CIRCULAR": "circular", "REFLECT": "reflect"}
    mode = circular.get(m.padding, "zeros") if isinstance(m.padding, str) else "zeros"
    settings = _any_conv(m, strides, dilation) | {"groups": m.feature_group_count, "padding mode": mode}
    padding: tuple[tuple[int, int], ...] | None
    if m.padding == "VALID":
        padding = ((0, 0),) * rank
    elif m.padding == "CAUSAL":
        padding = ((total[0], 0),)
    elif m.padding in circular:
        padding = tuple(((k - 1) // 2, k // 2) for k in (t + 1 for t in total))
    elif m.padding == "SAME":
        # With strides it depends on the size of the input: nothing static to compare.
        known = all(s == 1 or t == 0 for s, t in zip(strides, total, strict=True))
        padding = tuple((t // 2, t - t // 2) for t in total) if known else None
    else:
        padding = _pairs(m.padding, rank)
    return settings if padding is None else settings | {"padding": padding}


def _conv_transpose(m: nnx.ConvTranspose) -> dict[str, Setting]:
    rank = len(m.kernel_size)
    strides, dilation = _each(m.strides, rank), _each(m.kernel_dilation, rank)
    settings = _any_conv(m, strides, dilation) | {"groups": 1}
    if m.padding == "CIRCULAR":
        return settings | {"padding mode": "circular"}
    if isinstance(m.padding, str):
        sizes = [d * (k - 1) + 1 for d, k in zip(dilation, m.kernel_size, strict=True)]
        pads = tuple(_transposed_pads(k, s, m.padding) for k, s in zip(sizes, strides, strict=True))
    else:
        pads = _pairs(m.padding, rank)
    return settings | {"padding": pads, "padding mode": "zeros"}


def _transposed_pads(k: int, s: int, padding: str) -> tuple[int, int]:
    """What jax.lax.conv_transpose makes of SAME and VALID."""
    if padding == "SAME":
        total = k + s - 2
        before = k - 1 if s > k - 1 else math.ceil(total / 2)
    else:
        total, before = k + s - 2 + max(k - s, 0), k - 1
    return before, total - before


def _any_conv(m: Any, strides: tuple[int, ...], dilation: tuple[int, ...]) -> dict[str, Setting]:
    return {
        "in features": m.in_features,
        "features": m.out_features,
        "kernel size": tuple(m.kernel_size),
        "strides": strides,
        "dilation": dilation,
        "bias": m.use_bias,
        "transpose_kernel": getattr(m, "transpose_kernel", False),
    }


def _each(value: Any, rank: int) -> tuple[int, ...]:
    return (1 if value is None else value,) * rank if value is None or isinstance(value, int) else tuple(value)


def _pairs(padding: Any, rank: int) -> tuple[tuple[int, int], ...]:
    each = (padding,) * rank if isinstance(padding, int) else padding
    return tuple((p, p) if isinstance(p, int) else tuple(p) for p in each)


def _attention(m: nnx.MultiHeadAttention) -> dict[str, Setting]:
    return {
        "num_heads": m.num_heads,
        "in features": m.in_features,
        "features": m.out_features,
        "dropout rate": float(m.dropout_rate),
        # With a rate of 0 there is no mask to share (P21).
        "dropout mask shared over the batch": bool(m.broadcast_dropout and m.dropout_rate > 0),
        "bias": m.use_bias,
    }


def _cell(m: Any) -> dict[str, Setting]:
    return {"in features": m.in_features, "features": m.hidden_features}


def _rnn(m: nnx.RNN) -> dict[str, Setting]:
    return settings_of(m.cell) | {"time_major": m.time_major, "reverse": m.reverse}


def _dropout(m: nnx.Dropout) -> dict[str, Setting]:
    return {"dropout rate": float(m.rate)}


READERS: Mapping[type, Read] = {
    nnx.Linear: _linear,
    nnx.LinearGeneral: _linear,
    nnx.Embed: _embed,
    nnx.LayerNorm: _norm,
    nnx.RMSNorm: _norm,
    nnx.GroupNorm: _group_norm,
    nnx.BatchNorm: _batch_norm,
    nnx.InstanceNorm: _instance_norm,
    nnx.Conv: _conv,
    nnx.ConvTranspose: _conv_transpose,
    nnx.MultiHeadAttention: _attention,
    **dict.fromkeys((nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell), _cell),
    nnx.RNN: _rnn,
    nnx.Dropout: _dropout,
}
