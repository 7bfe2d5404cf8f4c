"""The queries, keys and values of an attention module: what its submodules returned, or from its weights."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from parity.diagnose.case import Case
from parity.diagnose.linear import projection_role
from parity.trace import module_of


@dataclasses.dataclass(frozen=True)
class Projections:
    """(batch, length, width) each, heads side by side."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    heads: int = 0
    """Where the weights or the submodules say so."""
    out: Callable[[np.ndarray], np.ndarray] = lambda merged: merged
    """From the merged heads to the value that differs."""
    fused: np.ndarray | None = None
    """All three as one projection returns them, where it does; `q`, `k` and `v` are then its thirds."""


def projections(case: Case) -> Projections | None:
    """None for whatever is no attention, or differs elsewhere in it."""
    found = _of_submodules(case) or _of_weights(case)
    if found is None or any(array.ndim != 3 for array in (found.q, found.k, found.v)):
        return None
    return found


def _of_submodules(case: Case) -> Projections | None:
    returned = {module_of(name): pair[0] for name, pair in case.inside.items()}
    by_role = {projection_role(path): array.astype(np.float64) for path, array in returned.items()}
    arrays = [array for array in returned.values() if array.ndim in (3, 4)]
    if "qkv" in by_role:
        return _fused(by_role["qkv"], case)
    if not {"q", "k", "v"} <= by_role.keys():
        # By their order, where names say nothing: three projections, and then something else.
        if len(arrays) != 3 or not case.child or len({a.shape[-1] for a in arrays}) > 2:
            return None
        by_role = dict(zip("qkv", (a.astype(np.float64) for a in arrays), strict=True))
    q, k, v = (by_role[role] for role in "qkv")
    heads = q.shape[2] if q.ndim == 4 else 0
    q, k, v = (a.reshape(*a.shape[:2], -1) if a.ndim == 4 else a for a in (q, k, v))
    if not case.child:  # the output projection, if it has one, is not a submodule
        out = _output(case)
        return Projections(q, k, v, heads, out or (lambda merged: merged))
    if case.expected.ndim == 4:
        shape = case.expected.shape
        return Projections(q, k, v, heads, lambda merged: merged.reshape(shape))
    return Projections(q, k, v, heads)


def _fused(array: np.ndarray, case: Case) -> Projections | None:
    if array.ndim != 3 or array.shape[-1] % 3:
        return None
    q, k, v = np.split(array, 3, axis=-1)
    out = None if case.child else _output(case)
    return Projections(q, k, v, 0, out or (lambda merged: merged), fused=array)


def _of_weights(case: Case) -> Projections | None:
    """q = x W_q + b_q and so on, in whatever layout the weights of the port have."""
    if case.child or not case.given or case.x.ndim != 3:
        return None
    matrices, heads = _matrices(case.weights, case.x.shape[-1])
    if {"qkv", "out"} <= matrices.keys():
        kernel, bias = matrices["qkv"]
        return _fused(case.x.astype(np.float64) @ kernel + bias, case)
    if not {"q", "k", "v", "out"} <= matrices.keys():
        return None
    streams = [a.astype(np.float64) for a in case.given if a.ndim == 3 and a.shape[-1] == case.x.shape[-1]]
    queries, keys = streams[0], streams[min(1, len(streams) - 1)]
    values = streams[2] if len(streams) > 2 else keys
    projected = [x @ matrices[r][0] + matrices[r][1] for r, x in (("q", queries), ("k", keys), ("v", values))]
    kernel, bias = matrices["out"]
    q, k, v = projected
    alike = all(array.shape == queries.shape and np.array_equal(array, queries) for array in (keys, values))
    fused = np.concatenate(projected, axis=-1) if alike and "in_proj_weight" in case.weights else None
    return Projections(q, k, v, heads, lambda merged: merged @ kernel + bias, fused)


def _output(case: Case) -> Callable[[np.ndarray], np.ndarray] | None:
    matrices, _ = _matrices(case.weights, case.expected.shape[-1])
    if "out" not in matrices:
        return None
    kernel, bias = matrices["out"]
    return lambda merged: merged @ kernel + bias


def _matrices(weights: Mapping[str, np.ndarray], width: int) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], int]:
    """{role: (kernel as (in, out), bias)}, and the number of heads if a layout shows it."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    heads = 0
    for name, kernel in weights.items():
        path, _, leaf = name.rpartition(".")
        role = projection_role(path or leaf.removesuffix("_weight").removesuffix("_kernel"))
        bias = next((weights[n] for n in (f"{path}.bias", "in_proj_bias") if n in weights), np.zeros(1))
        if leaf == "in_proj_weight" and kernel.shape[0] == 3 * kernel.shape[1]:  # torch's own layout
            biases = np.split(bias, 3) if bias.size > 1 else [bias] * 3
            found |= {r: (k.T, b) for r, k, b in zip("qkv", np.split(kernel, 3), biases, strict=True)}
        elif leaf not in ("kernel", "weight") or not role:
            continue
        elif role == "qkv" and kernel.ndim == 2:
            found["qkv"] = (kernel if kernel.shape[0] == width else kernel.T, bias)
        elif kernel.ndim == 3 and role == "out":
            found[role] = (kernel.reshape(-1, kernel.shape[-1]), bias)
        elif kernel.ndim == 3:
            heads = kernel.shape[1]
            found[role] = (kernel.reshape(kernel.shape[0], -1), bias.ravel())
        elif kernel.ndim == 2:
            found[role] = (kernel if leaf == "kernel" else kernel.T, bias)
    return found, heads
