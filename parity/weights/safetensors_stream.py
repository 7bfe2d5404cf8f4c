"""A safetensors file written tensor by tensor: what is converted need never be in memory as a whole.

The header stands first in the file and says shapes that are known last, so room is left for it; the format allows it to
end in blanks. Each tensor's SHA-256 is noted in it, and that of the rest of the header; our reader checks them.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from parity.weights.checkpoint import StoreError, native
from parity.weights.hashes import BESIDE, BLOCK, HASHES, as_memory, hash_beside
from parity.weights.problems import TensorSpec

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
"""dtype to its name in the format."""

_ENTRY = 320  # bytes of the header for a tensor besides its name: dtype, up to eight axes, offsets, hash


class SafetensorsStream:
    """An open file. Used as a context manager; it is whole when that has ended without an error."""

    def __init__(self, path: Path, names: Iterable[str], metadata: Mapping[str, str]) -> None:
        self._path, self._metadata = path, dict(metadata)
        self._header: dict[str, Any] = {}
        self._hashes: dict[str, str] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._position = 0
        room = len(json.dumps(self._metadata)) + sum(2 * len(json.dumps(name)) + _ENTRY for name in names) + 512
        self._room = -(-room // 8) * 8
        self._file = path.open("wb")
        self._file.seek(8 + self._room)

    def add(self, name: str, array: np.ndarray) -> None:
        """Writes one tensor. Raises StoreError on a dtype that the format lacks."""
        array = native(array)
        if array.dtype.name not in CODES:
            raise StoreError(f"{self._path}: expected {name!r} of a safetensors dtype, got {array.dtype}")
        sha256 = hashlib.sha256()
        data = as_memory(array)
        for start in range(0, len(data), BLOCK):
            block = data[start : start + BLOCK]
            sha256.update(block)
            self._file.write(block)
        end = self._position + len(data)
        self._header[name] = {
            "dtype": CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [self._position, end],
        }
        self._position, self._hashes[name], self._specs[name] = end, sha256.hexdigest(), TensorSpec.of(array)

    def __enter__(self) -> "SafetensorsStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._write_header()
                self._file.flush()
                os.fsync(self._file.fileno())  # here, while other files are still being computed

    def _write_header(self) -> None:
        hashes = json.dumps({BESIDE: hash_beside(self._metadata, self._specs)} | self._hashes)
        text = {"__metadata__": {**self._metadata, HASHES: hashes}}
        header = json.dumps(text | self._header, separators=(",", ":")).encode()
        if len(header) > self._room:
            raise StoreError(f"{self._path}: expected a header of at most {self._room} bytes, got {len(header)}")
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
