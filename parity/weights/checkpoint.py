"""What a file of weights holds, whatever its format."""

import dataclasses
from collections.abc import Iterator, Mapping

import ml_dtypes  # noqa: F401  (teaches numpy the name "bfloat16")
import numpy as np

from parity.weights.problems import TensorSpec, spec_of


class StoreError(ValueError):
    """A file that cannot be read or written as asked. The message names the file and, where it can, the tensor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Named tensors, each once, their second names, and free text.

    Raises ValueError if an alias is also a tensor, or does not name one.
    """

    tensors: Mapping[str, np.ndarray]
    """May be lazy: a tensor is then read when asked for, and its `spec(name)` gives shape and dtype without reading."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """{second name of a tied tensor: its name in `tensors`}."""
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for alias, name in self.aliases.items():
            if alias in self.tensors or name not in self.tensors:
                raise ValueError(f"expected alias {alias!r} to be a second name of a tensor, got {name!r}")

    def with_aliases(self) -> Mapping[str, np.ndarray]:
        """Every name, aliases too, as in torch's state dict: an alias gives its tensor. As lazy as `tensors`."""
        return _WithAliases(self)


class _WithAliases(Mapping[str, np.ndarray]):
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors = checkpoint.tensors
        self._names = dict(zip(checkpoint.tensors, checkpoint.tensors, strict=True)) | dict(checkpoint.aliases)

    def spec(self, name: str) -> TensorSpec:
        return spec_of(self._tensors, self._names[name])

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors[self._names[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def native(array: np.ndarray) -> np.ndarray:
    """The array C-contiguous and in the machine's byte order, its rank kept (0 too); copied only if it must be."""
    array = np.asarray(array, order="C")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
