"""Runs many small jobs in child processes, each with a limit of CPU time, whatever becomes of the child."""

import dataclasses
import multiprocessing
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

LIBRARIES = ("jax", "jax.numpy", "flax.nnx", "numpy", "optax", "orbax.checkpoint", "tokenizers", "torch")
PRELOADED = (*LIBRARIES, "torch._dynamo", "parity.ladder", "parity.selftest.programs")
"""Imported once, before the children are forked. None of them starts a device or a thread; no model is among them."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
FLAGS = (
    # Much is compiled and little computed.
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_force_host_platform_device_count=4",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """What became of a job."""

    item: Any
    how: Literal["done", "raised", "did not finish", "died"]
    value: Any = None
    """What the function returned, or the traceback."""


def prepare(cache: Path | None = None) -> None:
    """Sets the environment of the children, and starts the server that forks them.

    Variables that are set already stay; in the children jax and torch use one thread each, and four virtual devices.
    `cache` is a folder for compiled programs: most of what a fault does not touch is compiled again and again.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if cache is not None:
        for name, value in {"JAX_COMPILATION_CACHE_DIR": str(cache), **CACHE}.items():
            os.environ[name] = value
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in FLAGS if flag.split("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))


def run(
    function: Callable[[Any], Any],
    items: Sequence[Any],
    *,
    workers: int,
    per_process: int,
    cpu_seconds: int,
) -> Iterator[Ended]:
    """Calls `function` on every item, `per_process` of them one after the other in a child, `workers` at a time.

    `cpu_seconds` is the limit of each item; time that other processes take does not count. Yields in the order in
    which items end. A child that dies or exceeds its limit takes none of the remaining items along.
    """
    context = multiprocessing.get_context("forkserver")
    waiting = [list(items[i : i + per_process]) for i in range(0, len(items), per_process)]
    running: dict[Connection, tuple[Any, list[Any]]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                batch = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(theirs, function, batch, cpu_seconds), daemon=True)
                process.start()
                theirs.close()
                running[ours] = (process, batch)
            for ready in [pipe for pipe in wait(list(running)) if isinstance(pipe, Connection)]:
                process, batch = running[ready]
                try:
                    how, value = ready.recv()
                    yield Ended(item=batch.pop(0), how=how, value=value)
                except EOFError:
                    process.join()
                    del running[ready]
                    ready.close()
                    if batch:
                        yield Ended(item=batch.pop(0), how=_how(process.exitcode), value=f"exit {process.exitcode}")
                    if batch:
                        waiting.insert(0, batch)
    finally:
        for process, _ in running.values():
            process.terminate()


def _how(exitcode: int | None) -> Literal["did not finish", "died"]:
    return "did not finish" if exitcode in (-signal.SIGXCPU, -signal.SIGKILL) else "died"


def _child(pipe: Connection, function: Callable[[Any], Any], items: list[Any], cpu_seconds: int) -> None:
    # What a mutant prints, or a library remarks, is nobody's business.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    for item in items:
        used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        resource.setrlimit(resource.RLIMIT_CPU, (used + cpu_seconds, resource.RLIM_INFINITY))
        try:
            pipe.send(("done", function(item)))
        except Exception as error:
            trace = traceback.format_exc(limit=-4)
            pipe.send(("raised", f"{trace}\n{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
    pipe.close()
