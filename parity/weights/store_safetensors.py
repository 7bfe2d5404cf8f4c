"""Weights in safetensors files, read lazily; tied tensors as `safetensors.torch.save_model` marks them."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from parity.weights.checkpoint import Checkpoint, StoreError, native
from parity.weights.problems import TensorSpec

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}


class LazyTensors(Mapping[str, np.ndarray]):
    """The tensors of one safetensors file; each is read when asked for, and not kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = safetensors.safe_open(str(path), "np")
        except safetensors.SafetensorError as error:
            raise StoreError(f"{path}: expected a whole safetensors file, got {error}") from error
        self._names = dict.fromkeys(self._file.keys())

    @property
    def header(self) -> dict[str, str]:
        """The file's free text."""
        return dict(self._file.metadata() or {})

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
        self.spec(name)  # names the tensor where its dtype is unknown here
        try:
            return self._file.get_tensor(name)
        except safetensors.SafetensorError as error:
            raise StoreError(f"{self._path}: expected to read {name!r}, got {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_safetensors(path: Path) -> Checkpoint:
    """The file's tensors, lazily. A metadata entry whose key is no tensor and whose text is one's name is an alias."""
    tensors = LazyTensors(path)
    header = tensors.header
    aliases = {key: text for key, text in header.items() if text in tensors and key not in tensors}
    metadata = {key: text for key, text in header.items() if key not in aliases}
    return Checkpoint(tensors=tensors, aliases=aliases, metadata=metadata)


def write_safetensors(path: Path, checkpoint: Checkpoint) -> None:
    """Writes `path`. Raises StoreError on a dtype the format lacks, or metadata that would read as an alias."""
    for key, text in checkpoint.metadata.items():
        if text in checkpoint.tensors and key not in checkpoint.tensors:
            raise StoreError(f"{path}: expected free text in metadata {key!r}, got {text!r}, the name of a tensor")
        if key in checkpoint.aliases:
            raise StoreError(f"{path}: expected metadata beside aliases, got {key!r}, which is an alias")
    # The library writes the memory from the first element on: what is not contiguous would be scrambled.
    arrays = {name: native(array) for name, array in checkpoint.tensors.items()}
    for name, array in arrays.items():
        if array.dtype.name not in _DTYPES.values():
            raise StoreError(f"{path}: expected {name!r} of a safetensors dtype, got {array.dtype}")
    header = {**checkpoint.metadata, **checkpoint.aliases}
    safetensors.numpy.save_file(arrays, str(path), metadata=header or None)
