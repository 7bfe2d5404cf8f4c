import hashlib
import os
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from random import Random

import pytest

from train.baselines import copy_exact_match, nearest_pair_exact_match
from train.config import CorpusConfig
from train.corpus import Corpus, ParallelText
from train.demo_corpus import MIN_OCCURRENCES, build_demo_corpus
from train.demo_phrases import Deck, PhraseMaker, cldr_names


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return build_demo_corpus(CorpusConfig())


def training(corpus: Corpus) -> ParallelText:
    return ParallelText.of(list(corpus.train))


def splits(corpus: Corpus) -> tuple[ParallelText, ...]:
    return training(corpus), corpus.validation, corpus.test


def test_sizes(corpus: Corpus) -> None:
    assert [len(split) for split in splits(corpus)] == [19_000, 500, 500]


def test_no_sentence_of_either_language_stands_in_two_pairs(corpus: Corpus) -> None:
    for side in ("source", "target"):
        sentences = [sentence for split in splits(corpus) for sentence in getattr(split, side)]
        assert len(set(sentences)) == len(sentences) == 20_000


def test_text_is_clean(corpus: Corpus) -> None:
    for split, side in product(splits(corpus), ("source", "target")):
        for sentence in getattr(split, side):
            assert sentence == " ".join(sentence.split(" ")).strip()
            assert not set(sentence) & set("\u00a0\u202f\u2009\u200e\u200f\n\t")
            assert 2 <= len(sentence) <= 90


def test_every_name_stands_in_enough_training_pairs() -> None:
    """Also in small corpora, which use fewer names."""
    for num_pairs, enough in ((20_000, MIN_OCCURRENCES), (1_000, 3), (100, 1)):
        config = CorpusConfig(num_pairs=num_pairs, seed=4)
        corpus = build_demo_corpus(config)
        names = list(PhraseMaker(rng=Random(config.seed), num_pairs=num_pairs).names())
        held_out = corpus.validation.source + corpus.test.source
        sentences = training(corpus).source
        for name in names:
            occurrences = sum(name.source in sentence for sentence in sentences)
            assert occurrences >= enough, name
            assert name.source not in held_out


def test_words_of_held_out_pairs_are_known_from_training(corpus: Corpus) -> None:
    for side in ("source", "target"):
        known = Counter(
            word
            for sentence in getattr(training(corpus), side)
            for word in set(sentence.strip(",.").replace(",", "").split())
        )
        for split in (corpus.validation, corpus.test):
            for sentence in getattr(split, side):
                for word in sentence.replace(",", "").split():
                    assert known[word] >= 5 or any(sign.isdigit() for sign in word), (sentence, word)


def test_copying_and_the_nearest_pair_are_weak(corpus: Corpus) -> None:
    for held_out in (corpus.validation, corpus.test):
        assert copy_exact_match(held_out) < 0.1
        assert nearest_pair_exact_match(training(corpus), held_out) < 0.1


def test_baselines_count_what_they_should() -> None:
    train = ParallelText(source=("drei Hunde", "zwei Katzen", "x"), target=("three dogs", "two cats", "X"))
    held_out = ParallelText(
        source=("drei Hunde!", "zwei kleine Katzen", "gleich", "?"), target=("three dogs", "two cats", "gleich", "?!")
    )
    assert nearest_pair_exact_match(train, held_out) == 0.5
    assert copy_exact_match(held_out) == 0.25


def test_the_corpus_is_the_same_in_every_process(corpus: Corpus) -> None:
    script = (
        "import hashlib\nfrom train.config import CorpusConfig\nfrom train.demo_corpus import build_demo_corpus\n"
        "print(hashlib.sha256(repr(build_demo_corpus(CorpusConfig())).encode()).hexdigest())"
    )
    expected = hashlib.sha256(repr(corpus).encode()).hexdigest()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONIOENCODING": "utf-8", "LC_ALL": "C"}
        root = Path(__file__).parents[2]
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, check=True, env=environment, cwd=root, capture_output=True, text=True)
        assert done.stdout.strip() == expected


def test_another_seed_gives_another_corpus() -> None:
    first, second = (build_demo_corpus(CorpusConfig(num_pairs=300, seed=seed)) for seed in (0, 1))
    assert set(training(first).source) != set(training(second).source)
    assert [len(split) for split in splits(second)] == [270, 15, 15]


def test_the_formats_are_those_of_the_two_languages(corpus: Corpus) -> None:
    english = {
        source: target for split in splits(corpus) for source, target in zip(split.source, split.target, strict=True)
    }
    clocks = [source for source in english if len(source) == 5 and source[2] == ":"]
    assert len(clocks) > 300
    for clock in clocks:
        hour, minute = int(clock[:2]), clock[3:]
        assert english[clock] == f"{(hour + 11) % 12 + 1}:{minute} {'AM' if hour < 12 else 'PM'}"
    lists = [(source, target) for source, target in english.items() if " oder " in source]
    assert len(lists) > 1_000
    assert all((", or " if source.count(",") else " or ") in target for source, target in lists)


def test_names_are_unique_and_simple() -> None:
    names = cldr_names()
    assert set(names) == {"territory", "language", "currency"}
    every = [phrase for those in names.values() for phrase in those.values()]
    assert len({phrase.source for phrase in every}) == len({phrase.target for phrase in every}) == len(every)
    assert names["territory"]["AT"].target == "Austria"
    assert names["language"]["de"].source == "Deutsch"
    assert "Fidschi" not in {phrase.source for phrase in every}  # the islands and their language


def test_a_deck_deals_all_before_any_again() -> None:
    deck = Deck(range(5), rng=Random(0))
    assert sorted(deck.deal() for _ in range(5)) == list(range(5))
    for size in (1, 3, 5, 9):
        hand = deck.hand(size)
        assert len(hand) == len(set(hand)) == min(size, 5)


def test_what_the_demo_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\('de', 'en'\) with corpus\.kind='demo', got \('en', 'de'\)"):
        build_demo_corpus(CorpusConfig(source_language="en", target_language="de"))
    with pytest.raises(ValueError, match="at least 100 for the demo corpus, got 99"):
        build_demo_corpus(CorpusConfig(num_pairs=99))
