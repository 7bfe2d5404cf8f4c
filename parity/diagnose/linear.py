"""Linear layers: which matrix, which way round, which bias."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from parity.diagnose.between import EXCHANGED, OUTPUT_SCALE
from parity.diagnose.case import Case
from parity.diagnose.diagnosis import Diagnosis, kind
from parity.diagnose.engine import Factor, Option, explain
from parity.diagnose.precision import rounded_product

TRANSPOSED = kind("kernel transposed", "torch's (out, in) used as Flax's (in, out), or the other way round")
BIAS = kind("bias missing", "a bias that is left out")
BIAS_TWICE = kind("bias added twice", "a bias that is added twice or subtracted")
BIAS_ELSEWHERE = kind("bias of another module", "a bias that belongs to another module")
QKV = kind("q/k/v permuted", "query, key and value projections exchanged")
HEADS = kind("heads split in the other order", "features read as (head_dim, heads) instead of (heads, head_dim)")
SCALED = kind("weights scaled", "a kernel multiplied by a constant")
REVERSED = kind("features in another order", "rows or columns of a kernel reversed, or moved on")

_TRANSPOSED = (
    Option("no", "as stored"),
    Option("yes", "transposed"),
    Option("reshaped", "reshaped where it must be transposed"),
    Option("reshaped back", "reshaped instead of transposed"),
)
KERNELS = ("kernel", "weight", "w", "embedding")
BIASES = ("bias", "b")
SIBLINGS = 80
"""Matrices of other modules that are tried, those with the longest common path first."""


def linear(case: Case) -> Diagnosis | None:
    """A module with one matrix: x W + b."""
    if not case.leaf or len(case.given) != 1:
        return None
    found = _matrix(case)
    if found is None or found[0].shape[-1] not in found[1].shape:
        return None
    x, kernel = found
    bias = next((a for n, a in case.weights.items() if n in BIASES), np.zeros(1)).ravel()
    formula = _Product(case, x, kernel, bias)
    explanation = explain(formula, formula.factors(), expected=case.expected, got=case.got)
    if explanation is not None:
        return explanation.diagnosis(case.module)
    return rounded_product(case, x, kernel, bias)


class _Product:
    """x W + b by its factors."""

    def __init__(self, case: Case, x: np.ndarray, kernel: np.ndarray, bias: np.ndarray):
        self.case, self.x, self.kernel, self.bias = case, x, kernel, bias
        self.matrices, self.vectors = dict(_matrices(case, kernel)), dict(_vectors(case, bias))
        self._products: dict[tuple[Any, ...], np.ndarray] = {}

    def __call__(self, f: Mapping[str, Any]) -> np.ndarray | None:
        key = (f["kernel"], f["transposed"], f["columns"], f["rows"])
        if key not in self._products:
            matrix = _turned(self.matrices[f["kernel"]], f["transposed"])
            matrix = matrix[:, _order(matrix.shape[1], f["columns"])][_order(matrix.shape[0], f["rows"])]
            if matrix.shape[0] != self.x.shape[-1]:
                return None
            self._products[key] = (self.x @ matrix).reshape(self.case.expected.shape)
        product = self._products[key] * f["scale"]
        if f["times"] == 0:
            return product
        vector = self.vectors[f["bias"]]
        added = vector[_order(vector.size, f["columns"] if f["bias"] == "" else "")]
        return product + f["times"] * added.reshape(*self.case.expected.shape[self.x.ndim - 1 :])

    def factors(self) -> tuple[Factor, ...]:
        """In which linear layers go wrong."""
        case = self.case
        return (
            Factor(
                "kernel",
                lambda r, p: _exchange_kind(case, r, p),
                tuple(_named(case, self.matrices)),
                what="kernel",
                fix="use {reference}",
            ),
            Factor(
                "transposed",
                TRANSPOSED,
                _TRANSPOSED,
                what="kernel",
                fix="map torch's weight to the kernel through Transpose(), once",
            ),
            Factor(
                "times",
                lambda r, p: BIAS if 0 in (r, p) else BIAS_TWICE,
                _times(self.bias),
                what="bias",
                fix="the bias must be {reference}",
            ),
            Factor("bias", BIAS_ELSEWHERE, tuple(_named(case, self.vectors)), what="bias", fix="use {reference}"),
            Factor(
                "columns",
                _order_kind,
                _orders(case.expected.shape[-1]),
                what="order of the output's features",
                fix="put the output's features {reference}",
            ),
            Factor(
                "rows",
                _order_kind,
                _orders(self.x.shape[-1]),
                what="order of the input's features",
                fix="put the input's features {reference}",
            ),
            Factor(
                "scale",
                OUTPUT_SCALE if case.method else SCALED,
                _scales(self.x, self.kernel, self.bias, case),
                what="factor of the kernel",
                fix="multiply the kernel by {reference}",
            ),
        )


def _turned(matrix: np.ndarray, how: str) -> np.ndarray:
    if how == "reshaped":
        return matrix.reshape(matrix.shape[::-1]).T
    if how == "reshaped back":
        return matrix.T.reshape(matrix.shape)
    return matrix.T if how == "yes" else matrix


def _matrix(case: Case) -> tuple[np.ndarray, np.ndarray] | None:
    """(inputs with one axis of features, kernel as (in, out)); several axes of features, as of heads, are merged."""
    found = [a for n, a in case.weights.items() if n in KERNELS and a.ndim >= 2]
    if len(found) != 1:
        return None
    kernel, x, shape = found[0], case.x.astype(np.float64), case.expected.shape
    width = x.shape[-1]
    if kernel.ndim == 2:
        # A table of embeddings, used as an output projection, is (out, in).
        return x, kernel.T if kernel.shape[0] != width == kernel.shape[1] else kernel
    if shape == (*x.shape[:-1], *kernel.shape[1:]) and kernel.shape[0] == width:
        return x, kernel.reshape(width, -1)
    if shape == (*x.shape[:-2], kernel.shape[-1]) and kernel.ndim == 3 and kernel.shape[:2] == x.shape[-2:]:
        return x.reshape(*x.shape[:-2], -1), kernel.reshape(-1, kernel.shape[-1])
    return None


def _matrices(case: Case, kernel: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    yield "", kernel
    for name in _nearest(case):
        array = case.other_weights[name]
        if name.rpartition(".")[2] in KERNELS and array.size == kernel.size and array.ndim >= 2:
            if array.ndim > 2:
                array = array.reshape(kernel.shape)
            if array.shape in (kernel.shape, kernel.shape[::-1]):
                yield name, array


def _vectors(case: Case, bias: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    yield "", bias
    for name in _nearest(case):
        array = case.other_weights[name]
        if name.rpartition(".")[2] in BIASES and array.size == bias.size > 1:
            yield name, array.ravel()


def _nearest(case: Case) -> list[str]:
    """Names of other parameters, those that share most of the path first."""

    def shared(name: str) -> int:
        pairs = zip(name.split("."), case.module.split("."), strict=False)
        return sum(a == b for a, b in pairs)

    return sorted(case.other_weights, key=lambda name: -shared(name))[: 4 * SIBLINGS]


def _named(case: Case, arrays: Mapping[str, np.ndarray]) -> Iterator[Option]:
    for name in [*arrays][:SIBLINGS]:
        yield Option(name, f"that of {name.rpartition('.')[0] or name}" if name else "its own")


def _exchange_kind(case: Case, reference: str, port: str) -> str:
    """Exchanged with a sibling: q, k and v of one attention; anything else is another module's."""
    owner = case.module.rpartition(".")[0]
    role = projection_role(case.module)
    for name in (reference, port):
        path = name.rpartition(".")[0]
        if name and path.rpartition(".")[0] == owner and role and projection_role(path):
            return QKV
    return EXCHANGED


def projection_role(path: str) -> str:
    """`q`, `k` or `v` where a module's name says so, `out` for what comes after the attention, or nothing."""
    last = path.rpartition(".")[2].lower()
    for role, names in ROLES.items():
        if last in names:
            return role
    return ""


ROLES = {
    "q": ("q", "query", "q_proj", "wq", "w_q", "to_q", "linear_q", "query_proj", "q_lin", "queries", "q_linear"),
    "k": ("k", "key", "k_proj", "wk", "w_k", "to_k", "linear_k", "key_proj", "k_lin", "keys", "k_linear"),
    "v": ("v", "value", "v_proj", "wv", "w_v", "to_v", "linear_v", "value_proj", "v_lin", "values", "v_linear"),
    "out": (
        "o",
        "out",
        "out_proj",
        "o_proj",
        "wo",
        "w_o",
        "to_out",
        "linear_out",
        "output",
        "c_proj",
        "proj",
        "out_lin",
        "dense",
    ),
    "qkv": ("qkv", "c_attn", "in_proj", "qkv_proj", "to_qkv", "wqkv", "w_qkv", "query_key_value"),
}


def _times(bias: np.ndarray) -> tuple[Option, ...]:
    if not bias.any():
        return (Option(0, "left out"),)
    return Option(1, "added once"), Option(0, "left out"), Option(2, "added twice"), Option(-1, "subtracted")


def _orders(width: int) -> tuple[Option, ...]:
    options = [Option("", "as they are"), Option("reversed", "reversed")]
    options += [Option("moved 1", "moved on by one"), Option("moved -1", "moved back by one")]
    for heads in range(2, min(width, 65)):
        if width % heads == 0:
            options.append(Option(f"heads {heads}", f"as (head_dim, {heads} heads)"))
    for parts in (2, 3, 4):
        if width % parts == 0 and width > parts:
            options.append(Option(f"rotated {parts}", f"with the last of {parts} parts first"))
            options.append(Option(f"back {parts}", f"with the first of {parts} parts last"))
    return tuple(options)


def _order(width: int, name: str) -> np.ndarray:
    indices = np.arange(width)
    what, _, number = name.partition(" ")
    if what == "reversed":
        return indices[::-1]
    if what == "heads":
        # Position h · head_dim + d of one order is position d · heads + h of the other.
        return indices.reshape(-1, int(number)).T.ravel()
    if what == "moved":
        return np.roll(indices, int(number))
    if what in ("rotated", "back"):
        step = width // int(number)
        return np.roll(indices, step if what == "rotated" else -step)
    return indices


def _order_kind(reference: str, port: str) -> str:
    return HEADS if "heads" in reference + port else REVERSED


def _scales(x: np.ndarray, kernel: np.ndarray, bias: np.ndarray, case: Case) -> tuple[Option, ...]:
    """1, and the factor that the results themselves ask for."""
    values = [1.0]
    if kernel.shape[0] == x.shape[-1]:
        product = (x @ kernel).ravel()
        shift = np.broadcast_to(bias, (x.size // x.shape[-1], kernel.shape[1])).ravel() if bias.any() else 0.0
        for result in (case.expected, case.got):
            if result.size == product.size and product.any() and np.isfinite(result).all():
                solved = float((product @ (result.ravel() - shift)) / (product @ product))
                if abs(solved - 1.0) > 1e-9 and abs(solved) > 1e-9:
                    values.append(solved)
    return tuple(Option(value, f"{value:.6g}") for value in values)
