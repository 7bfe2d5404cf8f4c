"""What we write says of itself: the SHA-256 of each tensor, and one of everything that stands beside the tensors.

Bytes alone do not tell a float32 tensor from an int32 one, or (2, 3) from (3, 2), so the hash of what stands beside
covers names, dtypes, shapes and the free text.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parity.weights.checkpoint import StoreError, native
from parity.weights.damaged_json import parse_json
from parity.weights.problems import HasSpec, TensorSpec

HASHES = "sha256"
"""Entry of the free text: JSON, name to hash."""
BESIDE = "__metadata__"
"""Entry among the hashes, of what stands beside the tensors. Safetensors allows no tensor of this name."""

BLOCK = 1 << 24
"""Bytes hashed at a time, so that they are still in the cache when they are written."""


def as_memory(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, not copied."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def hash_of(array: np.ndarray) -> str:
    """Of a tensor's bytes, in C order and the machine's byte order."""
    data, sha256 = as_memory(native(array)), hashlib.sha256()
    for start in range(0, len(data), BLOCK):
        sha256.update(data[start : start + BLOCK])
    return sha256.hexdigest()


def hash_beside(text: Mapping[str, str], specs: Mapping[str, HasSpec]) -> str:
    """Of names, dtypes, shapes and the free text, in which aliases stand too."""
    tensors = {name: TensorSpec.of(spec) for name, spec in specs.items()}
    listed = {name: [spec.dtype.name, *map(int, spec.shape)] for name, spec in tensors.items()}
    return hashlib.sha256(json.dumps([dict(text), listed], sort_keys=True).encode()).hexdigest()


def hashes_of(tensors: Mapping[str, np.ndarray], text: Mapping[str, str]) -> str:
    """The entry `HASHES` for tensors that are all there."""
    return json.dumps({BESIDE: hash_beside(text, tensors)} | {name: hash_of(a) for name, a in tensors.items()})


class Hashes:
    """The hashes that a file carries, or none. Raises StoreError if they are damaged, or of other tensors."""

    def __init__(self, path: Path, text: str | None, names: Mapping[str, Any]) -> None:
        self._path = path
        try:
            self._hashes = parse_json(text) if text is not None else {}
        except ValueError as error:
            raise StoreError(f"{path}: expected hashes of tensors, got {error}") from error
        if not isinstance(self._hashes, dict) or (text is not None and self._hashes.keys() - {BESIDE} != names.keys()):
            raise StoreError(f"{path}: expected hashes of its tensors, got those of others")

    def check_beside(self, text: Mapping[str, str], specs: Mapping[str, HasSpec]) -> None:
        """Raises StoreError if names, dtypes, shapes or free text are not as they were written."""
        if BESIDE in self._hashes and hash_beside(text, specs) != self._hashes[BESIDE]:
            raise StoreError(
                f"{self._path}: expected the names, dtypes, shapes and text that were written, got others (sha256)"
            )

    def check(self, name: str, array: np.ndarray) -> None:
        """Raises StoreError if a tensor is not as it was written."""
        if name in self._hashes and hash_of(array) != self._hashes[name]:
            raise StoreError(f"{self._path}: expected {name!r} as it was written, got other bytes")

    def check_all(self, tensors: Mapping[str, np.ndarray], text: Mapping[str, str]) -> None:
        """Both, of a file that is read as a whole."""
        self.check_beside(text, tensors)
        for name, array in tensors.items():
            self.check(name, array)
