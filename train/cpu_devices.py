"""CPU cores as devices, for work that is shared out without waiting: decoding."""

import contextlib
import os

MOST = 4
"""Devices, at most: the more there are, the fewer sentences each decodes together."""


def one_device_a_core() -> None:
    """Lets jax see each core as a device of its own. Nothing changes for accelerators, or once jax has its devices.

    Many steps of decoding are small, and what is shared out within them waits for its slower half: two devices of one
    core each take 0.8 of the time of one device of two (see benchmarks/results). Where XLA_FLAGS or jax's own setting
    say how many CPU devices there are, that holds.
    """
    import jax

    if (
        "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
        or jax.config.values["jax_num_cpu_devices"] >= 1
    ):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(RuntimeError):  # it has begun
        jax.config.update("jax_num_cpu_devices", min(MOST, cores))
