import os
import subprocess
import sys

import pytest

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
        (["--help"], ["run", "translate"]),
        (["run", "--help"], ["demo", "multi30k-de-en"]),
        (["run", "demo", "--help"], ["--model.d-model", "--epochs"]),
        (["translate", "--help"], ["--run", "--batch-size"]),
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
        (["translate"], ["--run"]),
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
