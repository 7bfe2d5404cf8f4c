"""T3 with a real SIGKILL: whatever a killed run leaves behind, the same command ends as if nothing had happened."""

import signal
import time
from pathlib import Path

from tests.train.conftest import Ended, metrics, saved, start, train
from train.config import CheckpointConfig, TrainConfig

MOMENTS = [
    "2.*",  # the first save begins: its temporary folder is there, and no checkpoint
    "4.*/*/*",  # the second one has written its first file
    "8",  # the fourth is committed, and the oldest checkpoint about to be removed
]


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


def test_killed_while_saving_and_continued_ends_bit_identical(tiny_run, tmp_path: Path, whole: Ended) -> None:
    killed = tiny_run(tmp_path / "killed", checkpoint=CheckpointConfig(every_steps=2, keep=2))
    torn = 0
    for moment in MOMENTS:
        kill_as_soon_as(moment, killed, tmp_path / "log")
        names = [path.name for path in (killed.run_dir / "checkpoints").iterdir()]
        torn += any(not name.isdigit() for name in names)
    assert torn, "the test wants a kill that leaves half a checkpoint"

    result, shown = train(killed)
    assert "Continuing from step 8, epoch 2" in shown
    assert result == whole.result
    assert saved(killed) == saved(whole.config)
    assert metrics(killed.run_dir) == metrics(whole.config.run_dir)
    for name in ("tokenizer.json", "corpus.sha256"):
        assert (killed.run_dir / name).read_bytes() == (whole.config.run_dir / name).read_bytes(), name
    left, expected = (sorted(path.name for path in run.run_dir.iterdir()) for run in (killed, whole.config))
    assert left == expected
    assert sorted(path.name for path in (killed.run_dir / "checkpoints").iterdir()) == ["10", "12"]
