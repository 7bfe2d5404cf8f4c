"""Every piece of a derived mapping: each tensor once, under its first name."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from parity.facts import Facts, ModuleFacts, tensor_names
from parity.weights.alignment import Alignment
from parity.weights.conversions import Piece, UnsuitedError, View, convert, fused
from parity.weights.mapping import Rule
from parity.weights.patterns import Index
from parity.weights.problems import quote
from parity.weights.stacks import Stack


class Pieces:
    """What types say of every pair of modules, where no rule says otherwise."""

    def __init__(self, reference: Facts, port: Facts, rules: Sequence[Rule]) -> None:
        self.reference, self.port = reference, port
        self.source_tensors, self.target_tensors = tensor_names(reference), tensor_names(port)
        sources = Index((n, pattern) for n, rule in enumerate(rules) for pattern in rule.sources)
        targets = Index((n, pattern) for n, rule in enumerate(rules) for pattern in rule.targets)
        self.sources_taken = {name for name in self.source_tensors if sources.hits(name)}
        self.targets_taken = {name for name in self.target_tensors if targets.hits(name)}
        self.pieces: dict[str, Piece] = {}
        """By the first target."""
        self.problems: list[str] = []
        self.targets: dict[str, Piece] = {}
        self.sources: dict[str, Piece] = {}

    def collect(self, alignment: Alignment) -> None:
        """Of fused projections, of stacked layers, and of every pair of modules."""
        for references, ports in alignment.fused:
            theirs = tuple(View(self.reference, path) for path in references)
            self._add(theirs, lambda t=theirs, p=ports: fused(t, tuple(View(self.port, path) for path in p)))  # type: ignore[misc]
        for outer, layers in alignment.stacked.items():
            self._collect_stacked(outer, layers)
        for path, other in alignment.pairs.items():
            reference, port = View(self.reference, other), View(self.port, path)
            self._add((reference,), lambda r=reference, p=port: convert(r, p))  # type: ignore[misc]

    def _collect_stacked(self, outer: str, layers: tuple[str, ...]) -> None:
        """As for one layer, whose tensors lack the port's first axis; then for all, one after the other."""
        one = {p: _without_first_axis(m) for p, m in self.port.items() if p == outer or p.startswith(outer + ".")}
        for path in one:
            inner = path[len(outer) :]
            if layers[0] + inner in self.reference:
                reference, port = View(self.reference, layers[0] + inner), View(one, path)
                self._add((reference,), lambda r=reference, p=port: _stacked(r, p, layers))  # type: ignore[misc]

    def _add(self, references: Iterable[View], pieces: Callable[[], Iterator[Piece]]) -> None:
        try:
            for piece in pieces():
                self._keep(piece)
        except UnsuitedError as reason:
            if any(not self.sources_taken >= {view.name(n) for n in view.tensors} for view in references):
                self.problems.append(f"{' and '.join(map(str, references))}: {reason}; write rules for their tensors")

    def _keep(self, piece: Piece) -> None:
        known = self.source_tensors.keys() >= {*piece.sources} and self.target_tensors.keys() >= {*piece.targets}
        if not known:
            return  # one side lacks a part: left over, and named so
        sources = tuple(self.source_tensors[name].same_as or name for name in piece.sources)
        targets = tuple(self.target_tensors[name].same_as or name for name in piece.targets)
        taken = self.sources_taken & {*sources, *piece.sources} or self.targets_taken & {*targets, *piece.targets}
        if taken or not all(self.target_tensors[name].settable for name in targets):
            return
        piece = Piece(sources=sources, targets=targets, ops=piece.ops)
        clash = next((p for n in targets if (p := self.targets.get(n, piece)) != piece), None)
        twice = next((p for n in sources if (p := self.sources.get(n, piece)) != piece), None)
        if clash is not None:
            both = quote(sorted({*clash.sources, *sources}))
            self.problems.append(f"tied in the port only: its {quote(targets)} stands for {both} of the reference")
        elif twice is not None:
            both = quote(sorted({*twice.targets, *targets}))
            self.problems.append(f"tied in the reference only: its {quote(sources)} is {both} in the port")
        else:
            self.pieces[targets[0]] = piece
            self.targets |= dict.fromkeys(targets, piece)
            self.sources |= dict.fromkeys(sources, piece)


def _stacked(reference: View, port: View, layers: tuple[str, ...]) -> Iterator[Piece]:
    for piece in convert(reference, port):
        sources = tuple(layer + name[len(layers[0]) :] for layer in layers for name in piece.sources)
        yield Piece(sources=sources, targets=piece.targets, ops=(Stack(len(layers), piece.ops),))


def _without_first_axis(module: ModuleFacts) -> ModuleFacts:
    tensors = {n: dataclasses.replace(t, shape=t.shape[1:]) for n, t in module.tensors.items()}
    return dataclasses.replace(module, tensors=tensors)
