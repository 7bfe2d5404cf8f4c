"""Rungs that compare a side with itself, or with the machine: preflight, weights, buffers, modes of execution."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from parity.diagnose.diagnosis import Diagnosis, kind
from parity.diagnose.positions import between_tables
from parity.diagnose.precision import FLOAT32, LOW_PRECISION
from parity.rungs import Rung, Section
from parity.trace import LOSS, OUTPUT

NOT_REPEATABLE = kind("not repeatable", "a side that differs from itself: dropout left on, or other random numbers")
VERSION = kind("version", "a package that is older than needed, or newer than was tried")
NO_INVERSE = kind("rule without an inverse", "weights that change on the way there and back")
BUFFER = kind("buffer changed in evaluation", "running statistics that a run in evaluation mode changes")
TABLE = kind("table rounded or computed otherwise", "a buffer that both sides work out for themselves")
PER_DEVICE = kind("loss averaged per device", "means over devices that hold different numbers of tokens")
WATCHED = kind("watching changes the values", "the port computes something else when nobody watches")
ON_THE_BATCH = kind("depends on the batch", "what a row gives depends on the other rows of its device")
EAGER = kind("eager differs from jit", "operation by operation it is another program")


def explain_preflight(failed: Rung) -> Diagnosis | None:
    """By the first section that fails."""
    section = _first(failed)
    worst = section.worst
    assert worst is not None, "a section fails by a comparison"
    words = f"{worst.tensor}: {worst.detail}" if worst.detail else worst.tensor
    name, fix = {
        "versions": (VERSION, "install a version within the range"),
        "float64 in the port": (FLOAT32, "build the port without fixing its dtype, and without casts to float32"),
        "matrix product": (LOW_PRECISION, "jax_default_matmul_precision=highest; in torch, no TF32"),
        "each side against itself": (NOT_REPEATABLE, "switch dropout off in evaluation, or fix the random numbers"),
    }.get(section.title, (NOT_REPEATABLE, "look at it"))
    return Diagnosis(kind=name, module=worst.tensor, sentence=f"{section.title.capitalize()}: {words}", fix=fix)


def explain_weights(failed: Rung) -> Diagnosis | None:
    """A rule of the mapping that loses something."""
    names = ", ".join(failure.tensor for failure in failed.failures[:3])
    return Diagnosis(
        kind=NO_INVERSE,
        module=failed.failures[0].tensor,
        sentence=f"There and back, {names} changed",
        fix="give each operation of the rule an inverse: Scale by a power of two, no rounding",
    )


def explain_buffers(failed: Rung, tables: Callable[[str], tuple[np.ndarray, np.ndarray] | None]) -> Diagnosis | None:
    """Position tables by their formulas. `tables`: name -> the reference's and the port's."""
    section, name = _first(failed), _first(failed).failures[0].tensor.partition(" (batch")[0]
    if section.title == "buffers after a run":
        fix = "call eval() on the port, or use_running_average=True"
        return Diagnosis(kind=BUFFER, module=name, sentence=f"A run in evaluation mode changes {name}", fix=fix)
    pair = tables(name)
    if pair is not None and np.array_equal(pair[1], pair[0].astype(np.float32)):
        sentence, fix = f"The port's {name} is rounded to float32", "compute it in numpy float64, and cast last"
        return Diagnosis(kind=FLOAT32, module=name, sentence=sentence, fix=fix)
    found = None if pair is None or pair[0].ndim < 2 else between_tables(*pair)
    if found is not None:
        return found.diagnosis(name)
    if pair is not None and pair[0].shape == pair[1].shape:
        error = float(np.linalg.norm((pair[1] - pair[0]).ravel()) / max(float(np.linalg.norm(pair[0].ravel())), 1e-300))
        if error < 1e-5:
            sentence = f"{name} differs by {error:.1e}, as much as rounding to float32 or another sine does"
            return Diagnosis(kind=TABLE, module=name, sentence=sentence, fix="compute it in numpy float64, cast last")
    return None


def explain_modes(failed: Rung) -> Diagnosis | None:
    """By the mode that fails first, and by what fails in it."""
    section = _first(failed)
    names = {failure.tensor for failure in section.failures}
    results = any(name.startswith(OUTPUT) for name in names)
    if section.title.startswith(("sharded", "pmap")) and not results:
        sentence = f"{section.title.capitalize()}: outputs are equal, {LOSS} and gradients are not"
        fix = "divide the sum of losses over all devices by the sum of tokens over all devices"
        return Diagnosis(kind=PER_DEVICE, module=section.title, sentence=sentence, fix=fix)
    if section.title.startswith("pmap"):
        sentence = f"{section.title.capitalize()}: what a row gives depends on how many others its device has"
        fix = "in evaluation compute nothing over the batch: no mean, no statistics, no branch on its size"
        return Diagnosis(kind=ON_THE_BATCH, module=section.title, sentence=sentence, fix=fix)
    known: Mapping[str, Any] = {
        "untapped": (WATCHED, "look for what depends on being traced, sown or captured"),
        "eager": (EAGER, "look for Python branches, numpy, and casts that only tracing decides"),
    }
    if section.title not in known:
        return None
    name, fix = known[section.title]
    sentence = f"{section.title.capitalize()}, the port computes something else: {', '.join(sorted(names)[:3])}"
    return Diagnosis(kind=name, module=section.title, sentence=sentence, fix=fix)


def _first(failed: Rung) -> Section:
    return next(section for section in failed.outcome.sections if not section.passed and section.failures)
