"""Facts of a torch.nn.Module."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it

from parity.facts import Facts, ModuleFacts, Setting, TensorFacts, join, plain_settings, setting_name

Read = Callable[[Any], dict[str, Setting]]

PLAIN_CLASSES = (nn.Module, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def describe(module: nn.Module) -> Facts:
    """Types, tensors and settings of every module, shared ones under each of their paths."""
    first_tensor: dict[int, str] = {}
    first_module: dict[int, str] = {}
    facts = {}
    for path, m in module.named_modules(remove_duplicate=False):
        first = first_module.setdefault(id(m), path)
        facts[path] = ModuleFacts(
            type=type(m).__name__,
            bases=tuple(base.__name__ for base in type(m).__mro__[1:-1]),
            layer=_layer(type(m)),
            tensors=dict(_tensors(m, path, first_tensor)),
            settings=settings_of(m),
            same_as=first if first != path else "",
        )
    return facts


def _tensors(module: nn.Module, path: str, first: dict[int, str]) -> Iterator[tuple[str, TensorFacts]]:
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    for name, tensor in (*parameters, *buffers):
        full = join(path, name)
        met = first.setdefault(id(tensor), full)
        yield (
            name,
            TensorFacts(
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                trained=isinstance(tensor, nn.Parameter) and tensor.requires_grad,
                same_as=met if met != full else "",
            ),
        )


def _layer(cls: type) -> str:
    for base in cls.__mro__:
        if base.__module__.startswith("torch.nn.modules") and base not in PLAIN_CLASSES:
            return {"NonDynamicallyQuantizableLinear": "Linear"}.get(base.__name__, base.__name__)
    return ""


def settings_of(module: nn.Module) -> dict[str, Setting]:
    """Hyper-parameters of one module, its activations among them."""
    read = next((READERS[base] for base in type(module).__mro__ if base in READERS), None)
    settings = plain_settings(vars(module)) if read is None else read(module)
    functions = {**vars(module), **dict(module.named_children())}
    for attribute, value in functions.items():
        name = activation_name(value)
        if name is not None and not attribute.startswith("_"):
            settings[setting_name(attribute)] = name
    return settings


def activation_name(value: Any) -> str | None:
    """`gelu (erf)` for torch.nn.functional.gelu, torch.nn.GELU(), or a partial of either; None for anything else."""
    if isinstance(value, nn.Module):
        read = next((MODULES[base] for base in type(value).__mro__ if base in MODULES), None)
        return None if read is None else read(value)
    options: dict[str, Any] = {}
    while isinstance(value, functools.partial):
        options = {**value.keywords, **options}
        value = value.func
    try:
        if value is F.gelu:
            return gelu_name(options.get("approximate", "none"))
        if value is F.leaky_relu:
            return f"leaky_relu ({options.get('negative_slope', 0.01):g})"
        if value is F.elu:
            return f"elu ({options.get('alpha', 1.0):g})"
        return FUNCTIONS.get(value)
    except TypeError:  # not hashable: no function
        return None


def gelu_name(approximate: str) -> str:
    """By torch's name for the approximation."""
    return "gelu (erf)" if approximate == "none" else f"gelu ({approximate})"


FUNCTIONS: dict[Any, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    F.relu6: "relu6",
    F.silu: "silu",
    F.mish: "mish",
    F.selu: "selu",
    F.softplus: "softplus",
    F.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    F.hardtanh: "hard_tanh",
    F.hardswish: "hard_silu",
    F.hardsigmoid: "hard_sigmoid",
    F.logsigmoid: "log_sigmoid",
}

MODULES: Mapping[type, Callable[[Any], str]] = {
    nn.GELU: lambda m: gelu_name(m.approximate),
    nn.LeakyReLU: lambda m: f"leaky_relu ({m.negative_slope:g})",
    nn.ELU: lambda m: f"elu ({m.alpha:g})",
    nn.ReLU6: lambda m: "relu6",
    nn.ReLU: lambda m: "relu",
    nn.SiLU: lambda m: "silu",
    nn.Mish: lambda m: "mish",
    nn.SELU: lambda m: "selu",
    nn.Softplus: lambda m: "softplus",
    nn.Sigmoid: lambda m: "sigmoid",
    nn.Tanh: lambda m: "tanh",
    nn.Hardswish: lambda m: "hard_silu",
    nn.Hardsigmoid: lambda m: "hard_sigmoid",
    nn.LogSigmoid: lambda m: "log_sigmoid",
}


def _linear(m: nn.Linear) -> dict[str, Setting]:
    return {"in features": m.in_features, "features": m.out_features, "bias": m.bias is not None}


def _embedding(m: nn.Embedding) -> dict[str, Setting]:
    rows: dict[str, Setting] = {"rows": m.num_embeddings, "features": m.embedding_dim}
    return rows | {"padding_idx": m.padding_idx, "max_norm": m.max_norm}


def _norm(m: Any) -> dict[str, Setting]:
    shape = m.normalized_shape
    # torch.nn.RMSNorm without an eps takes the machine epsilon of its input.
    eps = "the machine epsilon of the input" if m.eps is None else m.eps
    bias = {} if isinstance(m, nn.RMSNorm) else {"bias": getattr(m, "bias", None) is not None}
    return {"eps": eps, "features": shape[0] if len(shape) == 1 else tuple(shape), "scale": m.weight is not None} | bias


def _group_norm(m: nn.GroupNorm) -> dict[str, Setting]:
    return {"eps": m.eps, "groups": m.num_groups, "features": m.num_channels, "scale": m.affine, "bias": m.affine}


def _batch_norm(m: Any) -> dict[str, Setting]:
    return {
        "eps": m.eps,
        "momentum": "a cumulative average" if m.momentum is None else m.momentum,
        "features": m.num_features,
        "scale": m.affine,
        "bias": m.affine,
        "running statistics": m.track_running_stats,
    }


def _instance_norm(m: Any) -> dict[str, Setting]:
    settings = _batch_norm(m)
    del settings["momentum"]
    return settings


def _conv(m: Any) -> dict[str, Setting]:
    total = [d * (k - 1) for d, k in zip(m.dilation, m.kernel_size, strict=True)]
    if m.padding == "same":
        padding = tuple((t // 2, t - t // 2) for t in total)
    elif m.padding == "valid":
        padding = tuple((0, 0) for _ in total)
    else:
        padding = tuple((p, p) for p in m.padding)
    return _any_conv(m) | {"padding": padding}


def _conv_transpose(m: Any) -> dict[str, Setting]:
    # As what the input, with zeros put between its elements, is padded with: both frameworks can say that.
    total = [d * (k - 1) for d, k in zip(m.dilation, m.kernel_size, strict=True)]
    pads = tuple((t - p, t - p + more) for t, p, more in zip(total, m.padding, m.output_padding, strict=True))
    return _any_conv(m) | {"padding": pads}


def _any_conv(m: Any) -> dict[str, Setting]:
    return {
        "in features": m.in_channels,
        "features": m.out_channels,
        "kernel size": tuple(m.kernel_size),
        "strides": tuple(m.stride),
        "dilation": tuple(m.dilation),
        "groups": m.groups,
        "padding mode": m.padding_mode,
        "bias": m.bias is not None,
    }


def _attention(m: nn.MultiheadAttention) -> dict[str, Setting]:
    return {
        "num_heads": m.num_heads,
        "in features": m.embed_dim,
        "features": m.embed_dim,
        "dropout rate": m.dropout,
        "dropout mask shared over the batch": False,
        "bias": m.in_proj_bias is not None,
        "batch_first": m.batch_first,
    }


def _recurrent(m: Any) -> dict[str, Setting]:
    settings: dict[str, Setting] = {"in features": m.input_size, "features": m.hidden_size}
    settings["activation"] = getattr(m, "nonlinearity", "tanh")
    if not isinstance(m, (nn.RNN, nn.RNNCell)):
        settings["gate activation"] = "sigmoid"
    if isinstance(m, nn.RNNBase):
        settings |= {"batch_first": m.batch_first, "layers": m.num_layers, "bidirectional": m.bidirectional}
        settings |= {"dropout rate": float(m.dropout), "projection": m.proj_size}
    return settings


def _dropout(m: Any) -> dict[str, Setting]:
    return {"dropout rate": m.p}


READERS: Mapping[type, Read] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.LayerNorm: _norm,
    nn.RMSNorm: _norm,
    nn.GroupNorm: _group_norm,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _instance_norm),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _conv),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _conv_transpose),
    nn.MultiheadAttention: _attention,
    **dict.fromkeys((nn.RNNBase, nn.RNNCellBase), _recurrent),
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), _dropout),
}
