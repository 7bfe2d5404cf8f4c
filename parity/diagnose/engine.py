"""Explains two results by one formula: the setting that gives the reference's, and the nearest that gives the port's.

A formula has *factors* (the form of gelu, the eps, which axis), each with options. The reference's setting is looked
for first: every combination of the factors that a correct model chooses freely (`free`), and up to two changes of the
others. From there, up to two changes must give the port's result. What changed is the diagnosis.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from parity.diagnose.diagnosis import Diagnosis, distance

Setting = tuple[int, ...]
"""The option chosen for each factor, by position."""

MATCH = 1e-10
"""Relative error up to which a formula gives a float64 result: equal mathematics differ by 1e-15 to 1e-13."""
FLOAT32_MATCH = 3e-6
"""The same where a side computed in float32."""
ROUNDING = 3e-13
"""No demand is finer than this, however small the difference that is to be explained."""
CLEARER = 30.0
"""So many times nearer than the difference itself a match must be: an explanation leaves nothing to explain."""
STARTS = 16
"""Settings of the reference from which the port's is looked for; of a factor that makes no difference, any will do."""
FEW = 4
MOST = 6000
"""Formulas evaluated at most, on either side."""
SECONDS = 10.0
"""And no longer than this, in seconds of CPU: those of a large model take milliseconds each."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One choice of a factor."""

    value: Any
    words: str
    """Completes `the port's ... is`."""
    fix: str = ""
    """How a port gets this option; empty: the factor's own words."""


@dataclasses.dataclass(frozen=True)
class Factor:
    """Something in which ports go wrong."""

    name: str
    kind: str | Callable[[Any, Any], str]
    """Of the diagnosis; or a function of (the reference's value, the port's)."""
    options: tuple[Option, ...]
    """The first is the usual one."""
    what: str = ""
    """Subject of the sentence, such as `eps`."""
    free: bool = False
    """A correct model may have any of these."""
    fix: str = "set {what} to {reference}"
    also_right: int = 0
    """Options after the first, of a factor that is not free, in which a correct reference may well be."""

    def kind_of(self, reference: Any, port: Any) -> str:
        """The name of this change."""
        return self.kind(reference, port) if callable(self.kind) else self.kind


@dataclasses.dataclass(frozen=True)
class Change:
    """A factor that the two sides have set differently."""

    factor: Factor
    reference: Option
    port: Option

    @property
    def kind(self) -> str:
        """Its name."""
        return self.factor.kind_of(self.reference.value, self.port.value)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The fewest changes that explain a difference, and others that are as few."""

    changes: tuple[Change, ...]
    others: tuple[tuple[Change, ...], ...] = ()

    def diagnosis(self, module: str) -> Diagnosis:
        """In words."""
        sentences, fixes = [], []
        for change in self.changes:
            what = change.factor.what or change.factor.name
            sentences.append(f"the port's {what} is {change.port.words}, the reference's {change.reference.words}")
            words = {"what": what, "reference": change.reference.words, "port": change.port.words}
            fixes.append(change.reference.fix or change.factor.fix.format(**words))
        sentence = "; ".join(sentences)
        others = dict.fromkeys(" and ".join(c.kind for c in other) for other in self.others)
        others.pop(" and ".join(c.kind for c in self.changes), None)
        return Diagnosis(
            kind=self.changes[0].kind,
            module=module,
            sentence=sentence[0].upper() + sentence[1:],
            fix="; ".join(fixes),
            alternatives=tuple(others),
        )


def explain(
    compute: Callable[[Mapping[str, Any]], np.ndarray | None],
    factors: Sequence[Factor],
    *,
    expected: np.ndarray,
    got: np.ndarray,
    edits: int = 2,
    unusual: int = 2,
) -> Explanation | None:
    """None if the formula does not give the reference's result, or nothing near it the port's.

    At most `edits` factors are changed from the reference to the port, at most `unusual` ones in the reference itself.
    `compute` takes {factor: value} and gives an array, or None where the options do not go together.
    """
    search = _Search(compute, tuple(f for f in factors if f.options), expected, got)
    starts = search.of_reference(unusual)
    for count in range(1, edits + 1):
        # Two changes at once from the likeliest settings alone: there are thousands of pairs.
        for start in starts if count == 1 else starts[:FEW]:
            found = search.of_port(start, count)
            if found:
                return Explanation(changes=found[0], others=tuple(found[1:]))
    return None


class _Search:
    def __init__(
        self,
        compute: Callable[[Mapping[str, Any]], np.ndarray | None],
        factors: tuple[Factor, ...],
        expected: np.ndarray,
        got: np.ndarray,
    ):
        self.compute, self.factors = compute, factors
        self.expected, self.got = _wide(expected), _wide(got)
        narrow = any(array.dtype.itemsize < 8 for array in (expected, got))
        between = distance(self.got, self.expected)
        self.match = min(FLOAT32_MATCH if narrow else MATCH, max(between / CLEARER, ROUNDING))
        self._errors: dict[Setting, tuple[float, float]] = {}
        self._end = time.process_time() + SECONDS

    def of_reference(self, unusual: int) -> list[Setting]:
        """Settings that give the reference's result: the most usual ones, and those with one free option more."""
        starts = list(itertools.islice(self._free(), MOST))
        for count in range(unusual + 1):
            found: list[Setting] = []
            edited = (s for start in starts for s in self._edited(start, count, only_bound=True))
            for setting in itertools.islice(edited, MOST):
                # Of a factor that makes no difference here any option gives the same, and the port may have another.
                if found and _options_used(setting) > _options_used(found[0]) + 1:
                    break
                if self._error(setting)[0] <= self.match:
                    found.append(setting)
            if found:
                return list(dict.fromkeys(found))[:STARTS]
        return []

    def _free(self) -> Iterator[Setting]:
        """Every combination of what a correct model may have, the most usual first."""
        others = [range(1, len(f.options) if f.free else min(1 + f.also_right, len(f.options))) for f in self.factors]
        usual = (0,) * len(self.factors)
        for count in range(len(self.factors) + 1):
            for chosen in itertools.combinations([i for i, other in enumerate(others) if other], count):
                for options in itertools.product(*(others[i] for i in chosen)):
                    setting = list(usual)
                    for place, option in zip(chosen, options, strict=True):
                        setting[place] = option
                    yield tuple(setting)

    def of_port(self, start: Setting, count: int) -> list[tuple[Change, ...]]:
        """Changes of so many factors after which the formula gives the port's result."""
        found = []
        for setting in itertools.islice(self._edited(start, count), MOST):
            if self._error(setting)[1] <= self.match:
                pairs = zip(self.factors, start, setting, strict=True)
                found.append(tuple(Change(f, f.options[i], f.options[j]) for f, i, j in pairs if i != j))
        return found

    def _edited(self, start: Setting, count: int, *, only_bound: bool = False) -> Iterator[Setting]:
        places = [i for i, f in enumerate(self.factors) if not (only_bound and f.free)]
        for chosen in itertools.combinations(places, count):
            others = [[o for o in range(len(self.factors[i].options)) if o != start[i]] for i in chosen]
            for options in itertools.product(*others):
                edited = list(start)
                for place, option in zip(chosen, options, strict=True):
                    edited[place] = option
                yield tuple(edited)

    def _error(self, setting: Setting) -> tuple[float, float]:
        """(from the reference's result, from the port's)."""
        if setting not in self._errors and time.process_time() > self._end:
            return float("inf"), float("inf")
        if setting not in self._errors:
            values = {f.name: f.options[i].value for f, i in zip(self.factors, setting, strict=True)}
            try:
                with np.errstate(all="ignore"):
                    result = self.compute(values)
            except ValueError:  # shapes that do not go together
                result = None
            if result is None:
                self._errors[setting] = (float("inf"), float("inf"))
            else:
                self._errors[setting] = (distance(result, self.expected), distance(result, self.got))
        return self._errors[setting]


def _options_used(setting: Setting) -> int:
    return sum(map(bool, setting))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)
