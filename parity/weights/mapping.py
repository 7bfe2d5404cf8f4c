"""A table of rules between two layouts of the same weights, applied in either direction.

Every key of the source is used exactly once and every key of the target filled exactly once; what does not fit is an
error that names all keys at once, never a warning (a model half of which stays at random values runs perfectly well).
"""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import numpy as np

from parity.weights.patterns import Bindings, Index, Pattern, expand_choices
from parity.weights.problems import Candidates, HasSpec, MappingError, TensorSpec, compare_specs, quote, spec_of
from parity.weights.rules import Kind, Leafwise, Op, bits_equal


@dataclasses.dataclass(frozen=True)
class Rule:
    """Names on one side, names on the other, and the operations in between.

    Names are patterns (see patterns.py), for example
    `Rule("{path*}.in_proj_weight", "{path*}.{q,k,v}_proj.kernel", (Split(3), Transpose()))`.

    Raises ValueError if a placeholder does not stand in every name, or if the operations do not lead from the number
    of source names to the number of target names: the rule would have no inverse.
    """

    source: str | tuple[str, ...]
    target: str | tuple[str, ...]
    ops: tuple[Op, ...] = ()
    sources: tuple[Pattern, ...] = dataclasses.field(init=False, repr=False, compare=False)
    targets: tuple[Pattern, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", _patterns(self.source))
        object.__setattr__(self, "targets", _patterns(self.target))
        patterns = self.sources + self.targets
        common = patterns[0].placeholders
        for pattern in patterns:
            if pattern.placeholders != common:
                expected, got = sorted(common), sorted(pattern.placeholders)
                raise ValueError(
                    f"{self}: expected placeholders {expected} in every name, got {got} in {pattern.text!r}"
                )
        if len({name.rstrip("*") for name in common}) < len(common):
            raise ValueError(f"{self}: expected each placeholder with or without a star, got both: {sorted(common)}")
        if self.ops:
            self.check_counts()

    def check_counts(self) -> None:
        """Raises ValueError if the operations do not lead from the number of source names to that of target names.

        A rule without operations is checked by the mapping that it is put into: between modules, not tensors, one name
        may stand for several, and the modules' types say how (see derive.py).
        """
        count = len(self.sources)
        for op in self.ops:
            try:
                count = op.count_outputs(count)
            except ValueError as error:
                raise ValueError(f"{self}: {error}") from None
        if count != len(self.targets):
            raise ValueError(f"{self}: expected operations to give {len(self.targets)} tensor(s), got {count}")

    def __str__(self) -> str:
        return f"rule {self.source!r} -> {self.target!r}"

    def inverse(self) -> "Rule":
        """The same rule from target to source."""
        return Rule(self.target, self.source, tuple(op.inverse() for op in reversed(self.ops)))


@dataclasses.dataclass(frozen=True)
class Step:
    """One rule with its names filled in: everything needed to convert a few tensors without the others."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    ops: tuple[Op, ...]
    source_aliases: tuple[tuple[str, str], ...] = ()
    """(alias, its tensor among `sources`): present in the source, checked to be equal bit by bit, then dropped."""
    target_aliases: tuple[tuple[str, str], ...] = ()
    """(alias, its tensor among `targets`): a second name under which the result is given."""

    @property
    def given(self) -> tuple[str, ...]:
        """Every name this step fills: the targets, then their aliases."""
        return self.targets + tuple(alias for alias, _ in self.target_aliases)

    def parts(self) -> Iterator["Step"]:
        """A step a tensor where the operations take each by itself, so that none is read for another's sake."""
        if len(self.targets) == 1 or not all(isinstance(op, Leafwise) for op in self.ops):
            yield self
            return
        for source, target in zip(self.sources, self.targets, strict=True):
            yield Step(
                sources=(source,),
                targets=(target,),
                ops=self.ops,
                source_aliases=tuple(pair for pair in self.source_aliases if pair[1] == source),
                target_aliases=tuple(pair for pair in self.target_aliases if pair[1] == target),
            )

    def apply(self, tensors: Mapping[str, np.ndarray], *, kind: Kind = "value") -> dict[str, np.ndarray]:
        """Target names -> arrays, aliases included (the same array again). Reads only this step's tensors.

        Raises ValueError if an operation refuses, or an alias differs from its tensor.
        """
        arrays = {name: tensors[name] for name in self.sources}
        for alias, name in self.source_aliases:
            if not bits_equal(tensors[alias], arrays[name]):
                raise ValueError(f"expected alias {alias!r} to equal {name!r} bit by bit, got another tensor")
        results = tuple(arrays.values())
        try:
            for op in self.ops:
                results = op(results, kind=kind)
        except ValueError as error:
            raise ValueError(f"{quote(self.sources)} -> {quote(self.targets)}: {error}") from error
        filled = dict(zip(self.targets, results, strict=True))
        return filled | {alias: filled[name] for alias, name in self.target_aliases}


@dataclasses.dataclass(frozen=True)
class _Plan:
    steps: list[Step]
    problems: list[str]
    unused: list[str]


class WeightMapping:
    """Rules, and on either side the second names of tied tensors: {alias: name that the rules use}.

    An alias may be absent from the source (safetensors stores a tensor once); if its canonical name is absent instead,
    the alias stands in for it. On the target side aliases are always given, except where `apply` is told what is
    expected and the alias is not.
    """

    def __init__(
        self,
        rules: Iterable[Rule],
        *,
        source_aliases: Mapping[str, str] | None = None,
        target_aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.rules = tuple(rules)
        for rule in self.rules:
            rule.check_counts()
        self._sources = Index((n, pattern) for n, rule in enumerate(self.rules) for pattern in rule.sources)
        self._targets = Index((n, pattern) for n, rule in enumerate(self.rules) for pattern in rule.targets)
        self.source_aliases = MappingProxyType(dict(source_aliases or {}))
        self.target_aliases = MappingProxyType(dict(target_aliases or {}))
        for aliases in (self.source_aliases, self.target_aliases):
            for alias, name in aliases.items():
                if name in aliases:
                    raise ValueError(f"expected alias {alias!r} to name a tensor, got {name!r}, itself an alias")

    def inverse(self) -> "WeightMapping":
        """The mapping from target to source."""
        return WeightMapping(
            [rule.inverse() for rule in self.rules],
            source_aliases=self.target_aliases,
            target_aliases=self.source_aliases,
        )

    def takes(self, name: str) -> bool:
        """Whether a rule takes a source tensor of this name."""
        return bool(self._sources.hits(self.source_aliases.get(name, name)))

    def gives(self, name: str) -> bool:
        """Whether a rule may give a target tensor of this name."""
        return bool(self._targets.hits(self.target_aliases.get(name, name)))

    def plan(self, names: Iterable[str]) -> list[Step]:
        """Which tensors become which, from names alone. Raises MappingError on any key without exactly one place."""
        plan = self._plan(list(names), {})
        if plan.problems:
            raise MappingError(plan.problems)
        return plan.steps

    def apply(
        self,
        tensors: Mapping[str, np.ndarray],
        *,
        kind: Kind = "value",
        expected: Mapping[str, HasSpec] | None = None,
    ) -> dict[str, np.ndarray]:
        """All tensors converted; their names, shapes and dtypes compared with `expected`, if given.

        Results may share memory with `tensors`. Raises MappingError, once, with everything that does not fit.
        """
        wanted = {name: TensorSpec.of(spec) for name, spec in (expected or {}).items()}
        plan = self._plan(list(tensors), wanted, tensors)
        problems, results, failed = list(plan.problems), dict[str, np.ndarray](), set[str]()
        for step in plan.steps:
            try:
                results.update(step.apply(tensors, kind=kind))
            except ValueError as error:
                problems.append(str(error))
                failed.update(step.given)
        if expected is not None:
            for alias in self.target_aliases:
                if alias not in wanted:
                    results.pop(alias, None)
            got = {name: TensorSpec.of(array) for name, array in results.items()}
            # A target that failed above is already accounted for, by its cause.
            wanted = {name: spec for name, spec in wanted.items() if name not in failed}
            unused = {name: spec_of(tensors, name) for name in plan.unused}
            problems += compare_specs(got, wanted, unused=unused)
        if problems:
            raise MappingError(problems)
        return results

    def _plan(
        self, names: list[str], wanted: Mapping[str, TensorSpec], tensors: Mapping[str, np.ndarray] | None = None
    ) -> _Plan:
        stored, checks = self._without_aliases(names)
        groups, problems, unused = self._match(stored)
        steps: dict[str, Step] = {}  # by target name
        absent: dict[str, TensorSpec | None] = {}
        for (number, bindings), members in groups.items():
            rule = self.rules[number]
            sources = [pattern.fill(bindings) for pattern in rule.sources]
            missing = [name for name in sources if name not in members]
            absent.update(dict.fromkeys(missing))
            for name in missing:
                near = Candidates(dict.fromkeys(unused)).near(name, None)
                problems.append(f"missing {name!r}, which {rule} needs beside {quote(list(members))}{near}")
            if missing:
                continue
            targets = tuple(pattern.fill(bindings) for pattern in rule.targets)
            step = Step(
                sources=tuple(stored[name] for name in sources),
                targets=targets,
                ops=rule.ops,
                source_aliases=tuple((alias, stored[name]) for alias, name in checks if name in members),
                target_aliases=tuple(pair for pair in self.target_aliases.items() if pair[1] in targets),
            )
            problems += _misfits(rule, bindings, step, steps)
            steps.update(dict.fromkeys(step.given, step))
        absent |= {name: spec for name, spec in wanted.items() if name not in steps}
        candidates = Candidates(absent)
        lines = []
        for name in unused:
            spec = None if tensors is None else spec_of(tensors, name)
            near = candidates.near(name, spec) or self._near_patterns(name)
            lines.append(f"unused {name!r}{'' if spec is None else f' {spec}'}: no rule takes it{near}")
        return _Plan(list(dict.fromkeys(steps.values())), problems + lines, unused)

    def _without_aliases(self, names: list[str]) -> tuple[dict[str, str], list[tuple[str, str]]]:
        """{name that the rules use: name in the source}, and the (alias, name that the rules use) to be compared."""
        stored = {name: name for name in names if name not in self.source_aliases}
        checks, present = [], set(names)
        for alias, name in self.source_aliases.items():
            if alias in present:
                if name in stored:
                    checks.append((alias, name))
                else:
                    stored[name] = alias
        return stored, checks

    def _match(self, stored: Mapping[str, str]) -> tuple[dict[tuple[int, Bindings], list[str]], list[str], list[str]]:
        """Which rule, with which bindings, takes which names; problems with names taken twice; names taken by none."""
        groups: dict[tuple[int, Bindings], list[str]] = {}
        problems, unused = [], []
        for name in stored:
            hits = self._sources.hits(name)
            if not hits:
                unused.append(stored[name])
            elif len(hits) > 1:
                rules = " and ".join(str(self.rules[number]) for number, _ in hits)
                problems.append(f"{name!r} is taken by more than one rule: {rules}")
            else:
                groups.setdefault(hits[0], []).append(name)
        return groups, problems, unused

    def _near_patterns(self, name: str) -> str:
        """Patterns that look like the end of the name, where no missing name looks like the whole."""
        words = name.split(".")
        scores: dict[str, float] = {}
        for pattern in (pattern for rule in self.rules for pattern in rule.sources):
            tail = [word for word in pattern.text.split(".") if "*" not in word]
            end = ".".join(words[-len(tail) :])
            scores[pattern.text] = difflib.SequenceMatcher(None, end, ".".join(tail)).ratio()
        best = sorted((text for text in scores if scores[text] > 0.6), key=lambda text: -scores[text])[:3]
        return f"; near: {', '.join(map(repr, best))}" if best else ""


def _misfits(rule: Rule, bindings: Bindings, step: Step, steps: Mapping[str, Step]) -> list[str]:
    problems = []
    for pattern, name in zip(rule.targets, step.targets, strict=True):
        if pattern.match(name) != bindings:
            problems.append(f"ambiguous {quote(step.sources)}: {rule} gives {name!r}, which leads back to other names")
    for name in step.given:
        if name in steps:
            problems.append(f"{name!r} is given twice: by {quote(steps[name].sources)} and by {quote(step.sources)}")
    return problems


def _patterns(names: str | tuple[str, ...]) -> tuple[Pattern, ...]:
    every = (names,) if isinstance(names, str) else names
    if not every:
        raise ValueError("expected at least one name on each side of a rule, got none")
    return tuple(Pattern(name) for text in every for name in expand_choices(text))
