"""XLA's flags for a process that does nothing but check: set before jax reads them."""

import os
import sys

DEVICES = "xla_force_host_platform_device_count"
QUICKLY = {
    "xla_backend_optimization_level": (0, 3),
    "xla_cpu_use_fusion_emitters": (False, True),
    "xla_cpu_parallel_codegen_split_count": (1, 32),
}
"""What makes the hundreds of small programs of a check compile faster, and XLA's own value. An eager forward pass takes
3.4 s of CPU time instead of 4.7."""

changed: dict[str, bool | int] = {}
"""The flags that this process was given though nobody asked for them, with XLA's own values: see compilation."""


def set_flags(*, devices: int) -> None:
    """Splits the CPU into virtual devices, and compiles quickly; a flag that the user has set stays as it is."""
    flags = os.environ.get("XLA_FLAGS", "")
    platforms = os.environ.get("JAX_PLATFORMS", "cpu").split(",")
    if "jax" in sys.modules or "cpu" not in platforms:
        return
    added = [] if DEVICES in flags else [f"--{DEVICES}={devices}"]
    for flag, (quick, own) in QUICKLY.items():
        if flag not in flags:
            added.append(f"--{flag}={str(quick).lower()}")
            changed[flag] = own
    os.environ["XLA_FLAGS"] = " ".join([flags, *added]).strip()
