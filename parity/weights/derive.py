"""The mapping between two models whose modules bear the same names, derived from the modules' types."""

from collections.abc import Iterable, Iterator, Sequence

from parity.facts import Facts, tensor_names
from parity.pair import KnownDifference
from parity.weights.alignment import Alignment, align, correspondences
from parity.weights.biases import SumBiases
from parity.weights.conversions import OPAQUE
from parity.weights.derived import Derived, Fold
from parity.weights.left_over import left_over
from parity.weights.mapping import Rule, WeightMapping
from parity.weights.pieces import Pieces
from parity.weights.problems import MappingError
from parity.weights.stacks import Stack

__all__ = ["Derived", "derive"]


def derive(
    reference: Facts, port: Facts, *, mapping: WeightMapping | Sequence[Rule], modules: Sequence[tuple[str, str]]
) -> Derived:
    """How weights and module names correspond. A WeightMapping is taken as it is; rules come before what types say.

    A rule may stand between modules (`Rule("blocks.{i}.attn.c_attn", "layers.{i}.attention.{q,k,v}")`): their types
    then say what becomes of the tensors. Whatever has no place is in the result's `problems`. Raises ValueError for
    patterns that cannot be filled.
    """
    if isinstance(mapping, WeightMapping):
        alignment = align(reference, port, correspondences(modules, ()), leaf_rules=mapping.rules)
        return _complete(reference, port, alignment, mapping, alignment.problems)
    tensors = tensor_names(reference)
    between = [rule for rule in mapping if _is_between_modules(rule, tensors, reference)]
    leaf_rules = [rule for rule in mapping if rule not in between]
    alignment = align(reference, port, correspondences(modules, between), leaf_rules=leaf_rules)
    found = Pieces(reference, port, leaf_rules)
    found.collect(alignment)
    rules = [*leaf_rules, *(Rule(piece.sources, piece.targets, piece.ops) for piece in found.pieces.values())]
    aliases = {name: tensor.same_as for name, tensor in tensors.items() if tensor.same_as}
    problems = [*alignment.problems, *found.problems, *left_over(reference, port, alignment, found)]
    return _complete(reference, port, alignment, WeightMapping(rules, source_aliases=aliases), problems)


def _is_between_modules(rule: Rule, tensors: Iterable[str], paths: Iterable[str]) -> bool:
    """Names of modules, not of tensors. Raises ValueError for one that has operations: types decide on those."""
    if any(pattern.match(name) is not None for pattern in rule.sources for name in tensors):
        return False
    between = any(pattern.match(path) is not None for pattern in rule.sources for path in paths)
    if between and rule.ops:
        raise ValueError(f"{rule}: expected no operations between modules, whose types say them, got {rule.ops}")
    return between


def _complete(
    reference: Facts, port: Facts, alignment: Alignment, mapping: WeightMapping, problems: Iterable[str]
) -> Derived:
    """What follows from a mapping: tensors that stay where they are, known differences, names of modules."""
    tensors = tensor_names(reference)
    stays = frozenset(n for n, t in tensors.items() if not t.trained and not mapping.takes(n))
    own = frozenset(n for n, t in tensor_names(port).items() if not t.trained and not mapping.gives(n))
    travelling = [name for name, tensor in tensors.items() if not tensor.same_as and name not in stays]
    folds = tuple(_folds(mapping, travelling))
    opaque = {path for path, module in reference.items() if module.layer in OPAQUE}
    return Derived(
        table=mapping,
        port=alignment.port,
        modules={path: other for path, other in alignment.pairs.items() if path != other},
        pairs=alignment.pairs,
        stacked=alignment.stacked,
        problems=tuple(dict.fromkeys(problems)),
        known=(*_known_of_biases(folds), *_known_of_batch_norms(reference, alignment)),
        stays=stays,
        own=own,
        folds=folds,
        inside=frozenset(p for p in reference if any(p.startswith(outer + ".") for outer in opaque)),
    )


def _folds(mapping: WeightMapping, names: Iterable[str]) -> Iterator[Fold]:
    try:
        steps = mapping.plan(names)
    except MappingError:  # nothing will be compared
        return
    for step in steps:
        first = step.ops[0] if step.ops else None
        if isinstance(first, Stack):
            first = first.ops[0] if first.ops else None
        if isinstance(first, SumBiases):
            for one, other in zip(step.sources[::2], step.sources[1::2], strict=True):
                yield Fold(first=one, second=other, op=first)


def _known_of_biases(folds: Sequence[Fold]) -> Iterator[KnownDifference]:
    hidden = [fold for fold in folds if fold.op.apart]
    if hidden:
        yield KnownDifference(
            tensors=tuple(fold.second for fold in hidden),
            kind="GRU hidden bias",
            reason="torch computes r * (W h + b), nnx.GRUCell r * (W h): the reset gate leaves no place for b",
            holds="with b = 0, and the two biases of the other gates as their sum: outputs, and every other gradient",
        )
    added = [fold for fold in folds if not fold.op.apart]
    if added:
        yield KnownDifference(
            tensors=tuple(name for fold in added for name in (fold.first, fold.second)),
            kind="two biases for one",
            reason="torch adds two biases to the same gates, Flax has one; Adam moves their sum twice as fast",
            holds="with the sum in the first and 0 in the second: outputs, and the gradient of each is the port's; in "
            "training steps the second is held still",
        )


def _known_of_batch_norms(reference: Facts, alignment: Alignment) -> Iterator[KnownDifference]:
    variances = tuple(
        f"{other}.running_var"
        for path, other in alignment.pairs.items()
        if alignment.port[path].layer == "BatchNorm" and "running_var" in reference[other].tensors
    )
    if variances:
        yield KnownDifference(
            tensors=variances,
            kind="running variance",
            reason="torch keeps the unbiased variance of a batch (n - 1), nnx.BatchNorm the biased one (n)",
            holds="in evaluation everything; after a training step the running mean, and what was added to the "
            "variance, times (n - 1) / n",
        )
