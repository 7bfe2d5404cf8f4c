"""The fields of a foreign config, each of which is accounted for: used, ignored with a reason, or refused."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class FieldError(ValueError):
    """A config that makes no model of ours. The message names file, field, what was expected and what was given."""


@dataclasses.dataclass
class Fields:
    """What a config file says, with the defaults of the class that reads it, and what has become of each field.

    `finish` raises FieldError for those that nobody asked for: what is not known may change what the model computes.
    """

    values: Mapping[str, Any]
    file: str
    """What errors call it."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the fields that the file leaves out."""
    used: dict[str, Any] = dataclasses.field(default_factory=dict, init=False)
    ignored: dict[str, str] = dataclasses.field(default_factory=dict, init=False)
    """Field to reason."""

    def get(self, name: str) -> Any:
        """The value, which thereby is used. Raises FieldError if there is none."""
        self.used[name] = self._value(name)
        return self.used[name]

    def number(self, name: str, *, least: float = 0) -> Any:
        """A number of at least so much."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
            raise self.error(name, f"a number of at least {least}")
        return value

    def integer(self, name: str, *, least: int = 0, most: int | None = None) -> int:
        """An integer of at least so much, and of at most so much."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"an integer of at least {least}")
        if most is not None and value > most:
            raise self.error(name, f"an integer of at most {most}")
        return value

    def flag(self, name: str) -> bool:
        """True or False."""
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, choices: Mapping[str, T]) -> T:
        """What the value stands for."""
        value = self.get(name)
        if not isinstance(value, str) or value not in choices:
            raise self.error(name, f"one of {', '.join(choices)}")
        return choices[value]

    def same(self, name: str, other: str) -> None:
        """Raises FieldError unless both fields have the same value."""
        one, two = self.get(name), self.get(other)
        if type(one) is not type(two) or one != two:
            raise self.error(name, f"the same as {other} ({self._value(other)!r})")

    def expect(self, name: str, *expected: Any, why: str = "") -> None:
        """Raises FieldError if the field is there and has none of these values."""
        if name in self.values or name in self.defaults:
            value = self.get(name)
            if not any(value == one and _kind(value) is _kind(one) for one in expected):
                raise self.error(name, " or ".join(repr(one) for one in expected) + (f": {why}" if why else ""))

    def ignore(self, names: Iterable[str], reason: str) -> None:
        """Fields that do not change what the model computes."""
        self.ignored |= {name: reason for name in names if name in self.values}

    def finish(self) -> None:
        """Raises FieldError for the fields that are left."""
        unknown = sorted(self.values.keys() - self.used.keys() - self.ignored.keys())
        if unknown:
            listed = ", ".join(f"{name}={self.values[name]!r}" for name in unknown)
            raise FieldError(f"{self.file}: expected fields that are known, got {listed}")

    def error(self, name: str, expected: str) -> FieldError:
        """An error that names the field."""
        return FieldError(f"{self.file}: {name}: expected {expected}, got {self._value(name)!r}")

    def _value(self, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        if name in self.defaults:
            return self.defaults[name]
        raise FieldError(f"{self.file}: expected a field {name}, found none")


def _kind(value: Any) -> type:
    """JSON has one kind of number, and true is none."""
    return float if type(value) is int else type(value)
