"""Differences between translations that chance makes, and others."""

import os

import numpy as np
import pytest

from train import significance
from train.significance import compare


def texts(seed: int, *, wrong: float) -> list[str]:
    """Sentences of seven words, a share of which is another one."""
    right, rng = np.random.default_rng(0).integers(0, 50, (60, 7)), np.random.default_rng(seed)
    words = np.where(rng.random(right.shape) < wrong, 99, right)
    return [" ".join(f"w{word}" for word in sentence) for sentence in words]


def test_differences_that_chance_makes_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    references = texts(0, wrong=0.0)
    good, as_good, bad = (texts(seed, wrong=wrong) for seed, wrong in ((1, 0.1), (2, 0.1), (3, 0.4)))
    for better in compare(good, bad, references=references):
        assert better.difference > 0
        assert better.p_value < 0.01
        assert better.interval[0] < better.score < better.interval[1]
        assert better.interval[0] > better.against_interval[1]
    alike = compare(good, as_good, references=references)
    assert all(each.p_value > 0.05 for each in alike)
    assert all(each.difference < 0 for each in compare(bad, good, references=references))
    # Neither the environment nor chance has a say, and the environment is left as it was.
    for seed in ("none", "7"):
        monkeypatch.setenv("SACREBLEU_SEED", seed)
        assert compare(good, as_good, references=references) == alike
        assert os.environ["SACREBLEU_SEED"] == seed
    monkeypatch.delenv("SACREBLEU_SEED")
    monkeypatch.setattr(significance, "BOOTSTRAP_SEED", 7)
    assert compare(good, as_good, references=references) != alike
    assert "SACREBLEU_SEED" not in os.environ
