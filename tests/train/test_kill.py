"""T3 with a real SIGKILL: whatever a killed run leaves behind, the same command ends as if nothing had happened."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.train.test_loop import saved
from train.config import CheckpointConfig, TrainConfig

RUN = """
import json, sys
from rich.console import Console
from train.config import TrainConfig
from train.loop import run
run(TrainConfig.from_dict(json.loads(sys.argv[1])), console=Console())
"""

MOMENTS = [
    "2.*",  # the first save begins: its temporary folder is there, and no checkpoint
    "4.*/*/*",  # the second one has written its first file
    "8",  # the fourth is committed, and the oldest checkpoint about to be removed
]


def start(config: TrainConfig, log: Path) -> subprocess.Popen:
    with log.open("w") as file:
        command = [sys.executable, "-c", RUN, json.dumps(config.to_dict())]
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def finish(config: TrainConfig, log: Path) -> str:
    """Lets the run come to its end; what it printed."""
    with start(config, log) as process:
        try:
            assert process.wait(timeout=120) == 0, log.read_text()
        finally:
            process.kill()
    return log.read_text()


def kill_as_soon_as(moment: str, config: TrainConfig, log: Path) -> None:
    """SIGKILL when the glob pattern matches something among the checkpoints."""
    with start(config, log) as process:
        try:
            until = time.monotonic() + 120
            while not any((config.run_dir / "checkpoints").glob(moment)):
                assert process.poll() is None, f"ended before {moment}: {log.read_text()}"
                assert time.monotonic() < until, f"no {moment} in time: {log.read_text()}"
                time.sleep(0.001)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL, log.read_text()


def test_killed_while_saving_and_continued_ends_bit_identical(tiny_run, tmp_path):
    every_2 = CheckpointConfig(every_steps=2, keep=2)
    whole, killed = (tiny_run(tmp_path / name, checkpoint=every_2) for name in ("whole", "killed"))
    finish(whole, tmp_path / "log")

    torn = 0
    for moment in MOMENTS:
        kill_as_soon_as(moment, killed, tmp_path / "log")
        names = [path.name for path in (killed.run_dir / "checkpoints").iterdir()]
        torn += any(not name.isdigit() for name in names)
    assert torn, "the test wants a kill that leaves half a checkpoint"

    assert "Continuing from step 8, epoch 2" in finish(killed, tmp_path / "log")
    assert saved(killed) == saved(whole)
    for name in ("metrics.jsonl", "tokenizer.json", "corpus.sha256"):
        assert (killed.run_dir / name).read_bytes() == (whole.run_dir / name).read_bytes(), name
    for folder in (".", "checkpoints"):  # nothing half done is left
        left, expected = (sorted(path.name for path in (run.run_dir / folder).iterdir()) for run in (killed, whole))
        assert left == expected
