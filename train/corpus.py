"""Parallel text: line i of the source translates into line i of the target. Read from files or the hub, or built."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from train import hub, iwslt, readers
from train.config import CorpusConfig
from train.readers import Pair, PairSource


@dataclass(frozen=True, kw_only=True)
class ParallelText:
    """Sentences and their translations, equally many and at least one; else ValueError."""

    source: tuple[str, ...]
    target: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise ValueError(
                f"expected as many target as source sentences, got {len(self.source)} source and "
                f"{len(self.target)} target sentences"
            )
        if not self.source:
            raise ValueError("expected at least one pair of sentences, got none")

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> "ParallelText":
        """Out of pairs."""
        return cls(source=tuple(pair[0] for pair in pairs), target=tuple(pair[1] for pair in pairs))

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Pair]:
        return zip(self.source, self.target, strict=True)


@dataclass(kw_only=True)
class EmptyReport:
    """Training pairs that were left out because a side has no words."""

    split: str
    pairs: int = 0
    sides: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def dropped(self) -> int:
        """How many."""
        return self.sides.total()

    def __str__(self) -> str:
        how = ", ".join(f"{count} {side}" for side, count in self.sides.items())
        return f"{self.split}: {self.dropped} of {self.pairs} pairs dropped for want of words: {how}"


@dataclass(frozen=True, kw_only=True)
class TrainingText:
    """Pairs with words on both sides, read again whenever they are gone through: text in files is never held whole."""

    split: Iterable[Pair]
    """All of them, those without words too."""
    pairs: int
    """With words."""
    sha256: str
    """Of those pairs."""

    def __len__(self) -> int:
        return self.pairs

    def __iter__(self) -> Iterator[Pair]:
        return (pair for pair in self.split if not _side_without_words(pair))


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The three splits of one parallel text, and what a reader of the results should know about them."""

    train: TrainingText
    validation: ParallelText
    test: ParallelText
    notes: tuple[str, ...] = ()
    """Remarks to report, one sentence each, such as how many training pairs were left out and why."""


def load_corpus(config: CorpusConfig) -> Corpus:
    """The corpus that `config` describes. The training text is gone through once.

    Raises FileNotFoundError for a missing file and ValueError for one that cannot be used; either names the file, or
    the hub's corpus.
    """
    if config.kind == "demo":
        from train.demo_corpus import build_demo_corpus  # the CLDR tables are not needed for files

        return build_demo_corpus(config)
    names = (config.train_split, config.validation_split, config.test_split)
    splits = _find_splits(config, names)
    # Held-out pairs are never dropped: every sentence is to be scored exactly once, the odd ones too.
    validation, test = (ParallelText.of(list(split)) for split in splits[1:])
    return corpus_of(splits[0], validation, test, names=names)


def split_name(config: CorpusConfig, split: str) -> str:
    """What the corpus calls a split that may be named by its role, `train`, `validation` or `test`.

    A name that the config itself uses comes before a role; any other name is taken as it is.
    """
    names = (config.train_split, config.validation_split, config.test_split)
    if config.kind == "demo" or split in names:  # the demo corpus calls its splits by their roles
        return split
    return dict(zip(("train", "validation", "test"), names, strict=True)).get(split, split)


def load_split(config: CorpusConfig, name: str) -> ParallelText:
    """One split, by the corpus's own name for it, with every pair that it has: also one that no run has read.

    Raises FileNotFoundError or ValueError that names the file, or the hub's corpus, and says what is there.
    """
    if config.kind == "demo":
        corpus = load_corpus(config)
        splits: dict[str, Iterable[Pair]] = {
            "train": corpus.train,
            "validation": corpus.validation,
            "test": corpus.test,
        }
        if name not in splits:
            raise ValueError(f"expected a split of the demo corpus, which has {', '.join(splits)}, got {name!r}")
        return ParallelText.of(list(splits[name]))
    (split,) = _find_splits(config, [name])
    pairs = list(split)
    if not pairs:
        where = ", ".join(map(str, split.files)) or f"the split {name!r}"
        raise ValueError(f"expected at least one pair of sentences in {where}, got none")
    return ParallelText.of(pairs)


def _find_splits(config: CorpusConfig, names: Sequence[str]) -> list[PairSource]:
    if config.kind == "hub":
        return hub.find_splits(config, names)
    if config.path is None:  # refused by CorpusConfig already
        raise ValueError("expected a folder in corpus.path, got None")
    find = iwslt.find_split if config.kind == "iwslt" else readers.find_split
    return [find(config.path, name, source=config.source_language, target=config.target_language) for name in names]


def corpus_of(
    train: Iterable[Pair], validation: ParallelText, test: ParallelText, *, names: tuple[str, str, str]
) -> Corpus:
    """Goes through the training text: counts it and what is dropped, and what of the held-out text stands in it.

    Raises ValueError if no training pair has words on both sides.
    """
    report, held_out = EmptyReport(split=names[0]), [_Seen(validation), _Seen(test)]
    hashes = [hashlib.sha256(), hashlib.sha256()]
    for pair in train:
        report.pairs += 1
        empty = _side_without_words(pair)
        if empty:
            report.sides[empty] += 1
            continue
        for line, digest in zip(pair, hashes, strict=True):
            digest.update(line.encode() + b"\n")
        for seen in held_out:
            seen.look_at(pair)
    if report.dropped == report.pairs:
        files = ", ".join(map(str, train.files)) if isinstance(train, PairSource) else names[0]
        raise ValueError(f"expected training pairs with words on both sides, got none in {files}")
    notes = [str(report)] if report.dropped else []
    for name, seen in zip(names[1:], held_out, strict=True):
        notes += seen.notes(name)
    common = sum(source in held_out[0].known for source in test.source)
    if common:
        notes.append(f"{names[2]}: {common} of {len(test)} sources stand in {names[1]} too")
    sha256 = hashlib.sha256(b"".join(digest.digest() for digest in hashes)).hexdigest()
    text = TrainingText(split=train, pairs=report.pairs - report.dropped, sha256=sha256)
    return Corpus(train=text, validation=validation, test=test, notes=tuple(notes))


class _Seen:
    """Which sentences of a held-out text stand in the training text."""

    def __init__(self, text: ParallelText):
        self.text, self.known = text, frozenset(text.source)
        self.sources: set[str] = set()
        self.pairs: set[Pair] = set()

    def look_at(self, pair: Pair) -> None:
        """At a training pair."""
        if pair[0] in self.known:
            self.sources.add(pair[0])
            self.pairs.add(pair)

    def notes(self, name: str) -> Iterator[str]:
        """What to know of the text."""
        number = len(self.text)
        empty = sum(bool(_side_without_words(pair)) for pair in self.text)
        if empty:
            yield f"{name}: {empty} of {number} pairs have an empty side; kept and scored"
        count = sum(source in self.sources for source in self.text.source)
        if count:
            same = sum(pair in self.pairs for pair in self.text)
            also = f"{same} with the same translation"
            yield f"{name}: {count} of {number} sources stand in the training text too, {also}"


def _side_without_words(pair: Pair) -> str:
    """Which one, in words; empty if both have some."""
    source, target = (not side.strip() for side in pair)
    if source and target:
        return "on both sides"
    return "in the source" if source else "in the target" if target else ""
