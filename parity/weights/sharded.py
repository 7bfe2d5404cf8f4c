"""Checkpoints in several files: shards of safetensors (or of torch's `.bin`) and an index that says which has what."""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import numpy as np

from parity.weights.checkpoint import Checkpoint, StoreError
from parity.weights.damaged_json import parse_json
from parity.weights.lazy import Joined
from parity.weights.safetensors_stream import SafetensorsStream
from parity.weights.store_safetensors import read_safetensors
from parity.weights.store_torch import read_torch

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NAMES = (WHOLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")


def has_weights(folder: Path) -> bool:
    """Whether `weights_file` finds any."""
    return any((folder / name).is_file() for name in _NAMES)


def weights_file(folder: Path) -> Path:
    """What holds a folder's weights: one file, or the index of several. Raises FileNotFoundError if there is none."""
    for name in _NAMES:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{folder}: expected weights in one of {', '.join(_NAMES)}, found none")


def read_weights(file: Path) -> Checkpoint:
    """One file, or all that an index names, lazily where it is safetensors, mapped into memory.

    Raises StoreError for an index that is damaged, or does not say where every tensor stands.
    """
    if file.suffix != ".json":
        return _read(file)
    try:
        places = parse_json(file.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{file}: expected an index with a weight_map, got {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise StoreError(f"{file}: expected files beside the index, got {name!r}")
        if not _is_there(file.parent / name):
            raise StoreError(f"{file}: expected {name!r} beside it, found no such file")
    parts = {name: _read(file.parent / name) for name in names}
    for name, part in parts.items():
        here = {tensor for tensor, place in places.items() if place == name}
        if here != part.tensors.keys() | part.aliases.keys():
            odd = sorted(here ^ (part.tensors.keys() | part.aliases.keys()))
            raise StoreError(f"{file}: expected {name} to hold what the index says, got a difference in {odd[0]!r}")
    aliases = {alias: tensor for part in parts.values() for alias, tensor in part.aliases.items()}
    return Checkpoint(
        tensors=Joined(*(part.tensors for part in parts.values())), aliases=aliases, metadata=_metadata(file, parts)
    )


def _metadata(file: Path, parts: Mapping[str, Checkpoint]) -> dict[str, str]:
    every: dict[str, str] = {}
    for name, part in parts.items():
        for key, text in part.metadata.items():
            if every.setdefault(key, text) != text:
                raise StoreError(f"{file}: expected the same {key!r} in every file, got another in {name}")
    return every


def _is_there(file: Path) -> bool:
    try:
        return file.is_file()
    except (OSError, ValueError):  # a name that no file can have: too long, or with a null in it
        return False


def _read(file: Path) -> Checkpoint:
    return read_safetensors(file, mapped=True) if file.suffix == ".safetensors" else read_torch(file)


def write_shards(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    nbytes: Callable[[str], int],
    max_bytes: int,
    aliases: Mapping[str, str] = MappingProxyType({}),
    metadata: Mapping[str, str] = MappingProxyType({}),
    workers: int | None = None,
    progress: Callable[[str, int], None] = lambda name, nbytes: None,
) -> list[Path]:
    """Writes into a folder, which is made, one file, or shards of at most so many bytes and their index; returns them.

    Several shards are written side by side. `nbytes` says how large a tensor will be; `progress` is told of each that
    is written, from any thread. A tensor that is larger has a shard of its own. `aliases` are noted beside their
    tensors, `metadata` in every file.
    """
    folder.mkdir(exist_ok=True)
    shards = _planned(list(tensors), nbytes, max_bytes)
    names = [WHOLE]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]

    def write(name: str, shard: Sequence[str]) -> None:
        here = {alias: tensor for alias, tensor in aliases.items() if tensor in shard}
        with SafetensorsStream(folder / name, shard, {"format": "pt", **metadata, **here}) as stream:
            for tensor in shard:
                array = tensors[tensor]
                stream.add(tensor, array)
                progress(tensor, array.nbytes)

    # One more than there are cores, because one waits for the disk.
    with ThreadPoolExecutor(workers or min(len(shards), 1 + (os.cpu_count() or 1))) as pool:
        for written in [pool.submit(write, *pair) for pair in zip(names, shards, strict=True)]:
            written.result()
    files = [folder / name for name in names]
    if len(shards) > 1:
        places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        places |= {alias: places[tensor] for alias, tensor in aliases.items()}
        total = sum(nbytes(tensor) for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        files.append(folder / INDEX)
    return files


def _planned(names: Sequence[str], nbytes: Callable[[str], int], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = max_bytes
    for name in names:
        size = nbytes(name)
        if size > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


class Beside:
    """A path to write to beside the one that is meant, which it is moved to when all went well.

    An error leaves nothing behind, and what was there as it was. Raises FileExistsError if something is there that is
    not to be overwritten.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        if path.exists() and not overwrite:
            raise FileExistsError(f"expected a target that does not exist, got {path}; overwriting must be asked for")
        self._path = path
        self._part = path.with_name(f".{uuid.uuid4().hex[:8]}-{path.name}")

    def __enter__(self) -> Path:
        self._new_parents = [folder for folder in self._path.parents if not folder.exists()]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return self._part

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            if kind is None:
                self._replace()
        finally:
            _remove(self._part)
            if not self._path.exists():
                for folder in self._new_parents:
                    with contextlib.suppress(OSError):  # of a folder in which there is something else by now
                        folder.rmdir()

    def _replace(self) -> None:
        for file in [self._part, *self._part.rglob("*")]:
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        if not (self._path.is_dir() or self._part.is_dir()) or not self._path.exists():
            self._part.replace(self._path)
            return
        # No system call replaces a full directory: between these two renames, the old one has another name.
        old = self._part.with_name(f"{self._part.name}.old")
        self._path.rename(old)
        try:
            self._part.rename(self._path)
        except OSError:
            old.rename(self._path)
            raise
        _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
