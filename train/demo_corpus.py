"""The demo corpus: German dates, amounts, names and lists of them with their English, out of the Unicode CLDR.

It needs no download, and it is hard for shortcuts: held-out phrases are combinations of known names and digits that
stand in no training pair, on either side.
"""

from collections import Counter
from random import Random

from train.config import CorpusConfig
from train.corpus import Corpus, ParallelText, corpus_of
from train.demo_phrases import LOCALES, Phrase, PhraseMaker

MIN_PAIRS = 100
HELD_OUT_PAIRS = 500
"""In validation and in test each, but at most a twentieth of all pairs."""
MIN_OCCURRENCES = 8
"""Training phrases that every name of a held-out phrase stands in, where the corpus has that many."""


def build_demo_corpus(config: CorpusConfig) -> Corpus:
    """`config.num_pairs` distinct pairs, a function of `config.num_pairs` and `config.seed` (and of babel's version).

    No German and no English phrase stands in two pairs. Raises ValueError for other languages than German to English,
    or for fewer than 100 pairs.
    """
    languages = (config.source_language, config.target_language)
    if languages != LOCALES:
        raise ValueError(f"expected corpus languages {LOCALES} with corpus.kind='demo', got {languages}")
    if config.num_pairs < MIN_PAIRS:
        raise ValueError(f"corpus.num_pairs: expected at least {MIN_PAIRS} for the demo corpus, got {config.num_pairs}")
    rng = Random(config.seed)
    alone, combined = _draw(config.num_pairs, rng=rng)
    held_out_size = min(HELD_OUT_PAIRS, config.num_pairs // 20)
    held_out, combined = _hold_out(combined, known=alone, size=2 * held_out_size)
    train = [*alone, *combined]
    rng.shuffle(train)
    validation, test = _parallel(held_out[:held_out_size]), _parallel(held_out[held_out_size:])
    return corpus_of(_parallel(train), validation, test, names=("train", "validation", "test"))


def _draw(num_pairs: int, *, rng: Random) -> tuple[list[Phrase], list[Phrase]]:
    """Names by themselves, and other phrases, `num_pairs` together; no two alike on either side."""
    maker = PhraseMaker(rng=rng, num_pairs=num_pairs)
    alone = list(maker.names())
    sources = {phrase.source for phrase in alone}
    targets = {phrase.target for phrase in alone}
    combined: list[Phrase] = []
    while len(alone) + len(combined) < num_pairs:
        phrase = maker.draw()
        # A phrase that is the same in both languages would be a gift to whoever copies.
        if phrase.source in sources or phrase.target in targets or phrase.source == phrase.target:
            continue
        sources.add(phrase.source)
        targets.add(phrase.target)
        combined.append(phrase)
    return alone, combined


def _hold_out(combined: list[Phrase], *, known: list[Phrase], size: int) -> tuple[list[Phrase], list[Phrase]]:
    """`size` of the `combined` phrases whose names all stand in the training phrases, and the rest."""
    left = Counter(name for phrase in [*known, *combined] for name in phrase.names)
    enough = {name: min(MIN_OCCURRENCES, count - 1) for name, count in left.items()}
    held_out: list[Phrase] = []
    train: list[Phrase] = []
    for phrase in combined:  # they are in random order already
        if len(held_out) < size and all(0 < enough[name] < left[name] for name in phrase.names):
            left.subtract(phrase.names)
            held_out.append(phrase)
        else:
            train.append(phrase)
    assert len(held_out) == size
    return held_out, train


def _parallel(phrases: list[Phrase]) -> ParallelText:
    return ParallelText(
        source=tuple(phrase.source for phrase in phrases), target=tuple(phrase.target for phrase in phrases)
    )
