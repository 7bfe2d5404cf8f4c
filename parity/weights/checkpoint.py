"""What a file of weights holds, whatever its format."""

import dataclasses
from collections.abc import Mapping

import ml_dtypes  # noqa: F401  (teaches numpy the name "bfloat16")
import numpy as np


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

    def with_aliases(self) -> dict[str, np.ndarray]:
        """Every name, aliases too, as in torch's state dict: an alias gives the same array as its tensor."""
        every = dict(self.tensors)
        return every | {alias: every[name] for alias, name in self.aliases.items()}


def native(array: np.ndarray) -> np.ndarray:
    """The array C-contiguous and in the machine's byte order, its rank kept (0 too); copied only if it must be."""
    array = np.asarray(array, order="C")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
