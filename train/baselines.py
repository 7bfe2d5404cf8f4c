"""What can be had without learning to translate, for comparison with a model's exact match."""

import numpy as np
from jaxtyping import Float32

from train.corpus import ParallelText

NGRAM = 3
ROWS_AT_ONCE = 50
"""Held-out sentences compared with all training ones in one matrix product; bounds its memory."""


def copy_exact_match(held_out: ParallelText) -> float:
    """Share of sentences whose translation is the source itself."""
    return float(np.mean([source == target for source, target in zip(held_out.source, held_out.target, strict=True)]))


def nearest_pair_exact_match(train: ParallelText, held_out: ParallelText) -> float:
    """Share of sentences translated exactly by the target of the nearest training source.

    Nearest by the cosine between counts of character trigrams; the first of equals.
    """
    ngrams = sorted({ngram for source in held_out.source for ngram in _ngrams(source)})
    column = {ngram: i for i, ngram in enumerate(ngrams)}
    known = _unit_rows(train.source, column)
    right = 0
    for start in range(0, len(held_out), ROWS_AT_ONCE):
        rows = _unit_rows(held_out.source[start : start + ROWS_AT_ONCE], column)
        nearest = np.argmax(rows @ known.T, axis=1)
        targets = held_out.target[start : start + ROWS_AT_ONCE]
        right += sum(train.target[pair] == target for pair, target in zip(nearest, targets, strict=True))
    return right / len(held_out)


def _ngrams(sentence: str) -> list[str]:
    padded = f"\n{sentence}\n"  # so that the first and last characters weigh as much as the others
    return [padded[i : i + NGRAM] for i in range(max(1, len(padded) - NGRAM + 1))]


def _unit_rows(sentences: tuple[str, ...], column: dict[str, int]) -> Float32[np.ndarray, "sentences ngrams"]:
    """Counts of the n-grams in `column`, scaled to unit length by the counts of all n-grams, known or not."""
    counts = np.zeros((len(sentences), len(column)), dtype=np.float32)
    for row, sentence in enumerate(sentences):
        own = _ngrams(sentence)
        _, occurrences = np.unique(own, return_counts=True)
        for ngram in own:
            if ngram in column:
                counts[row, column[ngram]] += 1.0
        counts[row] /= np.sqrt(np.sum(occurrences.astype(np.float32) ** 2))
    return counts
