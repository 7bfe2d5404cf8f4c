"""Names with dots, and the levels of a tree that they stand for: `a.b` is `tree["a"]["b"]`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parity.weights.checkpoint import StoreError


def flatten(tree: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of dicts, lists and tuples, with their names, in order; None is no leaf."""
    left = [("", tree)]
    while left:
        prefix, node = left.pop()
        if isinstance(node, Mapping):
            items = [(str(key), child) for key, child in node.items()]
        elif isinstance(node, (list, tuple)):
            items = [(str(number), child) for number, child in enumerate(node)]
        elif node is not None:
            yield prefix, node
            continue
        else:
            continue
        left += [(f"{prefix}.{key}" if prefix else key, child) for key, child in reversed(items)]


def flat_tensors(path: Path, tree: Any) -> dict[str, np.ndarray]:
    """`flatten` of a tree of arrays. Raises StoreError, which names `path`, for a name that stands there twice."""
    tensors: dict[str, np.ndarray] = {}
    for name, array in flatten(tree):
        if name in tensors:
            raise StoreError(f"{path}: expected different names once levels are joined by dots, got {name!r} twice")
        tensors[name] = np.asarray(array)
    return tensors


def nest(path: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """A tree of dicts. Raises StoreError, which names `path`, for empty parts of names, and names inside others."""
    tree: dict[str, Any] = {}
    for name in sorted(arrays):  # a parent sorts before its children
        *levels, leaf = name.split(".")
        if "" in (*levels, leaf):
            raise StoreError(f"{path}: expected names without empty parts, got {name!r}")
        node = tree
        for depth, level in enumerate(levels):
            node = node.setdefault(level, {})
            if not isinstance(node, dict):
                inner = ".".join(levels[: depth + 1])
                raise StoreError(f"{path}: expected {inner!r} to be a tensor or a level, got {name!r} inside of it")
        node[leaf] = arrays[name]
    return tree
