"""How many devices a CPU is."""

import os
import subprocess
import sys

import pytest

from train.cpu_devices import MOST

SCRIPT = """
import os
os.sched_getaffinity = lambda pid: set(range({cores}))
from train.cpu_devices import one_device_a_core
one_device_a_core()
import jax
print(jax.local_device_count())
one_device_a_core()
"""


@pytest.mark.parametrize(
    ("cores", "environment", "expected"),
    [
        (1, {}, 1),
        (2, {}, 2),
        (64, {}, MOST),
        (2, {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, 3),
        (2, {"JAX_NUM_CPU_DEVICES": "5"}, 5),
    ],
)
def test_a_device_a_core_unless_something_else_is_said(cores, environment, expected):
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    environment = kept | {"JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(cores=cores)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(expected)
