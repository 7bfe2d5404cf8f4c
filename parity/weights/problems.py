"""What does not fit between two sets of tensors, said so that the reader finds the counterpart at once."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

_WITH_CANDIDATES = 20  # problems; comparing names costs time by the square, and nobody reads more
_CANDIDATES = 3


class HasSpec(Protocol):
    """Anything with a shape and a dtype: TensorSpec, an array, jax.ShapeDtypeStruct."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""

    @property
    def dtype(self) -> Any:
        """Whatever np.dtype() takes."""


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor without its data."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, tensor: HasSpec) -> "TensorSpec":
        """The spec of anything that has a shape and a dtype."""
        return cls(tuple(tensor.shape), np.dtype(tensor.dtype))

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


def spec_of(tensors: Mapping[str, Any], name: str) -> TensorSpec:
    """Shape and dtype of one tensor; without reading it, where the mapping has a `spec` method (as lazy ones do)."""
    without_reading = getattr(tensors, "spec", None)
    return TensorSpec.of(tensors[name]) if without_reading is None else without_reading(name)


class MappingError(ValueError):
    """Everything that is wrong with one conversion. `problems` holds a line for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problem" + ("s" if len(self.problems) != 1 else "")
        super().__init__(f"expected every tensor to have one place on the other side, got {count}:\n" + self._lines())

    def _lines(self) -> str:
        return "\n".join(f"  - {problem}" for problem in self.problems)


class Candidates:
    """Likely counterparts of a name: names that look like it, tensors that have its shape and dtype."""

    def __init__(self, specs: Mapping[str, TensorSpec | None]) -> None:
        self._specs = specs
        self._answers_left = _WITH_CANDIDATES

    def near(self, name: str, spec: TensorSpec | None) -> str:
        """`; near: ...`, or nothing where no candidate is near or enough answers have been given."""
        if self._answers_left == 0 or not self._specs:
            return ""
        self._answers_left -= 1
        alike = difflib.get_close_matches(name, list(self._specs), n=_CANDIDATES)
        shaped = [other for other, known in self._specs.items() if spec and known == spec and other not in alike]
        found = [f"{other!r}{self._shape(other)}" for other in alike]
        found += [f"{other!r} (same shape and dtype)" for other in shaped[:_CANDIDATES]]
        return f"; near: {', '.join(found)}" if found else ""

    def _shape(self, name: str) -> str:
        spec = self._specs[name]
        return "" if spec is None else f" {spec}"


def compare_specs(
    got: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec], *, unused: Mapping[str, TensorSpec | None]
) -> list[str]:
    """Names, shapes and dtypes of `got` against `expected`, a line for each difference.

    `unused` are source tensors without a rule: likely counterparts of what is missing.
    """
    missing = {name: spec for name, spec in expected.items() if name not in got}
    unexpected = {name: spec for name, spec in got.items() if name not in expected}
    for_missing, for_unexpected = Candidates({**unexpected, **unused}), Candidates(missing)
    problems = [
        f"missing {name!r} {spec}: nothing gives it{for_missing.near(name, spec)}" for name, spec in missing.items()
    ]
    for name, spec in unexpected.items():
        problems.append(f"unexpected {name!r} {spec}: the target has no such name{for_unexpected.near(name, spec)}")
    for name in [name for name in got if name in expected]:
        if got[name].shape != expected[name].shape:
            problems.append(f"shape of {name!r}: expected {expected[name].shape}, got {got[name].shape}")
        if got[name].dtype != expected[name].dtype:
            problems.append(
                f"dtype of {name!r}: expected {expected[name].dtype}, got {got[name].dtype}; "
                "a dtype is never changed here: cast it before"
            )
    return problems


def quote(names: Sequence[str]) -> str:
    """`'a'`, or `('a', 'b')`."""
    quoted = ", ".join(repr(name) for name in names)
    return quoted if len(names) == 1 else f"({quoted})"
