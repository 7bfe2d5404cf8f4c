"""Weights in safetensors files, read lazily; tied tensors as `safetensors.torch.save_model` marks them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import safetensors

from parity.weights.checkpoint import Checkpoint, StoreError
from parity.weights.hashes import HASHES, Hashes
from parity.weights.problems import TensorSpec
from parity.weights.safetensors_stream import CODES, SafetensorsStream

_DTYPES = {code: dtype for dtype, code in CODES.items()}


class LazyTensors(Mapping[str, np.ndarray]):
    """The tensors of one safetensors file; each is read when asked for, and not kept.

    Where the file has their hashes (ours do) a tensor with other bytes raises StoreError, and another header does so
    when the file is opened. With `mapped` a tensor is the file itself, mapped into memory and not to be written to, and
    checked once; otherwise a copy, of which each is.
    """

    def __init__(self, path: Path, *, mapped: bool = False) -> None:
        self._path = path
        try:
            self._file = safetensors.safe_open(str(path), "np")
        except safetensors.SafetensorError as error:
            raise StoreError(f"{path}: expected a whole safetensors file, got {error}") from error
        self._names = dict.fromkeys(self._file.keys())
        self._free_text = dict(self._file.metadata() or {})
        self._hashes = Hashes(path, self._free_text.get(HASHES), self._names)
        self._hashes.check_beside(self.header, {name: self.spec(name) for name in self._names})
        self._places = _Places(path) if mapped else None
        self._checked: set[str] = set()

    @property
    def header(self) -> dict[str, str]:
        """The file's free text, without the hashes."""
        return {key: text for key, text in self._free_text.items() if key != HASHES}

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype out of the header."""
        if name not in self._names:
            raise KeyError(name)
        piece = self._file.get_slice(name)
        code = piece.get_dtype()
        if code not in _DTYPES:
            raise StoreError(f"{self._path}: expected {name!r} to be one of {', '.join(_DTYPES)}, got {code}")
        return TensorSpec(tuple(piece.get_shape()), np.dtype(_DTYPES[code]))

    def __getitem__(self, name: str) -> np.ndarray:
        spec = self.spec(name)  # names the tensor where its dtype is unknown here
        try:
            array = self._file.get_tensor(name) if self._places is None else self._places.array(name, spec)
        except safetensors.SafetensorError as error:
            raise StoreError(f"{self._path}: expected to read {name!r}, got {error}") from error
        if name in self._checked:
            return array
        self._hashes.check(name, array)
        if self._places is not None:
            self._checked.add(name)
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Places:
    """Where tensors stand in a file that safetensors has found whole."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._header = json.loads(file.read(length))
        self._data = np.memmap(path, np.uint8, "r", offset=8 + length) if path.stat().st_size > 8 + length else None

    def array(self, name: str, spec: TensorSpec) -> np.ndarray:
        start, end = self._header[name]["data_offsets"]
        if self._data is None or start == end:
            return np.zeros(spec.shape, spec.dtype)
        data = self._data[start:end].view(np.ndarray)
        aligned = data if start % spec.dtype.itemsize == 0 else data.copy()
        return aligned.view(spec.dtype).reshape(spec.shape)


def read_safetensors(path: Path, *, mapped: bool = False) -> Checkpoint:
    """The file's tensors, lazily. A metadata entry whose key is no tensor and whose text is one's name is an alias."""
    tensors = LazyTensors(path, mapped=mapped)
    header = tensors.header
    aliases = {key: text for key, text in header.items() if text in tensors and key not in tensors}
    metadata = {key: text for key, text in header.items() if key not in aliases}
    return Checkpoint(tensors=tensors, aliases=aliases, metadata=metadata)


def write_safetensors(path: Path, checkpoint: Checkpoint) -> None:
    """Writes `path`, one tensor after the other. Raises StoreError on a dtype the format lacks, or metadata that would
    read as an alias."""
    for key, text in checkpoint.metadata.items():
        if text in checkpoint.tensors and key not in checkpoint.tensors:
            raise StoreError(f"{path}: expected free text in metadata {key!r}, got {text!r}, the name of a tensor")
        if key in checkpoint.aliases:
            raise StoreError(f"{path}: expected metadata beside aliases, got {key!r}, which is an alias")
        if key == HASHES:
            raise StoreError(f"{path}: expected metadata without {HASHES!r}, which has its own place, got it")
    with SafetensorsStream(path, checkpoint.tensors, {**checkpoint.metadata, **checkpoint.aliases}) as stream:
        for name in checkpoint.tensors:
            stream.add(name, checkpoint.tensors[name])
