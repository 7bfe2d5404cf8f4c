"""Weights in msgpack files as `flax.serialization` writes them, and older Flax's `.msgpack` of `transformers`.

Dots in names are levels of the tree. We write {"params": tree, "metadata": {...}}, and into the metadata, beside the
free text, the SHA-256 of each tensor: `flax.serialization.from_bytes({"params": ...}, data)` reads it as it is. The
file is read and written as a whole; an array beyond 1 GiB is in pieces, as flax has it.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from parity.weights.checkpoint import Checkpoint, StoreError, native
from parity.weights.damaged_json import parse_json
from parity.weights.hashes import HASHES, Hashes, hashes_of
from parity.weights.levels import flat_tensors, flatten, nest

PARAMS, METADATA = "params", "metadata"
_ALIASES = "aliases"
_NUMBERS = (np.ndarray, np.generic, bool, int, float, complex)


def read_msgpack(path: Path) -> Checkpoint:
    """The tensors under `params`, or all of the tree if it has no such level. What else stands beside `params`, such
    as an optimizer's state, is not weights.

    Raises StoreError for a damaged file, for what is no tensor, and for tensors with other bytes than their hash says.
    """
    tree = _restore(path)
    metadata: dict[str, str] = {}
    if isinstance(tree.get(PARAMS), dict):
        metadata = _texts(path, tree.get(METADATA, {}))
        tree = tree[PARAMS]
    for name, leaf in flatten(tree):
        if not isinstance(leaf, _NUMBERS) or np.asarray(leaf).dtype.kind in "OSUMm" or np.asarray(leaf).dtype.names:
            raise StoreError(f"{path}: expected only tensors, got {name!r}, a {type(leaf).__name__}")
    tensors = flat_tensors(path, tree)
    hashes, aliases = metadata.pop(HASHES, None), _names(path, metadata.pop(_ALIASES, "{}"))
    Hashes(path, hashes, tensors).check_all(tensors, {**metadata, **aliases})
    try:
        return Checkpoint(tensors=tensors, aliases=aliases, metadata=metadata)
    except ValueError as error:
        raise StoreError(f"{path}: {error}") from error


def write_msgpack(path: Path, checkpoint: Checkpoint) -> None:
    """Raises StoreError on text, on names inside one another, and on metadata with names that have their own place."""
    from flax.serialization import msgpack_serialize

    taken = sorted({HASHES, _ALIASES} & checkpoint.metadata.keys())
    if taken:
        raise StoreError(f"{path}: expected metadata without {taken[0]!r}, which has its own place, got it")
    arrays = {name: native(array) for name, array in checkpoint.tensors.items()}
    for name, array in arrays.items():
        if array.dtype.kind in "OSUMm":
            raise StoreError(f"{path}: expected {name!r} of a numeric dtype, got {array.dtype}")
    hashes = hashes_of(arrays, {**checkpoint.metadata, **checkpoint.aliases})
    metadata = {**checkpoint.metadata, HASHES: hashes}
    if checkpoint.aliases:
        metadata[_ALIASES] = json.dumps(dict(checkpoint.aliases))
    path.write_bytes(msgpack_serialize({PARAMS: nest(path, arrays), METADATA: metadata}, in_place=True))


def _restore(path: Path) -> dict[str, Any]:
    from flax.serialization import msgpack_restore

    try:
        tree = msgpack_restore(path.read_bytes())
    except OSError:
        raise
    except Exception as error:  # msgpack's own, and numpy's for bytes that are no array
        message = f"{path}: expected a whole file by flax.serialization, got {error or type(error).__name__}"
        raise StoreError(message) from error
    if not isinstance(tree, dict):
        raise StoreError(f"{path}: expected a tree of tensors, got a {type(tree).__name__}")
    return tree


def _texts(path: Path, metadata: Any) -> dict[str, str]:
    """Free text; a file by others may have anything of that name."""
    items = metadata.items() if isinstance(metadata, dict) else ()
    return {key: text for key, text in items if isinstance(key, str) and isinstance(text, str)}


def _names(path: Path, text: str) -> dict[str, str]:
    try:
        names = parse_json(text)
    except ValueError as error:
        raise StoreError(f"{path}: expected {_ALIASES} of tensors, got {error}") from error
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise StoreError(f"{path}: expected {_ALIASES} of tensors, got {text[:40]!r}")
    return names
