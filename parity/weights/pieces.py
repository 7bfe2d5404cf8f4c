"""Every piece of a derived mapping: each tensor once, under its first name."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from parity.facts import Facts, tensor_names
from parity.weights.alignment import Alignment
from parity.weights.conversions import Piece, UnsuitedError, View, convert, fused
from parity.weights.mapping import Rule
from parity.weights.patterns import Index
from parity.weights.problems import quote
from parity.weights.rules import Op
from parity.weights.stacks import Stack


class Pieces:
    """What types say of every pair of modules, where no rule says otherwise."""

    def __init__(self, reference: Facts, port: Facts, rules: Sequence[Rule]) -> None:
        self.reference = reference
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
        """Of fused projections and of every pair of modules; those of stacked layers together."""
        every: list[Piece] = []
        for references, ports in alignment.fused:
            theirs = tuple(View(self.reference, path) for path in references)
            ours = tuple(View(alignment.port, path) for path in ports)
            every += self._tried(theirs, fused(theirs, ours))
        for path, other in alignment.pairs.items():
            reference = View(self.reference, other)
            every += self._tried((reference,), convert(reference, View(alignment.port, path)))
        for piece in _stacked(every, alignment.stacked):
            self._keep(piece)

    def _tried(self, references: Iterable[View], pieces: Iterator[Piece]) -> list[Piece]:
        found = []
        try:
            for piece in pieces:
                found.append(piece)
        except UnsuitedError as reason:
            if any(not self.sources_taken >= {view.name(n) for n in view.tensors} for view in references):
                self.problems.append(f"{' and '.join(map(str, references))}: {reason}; write rules for their tensors")
        return found

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


def _stacked(pieces: Iterable[Piece], stacked: Mapping[str, Sequence[str]]) -> Iterator[Piece]:
    """Pieces that are alike in every one of the layers that the port stacks, as one; what is not is left over."""
    groups: dict[tuple[str, tuple[str, ...], tuple[Op, ...]], dict[int, Piece]] = {}
    for piece in pieces:
        outer = next((o for o in stacked if piece.targets[0].startswith(o + ".")), None)
        if outer is None:
            yield piece
            continue
        parts = [name[len(outer) + 1 :].partition(".") for name in piece.targets]
        targets = tuple(f"{outer}.{rest}" for _, _, rest in parts)
        groups.setdefault((outer, targets, piece.ops), {})[int(parts[0][0])] = piece
    for (outer, targets, ops), layers in groups.items():
        count = len(stacked[outer])
        if len(layers) == count:
            sources = tuple(name for i in range(count) for name in layers[i].sources)
            yield Piece(sources=sources, targets=targets, ops=(Stack(count, ops),))
