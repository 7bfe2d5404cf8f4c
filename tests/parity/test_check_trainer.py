"""`python -m parity check-trainer`: the real trainer beside the reference; a fault in either is seen, with its step."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import jax
import pytest
from rich.console import Console

from parity import twins_trainer
from parity.__main__ import main
from tests.train.conftest import write_corpus
from train import parallel, presets
from train.config import (
    BatchConfig,
    CorpusConfig,
    OptimizerConfig,
    ParallelConfig,
    TokenizerConfig,
    TrainConfig,
)
from transformer_config import TransformerConfig

STEPS = 5


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """One layer each, one shape of batch; dropout at every kind of place."""
    folder = tmp_path_factory.mktemp("corpus")
    return TrainConfig(
        run_dir=folder / "never written",
        corpus=CorpusConfig(kind="files", path=write_corpus(folder / "text"), test_split="test"),
        tokenizer=TokenizerConfig(vocab_size=280),
        model=TransformerConfig.tiny(
            d_model=18,
            d_ff=26,
            num_heads=3,
            num_encoder_layers=1,
            num_decoder_layers=1,
            dropout=0.1,
            attention_dropout=0.1,
            activation_dropout=0.1,
            tie_embeddings="all",
            tgt_vocab_size=71,
        ),
        batch=BatchConfig(max_tokens=160, num_buckets=1, max_len=30),
        optimizer=OptimizerConfig(warmup_steps=10),
        parallel=ParallelConfig(num_devices=1),
    )


def check(config: TrainConfig, *, steps: int = STEPS) -> tuple[bool, str]:
    console = Console(record=True, width=120, file=io.StringIO())
    equal = twins_trainer.check(config, steps=steps, console=console)
    return equal, console.export_text()


def cut(config: TrainConfig, **fields: Any) -> TrainConfig:
    """Into three micro-batches."""
    return config.replace(parallel=ParallelConfig(accumulation_steps=3, **fields))


def test_five_steps_in_micro_batches_are_equal(config: TrainConfig) -> None:
    equal, shown = check(cut(config, num_devices=2))
    assert equal, shown
    assert f"The trainer and the reference are equal: {STEPS} steps." in shown
    assert "Largest difference: " in shown
    losses = {
        line.split()[2] for line in shown.splitlines() if line.split() and line.split()[0] in "12345" and "." in line
    }
    assert len(losses) == STEPS
    assert not config.run_dir.exists(), "nothing is written where the run would be"
    assert not jax.config.jax_enable_x64


def test_a_cosine_is_followed_to_its_end(config: TrainConfig) -> None:
    """With a moving average beside the parameters, as the presets of Multi30k have it."""
    cosine = OptimizerConfig(schedule="cosine", learning_rate=1e-3, warmup_steps=2, decay_steps=4, ema_decay=0.9)
    equal, shown = check(config.replace(optimizer=cosine))
    assert equal, shown
    assert f"The trainer and the reference are equal: {STEPS} steps." in shown


def test_another_eps_is_found_with_its_step(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    options = twins_trainer.training_options
    monkeypatch.setattr(
        twins_trainer,
        "training_options",
        lambda *args, **kwargs: dataclasses.replace(options(*args, **kwargs), eps=1e-6),
    )
    equal, shown = check(config, steps=2)
    assert not equal
    assert "The two are NOT EQUAL: first beyond the bound in step 2." in shown, shown


def test_rows_numbered_within_their_micro_batch_are_found_at_once(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = parallel._arrays
    monkeypatch.setattr(parallel, "_arrays", lambda batch, start, stop: arrays(batch, 0, stop - start))
    equal, shown = check(cut(config, num_devices=1), steps=1)
    assert not equal
    assert "first beyond the bound in step 1" in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": BatchConfig(packing=True)}, "batch.packing: expected False"),
        ({"optimizer": OptimizerConfig(name="adamw")}, "expected optimizer.name='adam'"),
        (
            {"optimizer": OptimizerConfig(schedule="constant", learning_rate=1e-3)},
            "optimizer.schedule='noam' or 'cosine', .* got 'adam' and 'constant'",
        ),
    ],
)
def test_what_the_reference_does_not_have_is_refused(
    changes: dict[str, Any], message: str, config: TrainConfig
) -> None:
    with pytest.raises(ValueError, match=message):
        check(config.replace(**changes))


def test_the_command(config: TrainConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert set(presets.PRESETS) >= {"demo", "multi30k-de-en"}
    assert main(["check-trainer", "multi30k-de-en", "--corpus.path", str(tmp_path / "none"), "--steps", "2"]) == 2
    assert "none" in capsys.readouterr().err
    assert main(["check-trainer", "--steps", "0", "demo"]) == 2
    assert "--steps: expected at least 1, got 0" in capsys.readouterr().err
    small = [
        *("check-trainer", "multi30k-de-en", "--corpus.path", str(config.corpus.path), "--corpus.test-split", "test"),
        *("--tokenizer.vocab-size", "280", "--batch.max-tokens", "160", "--batch.num-buckets", "1"),
        *("--model.d-model", "16", "--model.d-ff", "24", "--model.num-heads", "2"),
        *("--model.num-encoder-layers", "1", "--model.num-decoder-layers", "1", "--parallel.num-devices", "1"),
        *("--steps", "1", "--keep", str(tmp_path / "kept")),
    ]
    assert main(small) == 0
    assert "are equal: 1 steps" in capsys.readouterr().out
    assert (tmp_path / "kept" / "tokenizer.json").exists()
