"""Parallel text: line i of the source translates into line i of the target. Read from files, or built."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from train import iwslt, readers
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


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The three splits of one parallel text, and what a reader of the results should know about them."""

    train: ParallelText
    validation: ParallelText
    test: ParallelText
    notes: tuple[str, ...] = ()
    """Remarks to report, one sentence each, such as how many training pairs were left out and why."""


def load_corpus(config: CorpusConfig) -> Corpus:
    """The corpus that `config` describes.

    Raises FileNotFoundError for a missing file and ValueError for one that cannot be used; either names the file.
    """
    if config.kind == "demo":
        from train.demo_corpus import build_demo_corpus  # the CLDR tables are not needed for files

        return build_demo_corpus(config)
    return _load_files(config)


def _load_files(config: CorpusConfig) -> Corpus:
    if config.path is None:  # refused by CorpusConfig already
        raise ValueError("expected a folder in corpus.path, got None")
    find = iwslt.find_split if config.kind == "iwslt" else readers.find_split
    names = (config.train_split, config.validation_split, config.test_split)
    splits = [find(config.path, name, source=config.source_language, target=config.target_language) for name in names]
    train, dropped = _without_empty(splits[0])
    # Held-out pairs are never dropped: every sentence is to be scored exactly once, the odd ones too.
    validation, test = (ParallelText.of(list(split)) for split in splits[1:])
    notes = [str(dropped)] if dropped.dropped else []
    for split, text in zip(splits[1:], (validation, test), strict=True):
        notes += _notes(split.name, text, train)
    return Corpus(train=train, validation=validation, test=test, notes=tuple(notes))


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


def _without_empty(split: PairSource) -> tuple[ParallelText, EmptyReport]:
    report, kept = EmptyReport(split=split.name), []
    for pair in split:
        report.pairs += 1
        empty = tuple(not side.strip() for side in pair)
        if any(empty):
            report.sides["on both sides" if all(empty) else "in the source" if empty[0] else "in the target"] += 1
        else:
            kept.append(pair)
    if not kept:
        files = ", ".join(map(str, split.files))
        raise ValueError(f"expected training pairs with words on both sides, got none in {files}")
    return ParallelText.of(kept), report


def _notes(name: str, text: ParallelText, train: ParallelText) -> Iterator[str]:
    """What to know of a held-out split: sentences without words, and those that training has seen."""
    empty = sum(not (source.strip() and target.strip()) for source, target in text)
    if empty:
        yield f"{name}: {empty} of {len(text)} pairs have an empty side; kept and scored"
    pairs, sources = set(text), set(text.source)
    seen = {pair for pair in train if pair[0] in sources}
    seen_sources = {source for source, _ in seen}
    count = sum(source in seen_sources for source in text.source)
    if count:
        same = sum(pair in (seen & pairs) for pair in text)
        yield f"{name}: {count} of {len(text)} sources stand in the training text too, {same} with the same translation"
