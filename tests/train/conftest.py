"""What the tests of training runs share: a made-up corpus in files, a tiny run, and one such run that has ended."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from train.config import (
    BatchConfig,
    CheckpointConfig,
    CorpusConfig,
    EvaluationConfig,
    OptimizerConfig,
    ParallelConfig,
    ReportConfig,
    TokenizerConfig,
    TrainConfig,
)
from transformer_config import TransformerConfig

GERMAN = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
ENGLISH = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def write_corpus(folder: Path, *, seed: int = 0) -> Path:
    """Numbers in words. One validation pair is longer than any training pair (T5), one has an empty source."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for split, lengths in {"train": rng.integers(1, 5, 48), "val": [2, 3, 9, 0, 1], "test": [1, 2, 3]}.items():
        pairs = [rng.integers(0, 9, length) for length in lengths]
        for language, words in (("de", GERMAN), ("en", ENGLISH)):
            lines = [" ".join(words[i] for i in pair) for pair in pairs]
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def corpus_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def tiny_run(corpus_dir: Path) -> Callable[..., TrainConfig]:
    """The config of a run of seconds, with some fields changed: 2 epochs of 5 to 7 steps, saved every 3 steps."""

    def tiny_run(run_dir: Path, **changes: object) -> TrainConfig:
        config = TrainConfig(
            run_dir=run_dir,
            corpus=CorpusConfig(kind="files", path=corpus_dir, test_split="test", cache=corpus_dir.parent / "cache"),
            tokenizer=TokenizerConfig(vocab_size=280),
            model=TransformerConfig.tiny(
                d_model=18,
                d_ff=26,
                num_heads=3,
                num_encoder_layers=1,
                num_decoder_layers=1,
                dropout=0.1,
                tie_embeddings="all",
                tgt_vocab_size=71,
            ),
            batch=BatchConfig(max_tokens=160, num_buckets=1, max_len=30),
            optimizer=OptimizerConfig(warmup_steps=10),
            evaluation=EvaluationConfig(batch_size=4, max_decode_len=8),
            checkpoint=CheckpointConfig(every_steps=3, keep=2),
            epochs=2,
            parallel=ParallelConfig(num_devices=1),
            report=ReportConfig(log_every_steps=1),
        )
        return dataclasses.replace(config, **changes)

    return tiny_run
