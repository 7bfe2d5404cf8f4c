"""T4: a run goes on with another number of devices or processes than it was begun with, as if nothing had changed."""

import dataclasses
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from tests.train.conftest import metrics, saved, start, train
from train.config import ParallelConfig, TrainConfig

ONE = ParallelConfig(num_devices=1, compile_cache=None)
HALF, ALL = 4, 9


def two_processes(config: TrainConfig, folder: Path) -> None:
    """The command line twice, as on two hosts with four devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    processes = []
    for number in (0, 1):
        joined = dataclasses.replace(
            config.parallel, num_devices=None, coordinator_address=address, num_processes=2, process_id=number
        )
        before = f"import os; os.environ['XLA_FLAGS'] = {flags!r}"
        processes.append(start(config.replace(parallel=joined), folder / f"log-{number}", before=before))
    try:
        for number, process in enumerate(processes):
            assert process.wait(timeout=300) == 0, (folder / f"log-{number}").read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert "The run is in" in (folder / "log-0").read_text()
    assert "The run is in" not in (folder / "log-1").read_text(), "one of them reports"


@pytest.fixture(scope="module")
def whole(tiny_run, tmp_path_factory) -> TrainConfig:
    """On one device from beginning to end."""
    config = tiny_run(tmp_path_factory.mktemp("whole"), parallel=ONE, max_steps=ALL)
    train(config)
    return config


def losses(config: TrainConfig) -> list[float]:
    records = [record for record in metrics(config.run_dir) if record["kind"] == "train"]
    assert [record["step"] for record in records] == list(range(1, ALL + 1))
    return [record["loss"] for record in records]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ParallelConfig(num_devices=8), ONE),
        (ONE, ParallelConfig(num_devices=8, fsdp=2)),
        (ParallelConfig(num_devices=4, mode="pmap"), ParallelConfig(num_devices=3, accumulation_steps=2)),
        ("two processes", ONE),
    ],
    ids=["of 8 with 1", "of 1 with 8, spread", "of 4 under pmap with 3 and micro-batches", "of 2 processes with 1"],
)
def test_goes_on(tiny_run, tmp_path, whole, before, after):
    run_dir = tmp_path / "run"
    if before == "two processes":
        two_processes(tiny_run(run_dir, parallel=ONE, max_steps=HALF), tmp_path)
    else:
        train(tiny_run(run_dir, parallel=dataclasses.replace(before, compile_cache=None), max_steps=HALF))
    config = tiny_run(run_dir, parallel=dataclasses.replace(after, compile_cache=None), max_steps=ALL)
    _, shown = train(config)
    assert f"Continuing from step {HALF}" in shown
    np.testing.assert_allclose(losses(config), losses(whole), rtol=0, atol=1e-4)
    ours, theirs = saved(config), saved(whole)
    assert ours[:2] == theirs[:2]
    assert [array[:3] for array in ours[2]] == [array[:3] for array in theirs[2]]  # names, dtypes, shapes
