"""The same gradients on any devices (T1, T2, P7), the same masks (T12), and what keeps them so."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.train.some_steps import Outcome, config, plan_of, some_steps, text
from train.batching import Bucket
from train.config import ParallelConfig
from train.parallel import Devices, several_processes

ONE = ParallelConfig(num_devices=1)
EIGHT = {
    "jit on 8": ParallelConfig(num_devices=8),
    "pmap on 8": ParallelConfig(num_devices=8, mode="pmap"),
    "fsdp of 4 on 8": ParallelConfig(num_devices=8, fsdp=4),
    "fsdp of 8": ParallelConfig(num_devices=8, fsdp=8),
    "4 micro-batches, the last one ragged": ParallelConfig(num_devices=1, accumulation_steps=4),
    "3 devices, 2 micro-batches": ParallelConfig(num_devices=3, accumulation_steps=2),
    "pmap on 2, 4 micro-batches": ParallelConfig(num_devices=2, mode="pmap", accumulation_steps=4),
    "fsdp of 2 on 4, 3 micro-batches": ParallelConfig(num_devices=4, fsdp=2, accumulation_steps=3),
}
SINGLE_STEPS = 50


def two_processes(run, *, steps: int, folder: Path) -> Outcome:
    """The same as `some_steps`, by two processes with four devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    output = folder / "outcome.npz"
    processes = []
    for number in (0, 1):
        explicit = {"coordinator_address": address, "num_processes": 2, "process_id": number, "num_devices": None}
        config = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, **explicit))
        command = [
            sys.executable,
            "-m",
            "tests.train.some_steps",
            str(output),
            json.dumps(config.to_dict()),
            str(steps),
        ]
        environment = os.environ | {"XLA_FLAGS": flags}
        with (folder / f"errors-{number}").open("w") as errors:
            processes.append(subprocess.Popen(command, env=environment, stderr=errors))
    try:
        for number, process in enumerate(processes):
            assert process.wait(timeout=240) == 0, (folder / f"errors-{number}").read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    with np.load(output) as arrays:
        groups = [{k.split("/")[1]: arrays[k] for k in arrays if k.startswith(g)} for g in ("gradients/", "params/")]
        return Outcome(arrays["losses"].tolist(), *groups)


def assert_same_gradients(got: Outcome, expected: Outcome) -> None:
    assert got.losses == pytest.approx(expected.losses, rel=1e-12)
    assert got.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert np.abs(gradient).max() > 0 or "k_proj.bias" in name
        np.testing.assert_allclose(got.gradients[name], gradient, rtol=0, atol=1e-12, err_msg=name)


@pytest.fixture(scope="module")
def on_one() -> Outcome:
    with jax.enable_x64(True):
        return some_steps(config(ONE))


@pytest.mark.parametrize("parallel", EIGHT.values(), ids=EIGHT.keys())
def test_same_gradients_with_dropout_on(x64, parallel, on_one):
    assert_same_gradients(some_steps(config(parallel)), on_one)


@pytest.mark.parametrize(
    "parallel", [ParallelConfig(), ParallelConfig(fsdp=8), ParallelConfig(mode="pmap")], ids=["jit", "fsdp", "pmap"]
)
def test_same_gradients_in_two_processes(tmp_path, parallel, on_one):
    assert_same_gradients(two_processes(config(parallel), steps=1, folder=tmp_path), on_one)


def test_packed_and_unpacked_epochs_have_the_same_gradient(x64):
    """One batch holds the whole text either way; dropout off, because masks go by rows."""
    outcomes = []
    for packing in (False, True):
        run = config(ParallelConfig(num_devices=2, accumulation_steps=2), dropout=0.0, packing=packing)
        big = dataclasses.replace(run.batch, max_tokens=2000, num_buckets=1)
        run = run.replace(batch=big)
        assert len(plan_of(run, 0, encoded=text())) == 1
        outcomes.append(some_steps(run))
    assert_same_gradients(outcomes[1], outcomes[0])


def test_the_ragged_batches_of_these_tests_are_ragged():
    plan = plan_of(config(ONE), 0, encoded=text())
    assert plan.shape(0).batch_size % 4
    assert plan.shape(0).batch_size % 3


def test_losses_of_fifty_steps_agree_in_float32():
    expected = some_steps(config(ONE, dtype="float32"), steps=SINGLE_STEPS).losses
    assert expected[-1] < expected[0]
    for name in ("jit on 8", "pmap on 8", "fsdp of 4 on 8", "4 micro-batches, the last one ragged"):
        losses = some_steps(config(EIGHT[name], dtype="float32"), steps=SINGLE_STEPS).losses
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-4, err_msg=name)


def test_losses_of_fifty_steps_agree_in_float32_in_two_processes(tmp_path):
    run = config(ParallelConfig(fsdp=2), dtype="float32")
    expected = some_steps(run.replace(parallel=ONE), steps=SINGLE_STEPS).losses
    got = two_processes(run, steps=SINGLE_STEPS, folder=tmp_path).losses
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


def test_fsdp_spreads_parameters_and_moments():
    run = config(EIGHT["fsdp of 4 on 8"], dtype="float32")
    devices = Devices(run.parallel)
    from train.state import initial_state

    state = devices.place_state(initial_state(run))
    for tree in (state.params, state.opt_state[0].mu):
        kernel = tree["encoder.layers.0.feed_forward.linear1.kernel"]
        assert {shard.data.size for shard in kernel.addressable_shards} == {kernel.size // 4}


def test_a_batch_is_filled_up_with_rows_that_weigh_nothing():
    devices = Devices(ParallelConfig(num_devices=8, accumulation_steps=3))
    assert devices.padded_rows(1) == 24
    assert devices.padded_rows(24) == 24
    shapes = devices.batch_shapes(Bucket(5, 7, 25), packed=False)
    assert shapes.src.shape == (3, 16, 5)
    plan = plan_of(config(ONE), 0, encoded=text())
    batch = devices.place_batch(plan.shape(0), lambda start, stop: plan.rows(0, start, stop), vocab_sizes=(40, 40))
    rows = np.asarray(batch.rows).ravel()
    assert rows.tolist() == list(range(len(rows)))
    src = np.asarray(batch.src).reshape(len(rows), -1)
    np.testing.assert_array_equal(src[: plan.shape(0).batch_size], plan.batch(0).src)
    assert not src[plan.shape(0).batch_size :].any()


def test_ids_outside_the_vocabulary_are_refused():
    plan = plan_of(config(ONE), 0, encoded=text())
    for name, sizes in (("src", (20, 40)), ("tgt_in", (40, 20))):
        with pytest.raises(ValueError, match=rf"{name}: expected ids in \[0, 20\), got 39"):
            Devices(ONE).place_batch(plan.shape(0), lambda start, stop: plan.rows(0, start, stop), vocab_sizes=sizes)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(num_devices=9), "parallel.num_devices: expected at most the 8 there are, got 9"),
        (ParallelConfig(fsdp=3), "parallel.fsdp: expected a divisor of the 8 devices, got 3"),
    ],
)
def test_devices_that_there_are_not(parallel, message):
    with pytest.raises(ValueError, match=message):
        Devices(parallel)


@pytest.mark.parametrize(
    ("environment", "cluster"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "Slurm"),
        ({"JOB_COMPLETION_INDEX": "0"}, "Kubernetes"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2"}, "Cloud TPU"),
    ],
)
def test_clusters_are_told_by_their_environment(environment, cluster):
    assert several_processes(environment) == cluster
