"""Keeps the memory of one step for the next, where a CPU is the device."""

import ctypes
import importlib.metadata
import sys

# Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Has glibc hold on to large blocks that are freed; returns whether it could.

    XLA takes the memory of a step anew each time, hundreds of megabytes, and glibc gives blocks of that size back to
    the kernel as soon as they are free: 150,000 page faults a step, a sixth of its time (see benchmarks/results). One
    arena for all threads, because only the main one can keep large blocks.

    A setting of the whole process, before other threads begin: only a command line calls this. Nothing is done on
    other systems, or where jax has a plugin for an accelerator, whose memory is its own.
    """
    if sys.platform != "linux" or importlib.metadata.entry_points(group="jax_plugins"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(
        mallopt(parameter, value) == 1
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1))
    )
