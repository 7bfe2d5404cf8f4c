"""Which module of the port is which of the reference: by equal names, by given patterns, and by what these imply."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from parity.facts import Facts, ModuleFacts, join, parent
from parity.weights.mapping import Rule
from parity.weights.patterns import Bindings, Pattern, expand_choices


@dataclasses.dataclass(frozen=True)
class Correspondence:
    """Patterns of module paths: one on each side, or several on one where projections are fused on the other."""

    references: tuple[Pattern, ...]
    ports: tuple[Pattern, ...]

    @property
    def single(self) -> bool:
        """One module on each side."""
        return len(self.references) == len(self.ports) == 1


def correspondences(modules: Sequence[tuple[str, str]], rules: Iterable[Rule]) -> tuple[Correspondence, ...]:
    """What `Pair.modules` says, and rules between modules. Raises ValueError for a pattern that cannot be filled."""
    given = []
    for entry in modules:
        if len(entry) != 2:
            raise ValueError(f"expected pairs of module names, the reference's first, got {entry!r}")
        given.append(Correspondence(*(tuple(map(Pattern, expand_choices(text))) for text in entry)))
    given += [Correspondence(rule.sources, rule.targets) for rule in rules]
    for correspondence in given:
        placeholders = {pattern.placeholders for pattern in correspondence.references + correspondence.ports}
        if len(placeholders) > 1:
            texts = [pattern.text for pattern in correspondence.references + correspondence.ports]
            raise ValueError(f"expected the same placeholders in every name of {texts}")
    return tuple(given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alignment:
    """The outcome."""

    port: Facts
    """The port's facts with stacked layers apart: `layers.0.fc`, `layers.1.fc`, ... for `layers.fc`."""
    pairs: Mapping[str, str]
    """Port's path, of a layer apart where layers are stacked -> reference's."""
    stacked: Mapping[str, tuple[str, ...]]
    """Port's path -> the reference's, for the outermost module of layers that the port stacks."""
    fused: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    """(reference's paths, port's paths) of projections that are one module on one side and several on the other."""
    problems: tuple[str, ...]
    """Patterns that lead nowhere."""


def align(
    reference: Facts, port: Facts, given: Sequence[Correspondence], *, leaf_rules: Sequence[Rule] = ()
) -> Alignment:
    """Pairs every module of the port with at most one of the reference."""
    aligner = _Aligner(reference, port, given, leaf_rules)
    stacked = {path: layers for path in port if (layers := aligner.layers(path))}
    if stacked:
        port = _apart(port, {path: len(layers) for path, layers in stacked.items()})
        aligner = _Aligner(reference, port, given, leaf_rules)
    pairs: dict[str, str] = {}
    taken: set[str] = set()
    for path in port:
        found = None if aligner.is_list_of_sequential(path) else aligner.of(path)
        if found is not None and found not in taken:
            pairs[path] = found
            taken.add(found)
    return Alignment(
        port=port, pairs=pairs, stacked=stacked, fused=tuple(aligner.fused()), problems=tuple(aligner.problems())
    )


def _apart(port: Facts, counts: Mapping[str, int]) -> Facts:
    """Each of the stacked layers as a module of its own, whose tensors lack the first axis."""
    apart: dict[str, ModuleFacts] = {}
    for path, module in port.items():
        outer = next((o for o in counts if path == o or path.startswith(o + ".")), None)
        if outer is None:
            apart[path] = module
            continue
        tensors = {n: dataclasses.replace(t, shape=t.shape[1:]) for n, t in module.tensors.items()}
        one = dataclasses.replace(module, tensors=tensors)
        apart.setdefault(outer, ModuleFacts(type="stacked layers"))
        apart |= {f"{outer}.{i}{path[len(outer) :]}": one for i in range(counts[outer])}
    return apart


class _Aligner:
    def __init__(
        self, reference: Facts, port: Facts, given: Sequence[Correspondence], leaf_rules: Iterable[Rule]
    ) -> None:
        self.reference, self.port, self.given = reference, port, given
        self.explicit = [(c.references[0], c.ports[0]) for c in given if c.single]
        self.implied = [pair for c in given for pair in _parents(c.references[0].text, c.ports[0].text)]
        # A rule for one tensor says of its module where it is, but only where names do not say it.
        self.by_leaf = [
            (Pattern(parent(rule.sources[0].text)), Pattern(parent(rule.targets[0].text)))
            for rule in leaf_rules
            if len(rule.sources) == len(rule.targets) == 1
            and "." in rule.sources[0].text
            and "." in rule.targets[0].text
        ]
        self.of = functools.cache(self._of)

    def _of(self, path: str) -> str | None:
        """The reference's path, shared modules under their first."""
        if path == "":
            return ""
        found = self._filled(path, self.explicit) or self._filled(path, self.implied)
        outer = self.of(parent(path))
        if found is None and outer is not None:
            same = join(outer, path.rpartition(".")[2])
            found = same if same in self.reference else None
        if found is None and self.is_list_of_sequential(path):
            found = outer
        found = self._filled(path, self.by_leaf) if found is None else found
        return found if found is None else self.reference[found].same_as or found

    def is_list_of_sequential(self, path: str) -> bool:
        """Whether the path is the `layers` of an nnx.Sequential, which torch's has no name for."""
        outer, _, last = path.rpartition(".")
        return last == "layers" and outer in self.port and self.port[outer].layer == "Sequential"

    def _filled(self, path: str, pairs: Iterable[tuple[Pattern, Pattern]]) -> str | None:
        for reference, port in pairs:
            bindings = port.match(path)
            if bindings is not None and (filled := reference.fill(bindings)) in self.reference:
                return filled
        return None

    def layers(self, path: str) -> tuple[str, ...]:
        """The reference's layers that the port's module holds stacked; empty if it is an ordinary one."""
        outer = self.of(path)
        if not path or outer is None or self.is_list_of_sequential(path) or _numbered(self.port, path):
            return ()
        numbers = _numbered(self.reference, outer)
        sizes = {
            tensor.shape[:1]
            for inner, module in self.port.items()
            if inner == path or inner.startswith(path + ".")
            for tensor in module.tensors.values()
        }
        if not numbers or sizes != {(len(numbers),)} or self.port[path].layer == "Sequential":
            return ()
        return tuple(join(outer, str(number)) for number in numbers)

    def fused(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Of every correspondence between one module and several, with the names filled in."""
        for c in self.given:
            if c.single:
                continue
            for bindings in _bindings(c.ports, self.port):
                references = tuple(pattern.fill(bindings) for pattern in c.references)
                ports = tuple(pattern.fill(bindings) for pattern in c.ports)
                if all(path in self.reference for path in references) and all(path in self.port for path in ports):
                    yield references, ports

    def problems(self) -> Iterator[str]:
        """Patterns of which no module of the port, or of the reference, is an example."""
        for c in self.given:
            for side, patterns, facts in (
                ("reference", c.references, self.reference),
                ("port", c.ports, self.port),
            ):
                for pattern in patterns:
                    if not any(pattern.match(path) is not None for path in facts):
                        yield f"no module of the {side} is named {pattern.text!r}"


def _bindings(patterns: Iterable[Pattern], facts: Facts) -> list[Bindings]:
    """Each once, in the order of the modules."""
    found = [pattern.match(path) for path in facts for pattern in patterns]
    return list(dict.fromkeys(bindings for bindings in found if bindings is not None))


def _numbered(facts: Facts, path: str) -> list[int]:
    """0 .. n-1 if the module's children are numbered so, and it has no others."""
    prefix = path + "." if path else ""
    children = {p[len(prefix) :].split(".")[0] for p in facts if p.startswith(prefix) and p != path}
    numbers = [int(child) for child in children if child.isdigit()]
    return sorted(numbers) if numbers and sorted(numbers) == list(range(len(children))) else []


def _parents(reference: str, port: str) -> Iterator[tuple[Pattern, Pattern]]:
    """`h.{i}.attn`, `layers.{i}.attention` -> (`h.{i}`, `layers.{i}`), (`h`, `layers`): outer modules that must
    correspond if these do, because placeholders stand at the same places."""
    ours, theirs = parent(reference), parent(port)
    while ours and theirs and Pattern(ours).placeholders == Pattern(theirs).placeholders:
        one, other = ours.rpartition(".")[2], theirs.rpartition(".")[2]
        numbered = one == other and "{" in one
        if ours != theirs and (numbered or ours.count(".") == theirs.count(".")):
            yield Pattern(ours), Pattern(theirs)
        ours, theirs = parent(ours), parent(theirs)
