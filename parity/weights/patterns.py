"""Names of tensors as patterns: which names a rule takes, and which it gives.

`{i}` stands for one dotted component or a part of one, `{path*}` for one or more whole components, and `{q,k,v}` is
shorthand for several names in that order. A placeholder has the same text wherever it stands in a rule.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable

_BRACES = re.compile(r"\{([^{}]*)\}")
_PLACEHOLDER = re.compile(r"([A-Za-z_]\w*)(\*?)")

Bindings = tuple[tuple[str, str], ...]
"""The text of each placeholder, sorted by its name."""


def expand_choices(pattern: str) -> tuple[str, ...]:
    """`a.{q,k}.b` -> (`a.q.b`, `a.k.b`). Raises ValueError if more than one list of choices stands in the pattern."""
    choices = [found for found in _BRACES.finditer(pattern) if "," in found[1]]
    if len(choices) > 1:
        raise ValueError(f"expected at most one {{a,b}} list in a pattern, got {pattern!r}")
    if not choices:
        return (pattern,)
    (found,) = choices
    names = tuple(pattern[: found.start()] + choice.strip() + pattern[found.end() :] for choice in found[1].split(","))
    if len(set(names)) < len(names):
        raise ValueError(f"expected different choices in {found[0]}, got {pattern!r}")
    return names


@dataclasses.dataclass(frozen=True)
class Pattern:
    """One name with placeholders, its lists of choices expanded.

    Raises ValueError on unknown syntax in braces, on unmatched braces, or if `{path*}` is not a whole component.
    """

    text: str

    def __post_init__(self) -> None:
        if not self.text or set("{}") & set(_BRACES.sub("", self.text)):
            raise ValueError(f"expected a name with matching braces, got {self.text!r}")
        for found in _BRACES.finditer(self.text):
            placeholder = _PLACEHOLDER.fullmatch(found[1])
            if placeholder is None:
                raise ValueError(
                    f"expected {{name}}, {{name*}} or {{a,b}} in a pattern, got {found[0]} in {self.text!r}"
                )
            around = self.text[: found.start()][-1:] + self.text[found.end() :][:1]
            if placeholder[2] and around.strip("."):
                raise ValueError(f"expected {found[0]} to stand for whole components, got {self.text!r}")

    @functools.cached_property
    def placeholders(self) -> frozenset[str]:
        """The placeholders as written, `path*` with its star."""
        return frozenset(found[1] for found in _BRACES.finditer(self.text))

    @functools.cached_property
    def _regex(self) -> re.Pattern[str]:
        parts, seen, end = [], set(), 0
        for found in _BRACES.finditer(self.text):
            name = found[1].rstrip("*")
            parts.append(re.escape(self.text[end : found.start()]))
            end = found.end()
            if name in seen:
                parts.append(f"(?P={name})")
            elif found[1].endswith("*"):
                parts.append(rf"(?P<{name}>[^.]+(?:\.[^.]+)*)")
            else:
                parts.append(f"(?P<{name}>[^.]+)")
            seen.add(name)
        return re.compile("".join([*parts, re.escape(self.text[end:])]))

    def match(self, name: str) -> Bindings | None:
        """What each placeholder stands for in `name`, or None if the pattern does not fit."""
        found = self._regex.fullmatch(name)
        return None if found is None else tuple(sorted(found.groupdict().items()))

    def fill(self, bindings: Bindings) -> str:
        """The name with every placeholder replaced by its text."""
        texts = dict(bindings)
        return _BRACES.sub(lambda found: texts[found[1].rstrip("*")], self.text)


class Index:
    """Numbered patterns, those without placeholders found at once: a derived mapping has a rule for every tensor."""

    def __init__(self, patterns: Iterable[tuple[int, Pattern]]) -> None:
        self._literal: dict[str, list[int]] = {}
        self._others: list[tuple[int, Pattern]] = []
        for number, pattern in patterns:
            if pattern.placeholders:
                self._others.append((number, pattern))
            else:
                self._literal.setdefault(pattern.text, []).append(number)

    def hits(self, name: str) -> list[tuple[int, Bindings]]:
        """The number and the bindings of every pattern that fits, in the order of the numbers."""
        found: list[tuple[int, Bindings]] = [(number, ()) for number in self._literal.get(name, ())]
        for number, pattern in self._others:
            bindings = pattern.match(name)
            if bindings is not None:
                found.append((number, bindings))
        return sorted(found, key=lambda hit: hit[0])
