"""`python -m parity`: exit statuses, messages, and a trained run from checkpoint to PyTorch and back."""

import dataclasses
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
from train.average import average_run
from train.config import (
    BatchConfig,
    CorpusConfig,
    EvaluationConfig,
    OptimizerConfig,
    ParallelConfig,
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
        (("check",), "expected one of MY_PORT.PY, --preset and --checkpoint, got none"),
        (("check", "port.py", "--preset", "tiny"), "got a file and --preset"),
        (("check", "--preset", "huge"), "huge"),
        (("check", "--preset", "tiny", "--set", "norm_oder=pre"), "norm_oder=pre"),
        (("check", "--preset", "tiny", "--set", "window"), "FIELD=VALUE"),
        (("check", "--checkpoint", "somewhere", "--set", "window=3"), "expected --set with --preset alone"),
        (("check", "--preset", "tiny", "--module", "encoder"), "expected --module with a file whose port is"),
        (("convert", "a", "b", "--from", "torch", "--to", "flax"), "torch"),
        (("check", "--preset", "tiny", "--set", "num_heads=7"), "num_heads: expected a divisor of d_model=30, got 7"),
        (("check", "--preset", "tiny", "--set", "attention=library"), "got 'library'"),
        (("check", "--checkpoint", "no-such-run"), "no-such-run"),
        (("check", "--preset", "tiny", "--set", "dtype=bfloat16"), "whatever the config says"),
        (("check", "--preset", "tiny", "--seed", "-1"), "--seed: expected at least 0"),
        (("check", "--preset", "tiny", "--json", "/proc/nope/report.json"), "/proc/nope"),
        (("check", "--preset", "tiny", "--report", "/proc/nope"), "/proc/nope"),
        (("check", "--preset", "tiny", "--rungs", "forwards"), "--rungs: expected some of preflight, inventory"),
        (("check", "--preset", "tiny", "--against", "no.golden"), "expected a golden file, got no.golden"),
        (("check", "no_port.py"), "got no_port.py, which is no file"),
        (("record", "port.py"), "expected a file to write, got none"),
        (("record", "no_port.py", "port.golden"), "got no_port.py, which is no file"),
        (("record", "port.py", "port.golden", "--draws", "-1"), "--draws: expected at least 0"),
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


@pytest.mark.parametrize("command", ["check", "check-trainer", "record", "selftest", "convert"])
def test_help_waits_for_no_framework(command: str) -> None:
    code = (
        "import sys, parity; from parity.__main__ import main\n"
        f"try:\n    main(['{command}', '--help'])\n"
        "except SystemExit as error:\n    assert not error.code\n"
        "loaded = {'jax', 'torch', 'flax', 'numpy'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "assert 'Pair' in dir(parity) and parity.Pair.__module__ == 'parity.pair'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


PORT = """
import beside

import parity
from parity.weights.rules import Transpose

RULES = [parity.Rule("weight", "kernel", (Transpose(),)), parity.Rule("bias", "bias")]


def pair():
    return beside.make(RULES)
"""

BESIDE = """
import numpy as np
import torch
from flax import nnx

import parity
from parity.weights.mapping import WeightMapping


def make(rules):
    inputs = {"x": np.random.default_rng(0).normal(size=(3, 5))}
    port = lambda: nnx.Linear(5, 7, rngs=nnx.Rngs(0))
    mapping = WeightMapping(rules)
    return parity.Pair(
        name="one layer", reference=lambda: torch.nn.Linear(5, 7), port=port, inputs=inputs, mapping=mapping
    )
"""


@pytest.fixture
def port_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_port.py").write_text(PORT, encoding="utf-8")
    (tmp_path / "beside.py").write_text(BESIDE, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    return tmp_path / "my_port.py"


def test_a_users_file_is_checked_and_reported(port_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = port_file.parent / "report"
    known = set(sys.modules)
    rungs = ("--rungs", "weights", "forward", "gradients")
    assert status("check", str(port_file), "--report", str(folder), *rungs) == 0
    assert "The two are equal: 3 of 17 rungs compared" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {"index.html", "junit.xml", "report.json"}
    assert "my_port" not in set(sys.modules) - known, "no import statement can meet the file by accident"
    left_out = json.loads((folder / "report.json").read_text())["rungs"][6]
    assert (left_out["status"], left_out["skipped"]) == ("skipped", "left out on request")


def test_a_port_that_differs_exits_with_1_and_climbs_on_if_asked(
    port_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twisted = BESIDE.replace("lambda: nnx.Linear(5, 7,", "lambda: nnx.Linear(5, 7, precision=None, dot_general=off,")
    twisted += """

def off(*args, **kwargs):
    import jax
    return jax.lax.dot_general(*args, **kwargs) * (1 + 1e-7)
"""
    (port_file.parent / "beside.py").write_text(twisted, encoding="utf-8")
    rungs = ("--rungs", "weights", "forward", "gradients")
    assert status("check", str(port_file), *rungs) == 1
    stopped = capsys.readouterr().out
    assert "NOT EQUAL: 2 of 17" in stopped
    assert "not reached" in stopped
    assert status("check", str(port_file), "--keep-going", *rungs) == 1
    assert "NOT EQUAL: 3 of 17" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def pair(:\n", "my_port.py, line 1: expected Python, got"),
        ("import no_such_package\n", "expected its imports to succeed, got No module named 'no_such_package'"),
        ("def pair():\n    import no_such_package\n", "got No module named 'no_such_package'"),
        (
            "def pairs(): ...\n",
            "expected a function pair() that returns a parity.Pair, got a file without it (it has pairs)",
        ),
        ("pair = 3\n", "got pair = 3"),
        ("def pair():\n    return 3\n", "expected pair() to return a parity.Pair, got int"),
    ],
)
def test_a_file_that_brings_no_pair_exits_with_2_and_is_named(
    text: str, message: str, port_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port_file.write_text(text, encoding="utf-8")
    assert status("check", str(port_file)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "my_port.py" in error


@pytest.mark.parametrize("when", ["built", "run"])
def test_a_model_that_fails_exits_with_3(when: str, port_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method = {"built": "def __init__(self, *args, **kwargs)", "run": "def __call__(self, x)"}[when]
    broken = BESIDE.replace("lambda: nnx.Linear(", "lambda: Broken(")
    broken += f"""

class Broken(nnx.Linear):
    {method}:
        raise RuntimeError("the port is broken")
"""
    (port_file.parent / "beside.py").write_text(broken, encoding="utf-8")
    assert status("check", str(port_file), "--rungs", "weights", "forward") == 3
    captured = capsys.readouterr()
    assert "a model failed while it was built or ran" in captured.err
    assert "the port is broken" in captured.out


def test_a_reference_is_recorded_with_its_sizes_and_the_port_checked_against_it(
    port_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = port_file.with_name("port.golden")
    assert status("record", str(port_file), str(golden), "--draws", "1") == 0
    printed = capsys.readouterr().out
    assert "batch 1: gradients" in printed
    assert f"{golden.stat().st_size:,} bytes" in printed
    assert status("record", str(port_file), str(golden)) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert status("check", str(port_file), "--against", str(golden), "--rungs", "weights", "forward") == 0
    assert "port.golden" in capsys.readouterr().out


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
        corpus=CorpusConfig(kind="files", path=folder, cache=folder / "cache"),
        tokenizer=TokenizerConfig(vocab_size=280),
        model=TransformerConfig.tiny(tie_embeddings="all", tgt_vocab_size=71, num_decoder_layers=1, dropout=0.1),
        batch=BatchConfig(max_tokens=200, num_buckets=2, max_len=40),
        evaluation=EvaluationConfig(batch_size=8, max_decode_len=12),
        parallel=ParallelConfig(num_devices=1),
        epochs=1,
    )
    train(config, console=Console(quiet=True))
    return folder / "run"


def test_trained_weights_are_checked_on_the_runs_own_text(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--json", str(tmp_path / "report.json"), "--rungs", "weights", "forward", "loss", "gradients")
    assert status("check", "--checkpoint", str(trained_run), *arguments) == 0
    assert "The two are equal: 4 of 17 rungs compared" in capsys.readouterr().out
    values = json.loads((tmp_path / "report.json").read_text())
    assert values["passed"]
    assert "step" in values["name"]


def test_a_run_in_half_width_with_library_attention_can_be_checked(trained_run: Path, tmp_path: Path) -> None:
    """Its bfloat16 weights go exactly to float32, and its library attention is checked as the plain one."""
    config = RunDir(trained_run).read_config()
    model = config.model.replace(param_dtype="bfloat16", dtype="bfloat16", attention="library")
    config = config.replace(run_dir=tmp_path / "half", model=model, max_steps=2)
    train(config, console=Console(quiet=True))
    arguments = ("--json", str(tmp_path / "report.json"), "--rungs", "weights", "forward")
    assert status("check", "--checkpoint", str(tmp_path / "half"), *arguments) == 0
    name = json.loads((tmp_path / "report.json").read_text())["name"]
    assert "with plain attention, its bfloat16 weights as float32" in name


def test_a_run_that_the_reference_could_not_have_trained_is_checked_with_adam_and_noam(
    trained_run: Path, tmp_path: Path
) -> None:
    """AdamW, another schedule, no clipping, a moving average, float16, packed rows; and its average, inference only."""
    config = RunDir(trained_run).read_config()
    config = config.replace(
        run_dir=tmp_path / "other",
        model=config.model.replace(dtype="float16"),
        batch=dataclasses.replace(config.batch, packing=True),
        optimizer=OptimizerConfig(
            name="adamw",
            weight_decay=0.01,
            schedule="inverse_sqrt",
            learning_rate=1e-3,
            warmup_steps=5,
            clip_norm=None,
            ema_decay=0.9,
        ),
        max_steps=2,
    )
    train(config, console=Console(quiet=True))
    average_run(config.run_dir, tmp_path / "averaged", ema=True)
    rungs = {
        "other": ("weights", "forward", "clipping", "optimizer", "schedule", "trajectory"),
        "averaged": ("weights", "forward"),
    }
    for run, wanted in rungs.items():
        report = tmp_path / f"{run}.json"
        assert status("check", "--checkpoint", str(tmp_path / run), "--json", str(report), "--rungs", *wanted) == 0
        values = json.loads(report.read_text())
        assert "Adam and Noam take the place of adamw and inverse_sqrt" in values["name"]
        assert [r["name"] for r in values["rungs"] if r["status"] == "passed"] == list(wanted)


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
