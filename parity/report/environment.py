"""Versions, devices, and the settings that decide about precision."""

import datetime
import os
import platform
import sys
from importlib import metadata
from typing import Any

import jax

PACKAGES = ("twinformer", "jax", "jaxlib", "flax", "optax", "torch", "numpy", "safetensors", "orbax-checkpoint")


def versions() -> dict[str, str]:
    """Of what the figures depend on; "not installed" is a version too."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def environment() -> dict[str, Any]:
    """Of this process, as plain values. Torch is asked only if it was loaded: a golden file may stand for it."""
    torch = sys.modules.get("torch")
    values: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "versions": versions(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "jax_devices": [str(device) for device in jax.devices()],
        "jax_enable_x64_outside_the_float64_gate": bool(jax.config.read("jax_enable_x64")),
        "jax_matmul_precision": "highest",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    if torch is not None:
        values |= {
            "torch_threads": torch.get_num_threads(),
            "torch_float32_matmul_precision": torch.get_float32_matmul_precision(),
            "torch_allow_tf32": bool(torch.backends.cuda.matmul.allow_tf32),
        }
    return values
