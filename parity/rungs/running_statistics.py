"""What a step in training mode makes of running means and variances: a part of rung 10."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from parity.compare import Comparison, relative_error
from parity.rungs import Section, section
from parity.runs import Runs
from parity.tolerances import FLOAT64_RELATIVE, STATISTICS_RULE
from parity.trace import Trace, call_of, module_of
from parity.weights.mapping import Step

VARIANCE = "running variance"
"""Kind of the known difference: torch keeps the unbiased variance of a batch, Flax the biased one."""

COUNTER = "num_batches_tracked"


def changed(runs: Runs, reference: Trace) -> tuple[Step, ...]:
    """The reference's buffers that training mode changed and that have a place in the port, and the way there."""
    names = [
        name
        for name, array in reference.buffers.items()
        if name in runs.weights and runs.derived.travels(name) and not np.array_equal(array, runs.weights[name])
    ]
    return tuple(runs.mapping.plan(names)) if names else ()


def compare(runs: Runs, reference: Trace, port: Trace, steps: tuple[Step, ...]) -> tuple[Section, dict[str, Any]]:
    """Every one of them after one step, and the evidence."""
    unbiased = {name for known in runs.known if known.kind == VARIANCE for name in known.tensors}
    comparisons: list[Comparison] = []
    evidence: dict[str, Any] = {}
    for step in steps:
        expected = {name: np.asarray(reference.buffers[name], np.float64) for name in step.sources}
        old = {name: runs.weights[name].astype(np.float64) for name in step.sources}
        known = {name: _of_batch(runs, reference, name) for name in step.sources}
        detail = ""
        for name in step.sources:
            if name in unbiased:
                momentum, count = known[name]
                kept = (1.0 - momentum) * old[name]
                expected[name] = kept + (expected[name] - kept) * (count - 1.0) / count
                detail = f"the batch's variance taken times (n - 1) / n, n = {count:g}"
        ported, before = step.apply(expected), step.apply(old)
        for target in step.targets:
            found = port.buffers.get(target, np.zeros(0))
            error = relative_error(found, ported[target])
            comparisons.append(
                Comparison(
                    tensor=target,
                    error=error,
                    bound=FLOAT64_RELATIVE,
                    detail="; ".join(_words(found, ported[target], before[target], detail)),
                )
            )
            momentum, count = known[step.sources[0]]
            evidence[target] = {
                "old": before[target],
                "reference": step.apply(reference.buffers)[target],
                "port": found,
                "momentum": momentum,
                "count": count,
            }
    return section("running statistics after one step", "float64", STATISTICS_RULE, comparisons), evidence


def _words(found: np.ndarray, expected: np.ndarray, old: np.ndarray, detail: str) -> Iterator[str]:
    """How far each went from where it was, which tells a momentum from its complement."""
    if detail:
        yield detail
    if found.shape == expected.shape:
        wanted, went = float(np.linalg.norm(expected - old)), float(np.linalg.norm(found - old))
        if wanted > 0.0:
            yield f"moved by {wanted:.6g} in the reference, by {went:.6g} in the port, {went / wanted:.4g} times that"


def _of_batch(runs: Runs, reference: Trace, buffer: str) -> tuple[float, float]:
    """The momentum of the module that keeps the buffer, and how many values of a channel its batch had."""
    path = buffer.rpartition(".")[0]
    module = runs.live_reference().module("float64").get_submodule(path)
    momentum = getattr(module, "momentum", None)
    if momentum is None:  # torch then averages over all batches
        momentum = 1.0 / float(reference.buffers.get(f"{path}.{COUNTER}", np.ones(())))
    channels = runs.weights[buffer].size
    given = [array for name, array in reference.given.items() if module_of(call_of(name)) == path]
    return float(momentum), given[0].size / channels if given else float("nan")
