"""`python -m parity`: exit statuses, messages, and a trained run from checkpoint to PyTorch and back."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from parity.__main__ import main
from parity.weights.rules import bits_equal
from parity.weights.store import read_tensors
from train.config import (
    BatchConfig,
    CorpusConfig,
    EvaluationConfig,
    TokenizerConfig,
    TrainConfig,
)
from train.loop import run as train
from train.run_dir import RunDir
from transformer_config import TransformerConfig


def status(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as error:  # tyro's own way out
        return int(error.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check",), "--preset or --checkpoint"),
        (("check", "--preset", "huge"), "huge"),
        (("check", "--preset", "tiny", "--set", "norm_oder=pre"), "norm_oder=pre"),
        (("check", "--preset", "tiny", "--set", "window"), "FIELD=VALUE"),
        (("check", "--checkpoint", "somewhere", "--set", "window=3"), "--set without --checkpoint"),
        (("convert", "a", "b", "--from", "torch", "--to", "flax"), "torch"),
        (("check", "--preset", "tiny", "--set", "num_heads=7"), "num_heads: expected a divisor of d_model=30, got 7"),
        (("check", "--preset", "tiny", "--set", "attention=library"), "got 'library'"),
        (("check", "--checkpoint", "no-such-run"), "no-such-run"),
        (("check", "--preset", "tiny", "--set", "dtype=bfloat16"), "float64 and in float32"),
        (("check", "--preset", "tiny", "--set", "dropout=0.3"), "without dropout"),
        (("check", "--preset", "tiny", "--seed", "-1"), "--seed: expected at least 0"),
        (("check", "--preset", "tiny", "--json", "/proc/nope/report.json"), "/proc/nope"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.out + captured.err


def test_what_cannot_be_converted_exits_with_1_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("convert", "no.pt", "no", "--from", "torch-reference", "--to", "flax") == 1
    assert "no.pt" in capsys.readouterr().err


def test_help_waits_for_no_framework() -> None:
    code = (
        "import sys; from parity.__main__ import main\n"
        "try:\n    main(['check', '--help'])\n"
        "except SystemExit as error:\n    assert not error.code\n"
        "loaded = {'jax', 'torch', 'flax'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--checkpoint" in done.stdout


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few steps on made-up text, tied embeddings."""
    folder = tmp_path_factory.mktemp("trained")
    rng = np.random.default_rng(0)
    for split, size in (("train", 60), ("val", 30), ("test_2016_flickr", 5)):
        words = [[f"w{n}" for n in rng.integers(0, 20, rng.integers(2, 9))] for _ in range(size)]
        (folder / f"{split}.de").write_text("".join(" ".join(line) + "\n" for line in words), encoding="utf-8")
        (folder / f"{split}.en").write_text("".join(" ".join(line[::-1]) + "\n" for line in words), encoding="utf-8")
    config = TrainConfig(
        run_dir=folder / "run",
        corpus=CorpusConfig(kind="files", path=folder),
        tokenizer=TokenizerConfig(vocab_size=280),
        model=TransformerConfig.tiny(tie_embeddings="all", tgt_vocab_size=71, num_decoder_layers=1, dropout=0.1),
        batch=BatchConfig(max_tokens=200, num_buckets=2, max_len=40),
        evaluation=EvaluationConfig(batch_size=8, max_decode_len=12),
        epochs=1,
    )
    train(config, console=Console(quiet=True))
    return folder / "run"


def test_a_model_that_fails_while_it_runs_exits_with_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from parity import ladder

    def fail(_: object) -> None:
        raise RuntimeError("the port is broken")

    monkeypatch.setattr(ladder, "check", fail)
    assert status("check", "--preset", "tiny") == 3
    captured = capsys.readouterr()
    assert "the port is broken" in captured.out + captured.err


def test_trained_weights_are_checked_on_the_runs_own_text(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("check", "--checkpoint", str(trained_run), "--json", str(tmp_path / "report.json")) == 0
    assert "The two are equal" in capsys.readouterr().out
    values = json.loads((tmp_path / "report.json").read_text())
    assert values["passed"]
    assert "step" in values["name"]


def test_a_run_in_half_width_with_library_attention_can_be_checked(trained_run: Path, tmp_path: Path) -> None:
    """Its bfloat16 weights go exactly to float32, and its library attention is checked as the plain one."""
    config = RunDir(trained_run).read_config()
    model = config.model.replace(param_dtype="bfloat16", dtype="bfloat16", attention="library")
    config = config.replace(run_dir=tmp_path / "half", model=model, max_steps=2)
    train(config, console=Console(quiet=True))
    assert status("check", "--checkpoint", str(tmp_path / "half"), "--json", str(tmp_path / "report.json")) == 0
    name = json.loads((tmp_path / "report.json").read_text())["name"]
    assert "with plain attention, its bfloat16 weights as float32" in name


def test_a_run_goes_to_torch_and_back_with_the_same_bytes(trained_run: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "model.pt", tmp_path / "params"
    assert status("convert", "--from", "flax", "--to", "torch-reference", str(trained_run), str(there)) == 0
    assert status("convert", "--from", "torch-reference", "--to", "flax", str(there), str(back)) == 0
    newest = max((trained_run / "checkpoints").glob("[0-9]*"), key=lambda folder: int(folder.name))
    original, returned = read_tensors(newest / "params").tensors, read_tensors(back).tensors
    assert sorted(original) == sorted(returned)
    for name, array in original.items():
        assert bits_equal(array, returned[name]), name
    assert "tgt_embedding.weight" in read_tensors(there).aliases


def test_what_is_there_is_not_overwritten_unasked(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"precious")
    arguments = ("convert", "--from", "flax", "--to", "torch-reference", str(trained_run), str(target))
    assert status(*arguments) == 1
    assert target.read_bytes() == b"precious"
    assert str(target) in capsys.readouterr().err
    assert status(*arguments, "--overwrite") == 0
    assert target.read_bytes() != b"precious"
