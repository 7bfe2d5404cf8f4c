"""How the tensors of the frameworks' own modules become each other's, decided by type and never by shape (P3)."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from parity.facts import Facts, ModuleFacts, TensorFacts, join
from parity.weights.biases import SumBiases
from parity.weights.flips import Flip
from parity.weights.rules import Fuse, Op, Split, SplitHeads, Transpose


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Tensors of the reference, tensors of the port, and what leads from one to the other."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    ops: tuple[Op, ...] = ()


@dataclasses.dataclass(frozen=True)
class View:
    """One module among the facts of its side."""

    facts: Facts
    path: str

    @property
    def module(self) -> ModuleFacts:
        """Its facts."""
        return self.facts[self.path]

    @property
    def layer(self) -> str:
        """The framework's class that it is."""
        return self.module.layer

    @property
    def tensors(self) -> Mapping[str, TensorFacts]:
        """Its own, by attribute name."""
        return self.module.tensors

    def name(self, tensor: str) -> str:
        """The full name of a tensor in or under the module."""
        return join(self.path, tensor)

    def child(self, name: str) -> "View | None":
        """A submodule, if there is one."""
        path = join(self.path, name)
        return View(self.facts, path) if path in self.facts else None

    def __str__(self) -> str:
        kind = self.module.type if self.layer in ("", self.module.type) else f"{self.module.type}, a {self.layer}"
        return f"{self.path or 'the model itself'!r} ({kind})"


class UnsuitedError(ValueError):
    """Two modules that no conversion leads between. The message says why."""


Convert = Callable[[View, View], Iterator[Piece]]


def convert(reference: View, port: View) -> Iterator[Piece]:
    """The pieces of one pair of modules; tensors that only one of them has are left over.

    Raises UnsuitedError where both are the frameworks' own and no conversion between their types is known.
    """
    conversion = CONVERSIONS.get((reference.layer, port.layer))
    if conversion is None and reference.layer in OPAQUE:
        conversion = OPAQUE[reference.layer]
    if conversion is not None:
        yield from conversion(reference, port)
    elif reference.layer and port.layer and reference.tensors and port.tensors:
        raise UnsuitedError(f"no conversion from a {reference.layer} to a {port.layer} is known")
    else:
        yield from _same_names(reference, port)


def _same_names(reference: View, port: View) -> Iterator[Piece]:
    """Users' own modules: tensors of one name and shape. A vector has one layout only: a `weight` may be a `scale`."""
    for name, tensor in reference.tensors.items():
        if name in port.tensors and port.tensors[name].shape == tensor.shape:
            yield Piece(sources=(reference.name(name),), targets=(port.name(name),))
    weight, scale = reference.tensors.get("weight"), port.tensors.get("scale")
    free = "weight" not in port.tensors and "scale" not in reference.tensors
    if weight and scale and free and len(weight.shape) == 1 and weight.shape == scale.shape:
        yield Piece(sources=(reference.name("weight"),), targets=(port.name("scale"),))


def _leaves(**names: str) -> Convert:
    """A conversion that only renames."""

    def conversion(reference: View, port: View) -> Iterator[Piece]:
        for source, target in names.items():
            if source in reference.tensors and target in port.tensors:
                yield Piece(sources=(reference.name(source),), targets=(port.name(target),))

    return conversion


def _linear(reference: View, port: View) -> Iterator[Piece]:
    if "weight" in reference.tensors and "kernel" in port.tensors:
        yield Piece(
            sources=(reference.name("weight"),), targets=(port.name("kernel"),), ops=(Transpose(), *_spread(port))
        )
    if "bias" in reference.tensors and "bias" in port.tensors:
        yield Piece(sources=(reference.name("bias"),), targets=(port.name("bias"),), ops=_spread_bias(port))


def _spread(port: View) -> tuple[Op, ...]:
    """A LinearGeneral's features may be spread over two axes: (in, out) -> (in, heads, head_dim), or likewise `in`."""
    sizes_in, sizes_out = axes_of(port)
    if max(len(sizes_in), len(sizes_out)) > 2:
        raise UnsuitedError(f"expected features over at most two axes in {port}")
    ops: list[Op] = [SplitHeads(sizes_in[0], axis=0)] if len(sizes_in) == 2 else []
    if len(sizes_out) == 2:
        ops.append(SplitHeads(sizes_out[0], axis=len(sizes_in)))
    return tuple(ops)


def _spread_bias(port: View) -> tuple[Op, ...]:
    _, sizes = axes_of(port)
    return (SplitHeads(sizes[0], axis=0),) if len(sizes) == 2 else ()


def axes_of(port: View) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of the input and of the output axes of a Flax kernel."""
    shape = port.tensors["kernel"].shape
    if port.layer != "LinearGeneral":
        return shape[:1], shape[1:]
    features, remaining, count = port.module.settings["in features"], 1, 0
    while remaining != features and count < len(shape):
        remaining, count = remaining * shape[count], count + 1
    return shape[:count], shape[count:]


def fused(references: tuple[View, ...], ports: tuple[View, ...]) -> Iterator[Piece]:
    """One projection here, several there: split or put together in the order of the names.

    Raises UnsuitedError unless one side has one module and all are linear.
    """
    for view in references + ports:
        if view.layer not in ("Linear", "LinearGeneral"):
            raise UnsuitedError(f"expected linear projections to split or put together, got {view}")
    if min(len(references), len(ports)) != 1:
        raise UnsuitedError(f"expected one projection on one side, got {len(references)} and {len(ports)}")
    for leaf, target in (("weight", "kernel"), ("bias", "bias")):
        if not all(leaf in r.tensors for r in references) or not all(target in p.tensors for p in ports):
            continue
        sources, targets = tuple(r.name(leaf) for r in references), tuple(p.name(target) for p in ports)
        across: tuple[Op, ...] = (Transpose(),) if leaf == "weight" else ()
        if len(references) == 1:
            sizes = tuple(_product(axes_of(port)[1]) for port in ports)
            ops: tuple[Op, ...] = (Split(_parts(sizes)), *across)
            spread = {_spread(port) if leaf == "weight" else _spread_bias(port) for port in ports}
            if len(spread) > 1:
                raise UnsuitedError("expected projections that spread their features alike")
            ops += next(iter(spread))
        else:
            sizes = tuple(r.tensors[leaf].shape[0] for r in references)
            ops = (Fuse(_parts(sizes)), *across, *(_spread(ports[0]) if across else _spread_bias(ports[0])))
        yield Piece(sources=sources, targets=targets, ops=ops)


def _parts(sizes: tuple[int, ...]) -> int | tuple[int, ...]:
    return len(sizes) if len(set(sizes)) == 1 else sizes


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _conv(reference: View, port: View) -> Iterator[Piece]:
    # (out, in / groups, *window) -> (*window, in / groups, out); groups of outputs lie alike in both.
    rank = len(reference.tensors["weight"].shape)
    axes = (*range(2, rank), 1, 0)
    yield Piece(sources=(reference.name("weight"),), targets=(port.name("kernel"),), ops=(Transpose(axes),))
    yield from _leaves(bias="bias")(reference, port)


def _conv_transpose(reference: View, port: View) -> Iterator[Piece]:
    if reference.module.settings["groups"] != 1:
        raise UnsuitedError(f"nnx.ConvTranspose has no groups, {reference} has")
    rank = len(reference.tensors["weight"].shape)
    window = tuple(range(2, rank))
    # torch lays the window over the output, the other way round than a convolution would; (in, out, *window). So does
    # Flax with `transpose_kernel`; without it, the kernel is that of a convolution of the input with zeros between.
    if port.module.settings["transpose_kernel"]:
        ops: tuple[Op, ...] = (Transpose((*window, 1, 0)),)
    else:
        ops = (Transpose((*window, 0, 1)), Flip(tuple(range(rank - 2))))
    yield Piece(sources=(reference.name("weight"),), targets=(port.name("kernel"),), ops=ops)
    yield from _leaves(bias="bias")(reference, port)


PROJECTIONS = (
    ("query", "key", "value", "out"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q", "k", "v", "out"),
    ("q", "k", "v", "o"),
    ("wq", "wk", "wv", "wo"),
)
"""What ports call the four projections of attention."""


def _attention(reference: View, port: View) -> Iterator[Piece]:
    """The fused (3 d, d) projection in the order q, k, v (P4), or three of different width."""
    for names in PROJECTIONS:
        found = [view for name in names if (view := port.child(name)) is not None]
        if len(found) == len(names):
            break
    else:
        raise UnsuitedError(f"expected submodules {' or '.join(map(str, PROJECTIONS[:2]))} in {port}")
    *inputs, out = found
    if any(view.layer not in ("Linear", "LinearGeneral") for view in found):
        raise UnsuitedError(f"expected linear projections in {port}")
    tensors = reference.tensors
    kernels = tuple(view.name("kernel") for view in inputs)
    if "in_proj_weight" in tensors:
        spread = _spread(inputs[0])
        yield Piece(sources=(reference.name("in_proj_weight"),), targets=kernels, ops=(Split(3), Transpose(), *spread))
    else:
        for name, view in zip("qkv", inputs, strict=True):
            weight = reference.name(f"{name}_proj_weight")
            yield Piece(sources=(weight,), targets=(view.name("kernel"),), ops=(Transpose(), *_spread(view)))
    if "in_proj_bias" in tensors and all("bias" in view.tensors for view in inputs):
        biases = tuple(view.name("bias") for view in inputs)
        ops = (Split(3), *_spread_bias(inputs[0]))
        yield Piece(sources=(reference.name("in_proj_bias"),), targets=biases, ops=ops)
    out_proj = reference.child("out_proj")
    if out_proj is not None:
        yield from _linear(out_proj, out)


def _recurrent(reference: View, port: View) -> Iterator[Piece]:
    """A cell or a stack of one layer, against a cell or an nnx.RNN of one."""
    cell = port.child("cell") if port.layer == "RNN" else port
    if port.layer == "Bidirectional":
        for direction, suffix in (("forward_rnn", "_l0"), ("backward_rnn", "_l0_reverse")):
            inner = port.child(direction)
            cell = inner and inner.child("cell")
            if cell is not None:
                yield from _cell(reference, cell, suffix)
        return
    if cell is None:
        raise UnsuitedError(f"expected a cell in {port}")
    yield from _cell(reference, cell, "" if reference.layer.endswith("Cell") else "_l0")


def _cell(reference: View, cell: View, suffix: str) -> Iterator[Piece]:
    kind = reference.layer.removesuffix("Cell")
    if cell.layer not in CELLS.get(kind, ()):
        raise UnsuitedError(f"no conversion from a {reference.layer} to a {cell.layer} is known")
    matrices = (reference.name(f"weight_ih{suffix}"), reference.name(f"weight_hh{suffix}"))
    biases = (reference.name(f"bias_ih{suffix}"), reference.name(f"bias_hh{suffix}"))
    both = f"bias_ih{suffix}" in reference.tensors
    if cell.layer == "LSTMCell":
        for matrix, side in zip(matrices, "ih", strict=True):
            # Input, forget, cell, output: the order of the gates in both frameworks.
            gates = ("ii", "if_", "ig", "io") if side == "i" else ("hi", "hf", "hg", "ho")
            targets = tuple(cell.name(f"{gate}.kernel") for gate in gates)
            yield Piece(sources=(matrix,), targets=targets, ops=(Split(4), Transpose()))
        if both:
            targets = tuple(cell.name(f"h{gate}.bias") for gate in "ifgo")
            yield Piece(sources=biases, targets=targets, ops=(SumBiases(), Split(4)))
        return
    for matrix, side in zip(matrices, "ih", strict=True):
        yield Piece(sources=(matrix,), targets=(cell.name(f"dense_{side}.kernel"),), ops=(Transpose(),))
    # The third gate of a GRU: r * (W h + b), where nnx.GRUCell has no b.
    add = SumBiases(3, apart=(2,)) if kind == "GRU" else SumBiases()
    bias = cell.name("dense_h.bias" if kind == "LSTM" else "dense_i.bias")
    if both:
        yield Piece(sources=biases, targets=(bias,), ops=(add,))


CELLS = {"LSTM": ("LSTMCell", "OptimizedLSTMCell"), "GRU": ("GRUCell",), "RNN": ("SimpleCell",)}

_NORM = _leaves(weight="scale", bias="bias", running_mean="mean", running_var="var")

CONVERSIONS: dict[tuple[str, str], Convert] = {
    ("Linear", "Linear"): _linear,
    ("Linear", "LinearGeneral"): _linear,
    ("Embedding", "Embed"): _leaves(weight="embedding"),
    ("LayerNorm", "LayerNorm"): _NORM,
    ("RMSNorm", "RMSNorm"): _NORM,
    ("GroupNorm", "GroupNorm"): _NORM,
    **{(f"BatchNorm{n}d", "BatchNorm"): _NORM for n in (1, 2, 3)},
    **{(f"InstanceNorm{n}d", "InstanceNorm"): _NORM for n in (1, 2, 3)},
    **{(f"Conv{n}d", "Conv"): _conv for n in (1, 2, 3)},
    **{(f"ConvTranspose{n}d", "ConvTranspose"): _conv_transpose for n in (1, 2, 3)},
}
"""(torch's class, Flax's class) -> how the tensors of one become those of the other."""

OPAQUE: dict[str, Convert] = {
    "MultiheadAttention": _attention,
    **{name: _recurrent for kind in CELLS for name in (kind, f"{kind}Cell")},
}
"""torch's modules that do not call their submodules, or have none where the port has: looked at as a whole."""
