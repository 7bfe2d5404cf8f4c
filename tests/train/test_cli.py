import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.conftest import COMMAND, Ended, listing, metrics, saved, start, steps_saved, train

HELP = """
import sys
from train.__main__ import main
try:
    status = main({arguments})
except SystemExit as stop:
    status = stop.code
heavy = {{"jax", "flax", "optax", "orbax", "torch", "numpy"}} & set(sys.modules)
assert not heavy, heavy
sys.exit(status)
"""


def python(*arguments: str, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        **options,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["run", "translate", "average", "plot"]),
        (["run", "--help"], ["demo", "multi30k-de-en"]),
        (["run", "demo", "--help"], ["--model.d-model", "--epochs"]),
        (["translate", "--help"], ["--run", "--batch-size"]),
        (["average", "--help"], ["--output", "--last", "--ema"]),
    ],
)
def test_help_answers_without_jax(arguments, words):
    done = python("-c", HELP.format(arguments=arguments))
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], []),
        (["run"], []),
        (["run", "dem"], ["dem"]),
        (["run", "demo", "--epoch-count", "3"], ["--epoch-count"]),
        (["run", "demo", "--epochs", "many"], ["--epochs", "many"]),
        (["run", "demo", "--epochs", "0"], ["epochs: expected more than 0, got 0"]),
        (["run", "demo", "--model.num-heads", "7"], ["num_heads: expected a divisor of d_model=128, got 7"]),
        (["run", "demo", "--optimizer.b1", "1.5"], ["optimizer.b1: expected a rate in [0, 1), got 1.5"]),
        (["run", "demo", "--parallel.fsdp", "0"], ["parallel.fsdp: expected more than 0, got 0"]),
        (["translate"], ["--run"]),
        (["average"], []),
        (["average", "somewhere"], ["--output"]),
    ],
)
def test_wrong_usage_exits_2_and_names_the_culprit(arguments, words):
    done = python("-m", "train", *arguments)
    assert done.returncode == 2, done.stderr
    shown = " ".join(done.stderr.replace("│", " ").split())
    assert all(word in shown for word in words), shown


def test_failures_exit_1_with_one_line(tmp_path):
    missing = tmp_path / "nowhere"
    done = python("-m", "train", "translate", "--run", str(missing), input="eins\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {missing}/config.json: expected the config of a run, found no such file\n"


FULL = """
import resource
from train.checkpoint import Checkpoints
save = Checkpoints.save
def full(self, state, record, **options):
    if int(state.step) == 6:  # as on a full disk: files beyond so many bytes cannot be written
        self.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    save(self, state, record, **options)
Checkpoints.save = full
"""


def test_a_save_that_fails_ends_the_run(tiny_run, tmp_path: Path, whole: Ended) -> None:
    """T4: with a message and status 1, and what was saved before is still there."""
    config = tiny_run(tmp_path / "run")
    done = python("-c", COMMAND.format(before=FULL), json.dumps(config.to_dict()))
    assert done.returncode == 1, done.stderr
    # Threads of Orbax and tensorstore complain as well, of event loops that are closed.
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "File too large" in error
    assert steps_saved(config.run_dir) == [3]
    train(config)  # and when there is room again, it goes on
    assert saved(config) == saved(whole.config)
    assert metrics(config.run_dir) == metrics(whole.config.run_dir)


def test_a_second_start_takes_the_programs_of_the_first(tiny_run, tmp_path: Path, whole: Ended) -> None:
    """T8, through the command line; and a run on the command line is the run of every other test."""
    parallel = dataclasses.replace(whole.config.parallel, compile_cache=tmp_path / "programs")
    entries = []
    for name in ("first", "second"):
        config = tiny_run(tmp_path / name, parallel=parallel)
        with start(config, tmp_path / "log") as process:
            assert process.wait(timeout=120) == 0, (tmp_path / "log").read_text()
        entries.append({name for name in listing(tmp_path / "programs") if not name.endswith("atime")})
        assert saved(config) == saved(whole.config)
        assert metrics(config.run_dir) == metrics(whole.config.run_dir)
    assert len(entries[0]) >= 5  # a training step, two evaluation steps, two decoders
    assert entries[1] == entries[0]
    assert "Compilations: training step 1 of 1, evaluation step 2 of 2." in (tmp_path / "log").read_text()


def test_averages_and_refusals(tmp_path: Path, whole: Ended) -> None:
    output = tmp_path / "average"
    done = python("-m", "train", "average", str(whole.config.run_dir), "--output", str(output), "--last", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{output}: the average of steps 9, 12 of ")
    assert done.stdout.endswith(", for inference only\n")
    done = python("-m", "train", "average", str(whole.config.run_dir), "--output", str(output))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {output}: expected a folder that does not exist yet\n"
    done = python("-m", "train", "translate", "--run", str(output), input="eins zwei\n\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    with start(whole.config.replace(run_dir=output), tmp_path / "log") as process:
        assert process.wait(timeout=120) == 1
    assert "expected a checkpoint to train on, got one for inference only" in (tmp_path / "log").read_text()
