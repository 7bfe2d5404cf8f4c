"""What every test shares: the environment, and array shapes that are checked while tests run.

All of it must be in place before jax, torch or the packages are imported, so it happens when pytest loads this file.
"""

import inspect
import os
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
os.environ.setdefault("JAX_PLATFORMS", "cpu")
for _threads in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")  # xdist has a process for every core
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Threads of XLA's pool, one a core by default: with fewer than devices, collectives can wait for each other.
os.environ.setdefault("PJRT_NPROC", "32")
# Tests compile much and compute little. Seconds of CPU to compile the gradient of a tiny 1+1-layer model: 3.3 as it is,
# 1.7 without LLVM's optimisations, 0.6 with XLA's older emitters besides, 0.5 with the code in one module.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",  # virtual ones, for what runs on several devices
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
).strip()

from jaxtyping import install_import_hook  # noqa: E402

# Left out: torch_reference, because torch.compile(fullgraph=True) cannot trace through the checks and its tests of that
# would be skipped (CHECK_TORCH_SHAPES=1 has it the other way round); parity, whose tests hand in wrong types on
# purpose, to see the package's own errors.
_CHECKED = ["flax_transformer", "train"]
if os.environ.get("CHECK_TORCH_SHAPES") == "1":
    _CHECKED.append("torch_reference")
install_import_hook(_CHECKED, "beartype.beartype")

import jax  # noqa: E402
import pytest  # noqa: E402

from flax_transformer import AttentionMask  # noqa: E402

# jax rebuilds the mask around placeholders that are no arrays, by this very __init__; so its check is taken off. The
# shapes are still checked in every function that the mask is given to.
AttentionMask.__init__ = inspect.unwrap(AttentionMask.__init__)


@pytest.fixture
def x64() -> Iterator[None]:
    """The whole test in float64 where jax is concerned: for equalities."""
    with jax.enable_x64(True):
        yield
