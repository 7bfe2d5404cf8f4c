"""Weights in Orbax directories: a pytree that any JAX user restores with Orbax alone.

Dots in names are levels of the tree: `encoder.final_norm.scale` is `tree["encoder"]["final_norm"]["scale"]`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from parity.weights.checkpoint import Checkpoint, StoreError, native
from parity.weights.hashes import HASHES, Hashes, hashes_of
from parity.weights.levels import flat_tensors, flatten, nest

_ALIASES = "aliases"  # their place in Orbax's custom metadata, beside the free text


def read_orbax(path: Path) -> Checkpoint:
    """The pytree saved in `path`, flattened; lists and tuples give `layers.0`. Everything arrives as numpy arrays.

    The dtypes are those in the file: restored as jax arrays, float64 would turn into float32 while x64 is off.
    """
    import jax
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        try:
            saved = checkpointer.metadata(path.absolute())
        except Exception as error:  # Orbax documents none; a damaged directory gives ValueError, KeyError, OSError
            raise StoreError(f"{path}: expected a pytree saved by Orbax, got {error}") from error
        tree = saved.item_metadata.tree if hasattr(saved.item_metadata, "tree") else None
        if tree is None:
            raise StoreError(f"{path}: expected a pytree saved by Orbax, got {_describe(path)}")
        for name, leaf in flatten(tree):
            if not isinstance(leaf, ocp.metadata.ArrayMetadata):  # of which Python's numbers are a subclass
                kind = type(leaf).__name__.removesuffix("Metadata").lower()
                raise StoreError(f"{path}: expected only tensors, got {name!r}, a {kind}")
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        try:
            restored = checkpointer.restore(path.absolute(), restore_args=as_numpy)
        except Exception as error:  # tensorstore's errors name the tensor; their types vary
            raise StoreError(f"{path}: expected whole tensors, got damaged ones: {error}") from error
    tensors = flat_tensors(path, restored)
    notes = dict(saved.custom_metadata or {})
    aliases = notes.pop(_ALIASES, {})
    metadata = {key: note if isinstance(note, str) else json.dumps(note) for key, note in notes.items()}
    hashes = Hashes(path, metadata.pop(HASHES, None), tensors)
    try:
        checkpoint = Checkpoint(tensors=tensors, aliases=dict(aliases), metadata=metadata)
    except (TypeError, ValueError) as error:
        raise StoreError(f"{path}: expected aliases of its tensors, got {aliases!r}") from error
    hashes.check_all(tensors, {**metadata, **checkpoint.aliases})
    return checkpoint


def write_orbax(path: Path, checkpoint: Checkpoint) -> None:
    """Saves a nested dict of numpy arrays, with their hashes in Orbax's custom metadata.

    Raises StoreError on text, empty tensors, and names inside one another.
    """
    import orbax.checkpoint as ocp

    for entry in {_ALIASES, HASHES} & checkpoint.metadata.keys():
        raise StoreError(f"{path}: expected metadata without {entry!r}, which has its own place, got it")
    arrays = {name: native(array) for name, array in checkpoint.tensors.items()}
    for name, array in arrays.items():
        if array.dtype.kind in "OSUMm":
            raise StoreError(f"{path}: expected {name!r} of a numeric dtype, got {array.dtype}")
        if array.size == 0:
            raise StoreError(f"{path}: expected tensors with elements, since Orbax has no others, got {name!r} empty")
    notes: dict[str, Any] = dict(checkpoint.metadata)
    notes[HASHES] = hashes_of(arrays, {**checkpoint.metadata, **checkpoint.aliases})
    if checkpoint.aliases:
        notes[_ALIASES] = dict(checkpoint.aliases)
    tree = nest(path, arrays)
    with ocp.PyTreeCheckpointer() as checkpointer:
        try:
            checkpointer.save(path.absolute(), tree, custom_metadata=notes)
        except ValueError as error:
            raise StoreError(f"{path}: expected what Orbax can save, got {error}") from error


def _describe(path: Path) -> str:
    if (path / "_METADATA").exists():
        return "a damaged one"
    inside = sorted(child.parent.name for child in path.glob("*/_METADATA"))
    return "a directory without one" + (f"; one is in {', '.join(inside)}" if inside else "")
