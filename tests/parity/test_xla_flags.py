"""What a check tells XLA before jax is imported."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

CODE = """
import json, sys
from parity.xla_flags import set_flags
set_flags(devices=int(sys.argv[1]))
import os, jax
from parity.compilation import _options
print(json.dumps([len(jax.devices()), os.environ["XLA_FLAGS"], _options(quickly=False)]))
"""


def in_a_process(devices: int, flags: str = "", platforms: str = "cpu") -> Any:
    """(devices, flags, options for the program that users run)."""
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": platforms}
    command = [sys.executable, "-c", CODE, str(devices)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


@pytest.mark.parametrize("devices", [8, 2])
def test_the_cpu_is_split_and_what_is_compiled_as_users_do_has_xlas_own_values(devices: int) -> None:
    count, flags, users = in_a_process(devices)
    assert count == devices
    assert "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1" in flags
    assert users == {
        "xla_backend_optimization_level": 3,
        "xla_cpu_use_fusion_emitters": True,
        "xla_cpu_parallel_codegen_split_count": 32,
    }


def test_a_flag_that_the_user_has_set_stays_for_users_programs_too() -> None:
    own = "--xla_force_host_platform_device_count=3 --xla_cpu_use_fusion_emitters=true"
    count, flags, users = in_a_process(8, own)
    assert count == 3
    assert flags == f"{own} --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    assert users == {"xla_backend_optimization_level": 3, "xla_cpu_parallel_codegen_split_count": 32}
