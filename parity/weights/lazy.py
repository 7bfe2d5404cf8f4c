"""The other side of a mapping, tensor by tensor: each is converted when it is asked for, and not kept."""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np

from parity.weights.mapping import Step, WeightMapping
from parity.weights.problems import TensorSpec, spec_of
from parity.weights.rules import Kind


class Converted(Mapping[str, np.ndarray]):
    """What `WeightMapping.apply` gives. Raises MappingError where it would, for names; for values when they are read.

    Aliases are checked to be equal to their tensors when one of these is read.
    """

    def __init__(self, mapping: WeightMapping, tensors: Mapping[str, np.ndarray], *, kind: Kind = "value") -> None:
        self._tensors, self._kind = tensors, kind
        parts = [part for step in mapping.plan(tensors) for part in step.parts()]
        self._steps: dict[str, Step] = {name: part for part in parts for name in part.given}

    def source(self, name: str) -> str:
        """The tensor that a tensor is made from, or the first of several."""
        return self._steps[name].sources[0]

    def dtype(self, name: str) -> np.dtype:
        """Of a tensor: operations only move elements."""
        return spec_of(self._tensors, self.source(name)).dtype

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor, out of the shapes of what it is made from: operations only move elements."""
        step = self._steps[name]
        specs = [spec_of(self._tensors, source) for source in step.sources]
        return sum(int(np.prod(spec.shape)) * spec.dtype.itemsize for spec in specs) // len(step.targets)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._steps[name].apply(self._tensors, kind=self._kind)[name]

    def __contains__(self, name: object) -> bool:
        return name in self._steps

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


class OneArray(Mapping[str, np.ndarray]):
    """The same array under several names, made when one of them is first read."""

    def __init__(self, names: Iterable[str], make: Callable[[], np.ndarray]) -> None:
        self._names, self._make = dict.fromkeys(names), functools.cache(make)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return self._make()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Joined(Mapping[str, np.ndarray]):
    """Several mappings as one, without reading from them. Raises ValueError for a name in two of them."""

    def __init__(self, *parts: Mapping[str, np.ndarray]) -> None:
        self._places = {name: part for part in parts for name in part}
        if len(self._places) < sum(map(len, parts)):
            twice = sorted(name for name in self._places if sum(name in part for part in parts) > 1)
            raise ValueError(f"expected every tensor once, got {', '.join(twice)} twice")

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype, without reading where its part can say it."""
        return spec_of(self._places[name], name)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._places[name][name]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class Overlay(Mapping[str, np.ndarray]):
    """A mapping without some of its names and with others besides."""

    def __init__(
        self, base: Mapping[str, np.ndarray], *, without: Collection[str] = (), more: Mapping[str, np.ndarray]
    ) -> None:
        self._base, self._more = base, dict(more)
        self._names = dict.fromkeys([name for name in base if name not in without and name not in more] + list(more))

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype, without reading where the base can say it."""
        return spec_of(self._more if name in self._more else self._base, name)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return self._more[name] if name in self._more else self._base[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
