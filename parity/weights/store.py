"""Weights in files: safetensors (one, or shards), torch's `.pt`, Flax's `.msgpack`, Orbax. Bits survive, NaN's too.

A file is written beside its target and renamed when it is whole: whoever looks sees the old one or the new one, and a
failure leaves nothing behind.
"""

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from parity.weights.checkpoint import Checkpoint, StoreError
from parity.weights.sharded import has_weights, read_weights, weights_file
from parity.weights.store_msgpack import read_msgpack, write_msgpack
from parity.weights.store_orbax import read_orbax, write_orbax
from parity.weights.store_safetensors import read_safetensors, write_safetensors
from parity.weights.store_torch import read_torch, write_torch

__all__ = ["Checkpoint", "StoreError", "read_tensors", "write_tensors"]

_READERS: dict[str, Callable[[Path], Checkpoint]] = {
    ".safetensors": read_safetensors,
    ".pt": read_torch,
    ".pth": read_torch,
    ".msgpack": read_msgpack,
}
_WRITERS: dict[str, Callable[[Path, Checkpoint], None]] = {
    ".safetensors": write_safetensors,
    ".pt": write_torch,
    ".pth": write_torch,
    ".msgpack": write_msgpack,
}


def read_tensors(path: Path | str, *, mapped: bool = False) -> Checkpoint:
    """The weights in `path`: a file is known by its suffix, a directory is Orbax's, or holds shards and their index.

    Only safetensors is read lazily. Its tensors are copies, and of shards, or with `mapped`, the file itself, mapped
    into memory and not to be written to.

    Raises FileNotFoundError, or StoreError that names the file (and tensor) where something is not a tensor, has a
    dtype without a numpy counterpart, is truncated, or is a pickle that would run code.
    """
    path = Path(path)
    if path.is_dir():
        return read_weights(weights_file(path)) if has_weights(path) else read_orbax(path)
    if not path.exists():
        raise FileNotFoundError(f"expected a file or directory of weights, got {path}, which does not exist")
    if path.suffix not in _READERS:
        raise StoreError(f"{path}: expected {', '.join(_READERS)} or an Orbax directory, got suffix {path.suffix!r}")
    return read_safetensors(path, mapped=mapped) if path.suffix == ".safetensors" else _READERS[path.suffix](path)


def write_tensors(path: Path | str, checkpoint: Checkpoint) -> None:
    """Writes `checkpoint`; a name without a suffix becomes an Orbax directory. What exists there is replaced.

    An alias is stored as a name, not as a second tensor. Raises StoreError on what the format cannot hold.
    """
    path = Path(path)
    if path.suffix not in _WRITERS and path.suffix:
        raise StoreError(f"{path}: expected {', '.join(_WRITERS)} or no suffix (Orbax), got suffix {path.suffix!r}")
    write = _WRITERS.get(path.suffix, write_orbax)
    if path.exists() and path.is_dir() != (write is write_orbax):
        kinds = ("a directory", "a file") if write is write_orbax else ("a file", "a directory")
        raise StoreError(f"{path}: expected {kinds[0]} to replace, got {kinds[1]}")
    if path.is_dir() and any(path.iterdir()) and not (path / "_METADATA").exists():
        raise StoreError(f"{path}: expected an Orbax checkpoint to replace, got a directory of other files")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        write(part, checkpoint)
        _replace(part, path)
    except StoreError as error:
        raise StoreError(str(error).replace(str(part), str(path))) from error
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)


def _replace(part: Path, path: Path) -> None:
    if not part.is_dir():
        with part.open("rb") as file:
            os.fsync(file.fileno())
    if not path.is_dir():
        part.replace(path)
        return
    # No system call replaces a full directory: between these two renames, the old one has another name.
    old = part.with_suffix(".old")
    path.rename(old)
    try:
        part.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old)
