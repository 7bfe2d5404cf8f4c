"""Rung 7: inputs that are hard, and every leaf module probed by itself.

Hard inputs are the pair's own (rows of padding only, padding on the left, a length of 1, long sequences), or, for
floating-point inputs, exact zeros, a large mean, a small variance. A fault that shows only there passes every check on
well-behaved random numbers: a norm's eps, a variance as E[x²] - E[x]², a row in which every key is masked (P1,
P15-P18).
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from parity import probe
from parity.compare import Comparison, relative_error
from parity.pair import Inputs
from parity.part import derived
from parity.rungs import NotComparedError, Outcome, Section, float32, section
from parity.rungs.forward import compare_all
from parity.rungs.gradients import compare_traces
from parity.runs import Runs
from parity.tolerances import FLOAT32, FLOAT64_RELATIVE, FLOAT64_RULE, OF_ALL_GRADIENTS, PROBE_RELATIVE, PROBE_RULE
from parity.trace import Trace

MEAN, SMALL, LARGE = 1e4, 1e-3, 1e3
LARGE_MEAN = "mean 1e4"
PROBES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "zeros": np.zeros_like,
    LARGE_MEAN: lambda spread: MEAN + spread,
    "variance 1e-6": lambda spread: SMALL * spread,
    "variance 1e6": lambda spread: LARGE * spread,
}
"""Out of numbers of mean 0 and variance 1. 1e-6 is near any eps."""


def climb(runs: Runs) -> Outcome:
    """Raises NotComparedError if there is neither a hard input nor a module to probe."""
    own = runs.pair.adversarial is not None
    bound, rule = (FLOAT64_RELATIVE, FLOAT64_RULE) if own else (PROBE_RELATIVE, PROBE_RULE)
    sections = [_case(runs, name, inputs, bound, rule) for name, inputs in cases(runs).items()]
    sections += _probes(runs)
    if not sections:
        raise NotComparedError("the pair brings no hard inputs, and no module could be probed by itself")
    return Outcome(sections=tuple(sections))


def cases(runs: Runs) -> dict[str, Inputs]:
    """Hard inputs by name."""
    if runs.golden is not None:
        return dict(runs.golden.cases)
    if runs.pair.adversarial is not None:
        return dict(runs.pair.adversarial(runs.seed))
    batch = runs.batches[0]
    arrays = {name: array for name, array in batch.items() if isinstance(array, np.ndarray)}
    floating = {name for name, array in arrays.items() if np.issubdtype(array.dtype, np.floating)}
    if not floating:
        return {}

    def changed(change: float, offset: float) -> Inputs:
        return derived(batch, {n: x * change + offset if n in floating else x for n, x in batch.items()})

    return {
        "exact zeros": changed(0.0, 0.0),
        "large mean": changed(1.0, MEAN),
        "small variance": changed(SMALL, 0.0),
    }


def _case(runs: Runs, name: str, inputs: Inputs, bound: float, rule: str) -> Section:
    reference, port = runs.run_reference(inputs, "float64"), runs.run_port(inputs, "float64")
    return section(name, "float64", f"{rule}{OF_ALL_GRADIENTS}", _compared(runs, reference, port, bound))


def _compared(runs: Runs, reference: Trace, port: Trace, bound: float) -> Iterator[Comparison]:
    names = runs.comparable(reference, port)
    expected = {name: array for name, array in reference.outputs.items() if name in names} | reference.results
    got = {name: array for name, array in port.outputs.items() if name in names} | port.results
    got, expected = got | runs.loss(port), expected | runs.loss(reference)
    yield from compare_all(got, expected, bounds=dict.fromkeys(expected, bound))
    yield from compare_traces(runs, reference, port, relative=bound)


def _probes(runs: Runs) -> list[Section]:
    """Leaf modules that take one floating-point array, each given the same probes on both sides."""
    if runs.golden is not None:
        return []
    given = runs.reference("float64").given
    probes = {name: probe_inputs(given[name]) for name in probe.candidates(runs)}
    exact = probe.probe_reference(runs, probes, "float64")
    if not exact:
        return []
    port = probe.probe_port(runs, exact, probes, "float64")
    comparisons = [
        Comparison(tensor=name, error=error, bound=PROBE_RELATIVE) for name, error in _errors(port, exact).items()
    ]
    sections = [section("modules by themselves", "float64", PROBE_RULE, comparisons)]
    if sections[0].passed:
        ours = _errors(probe.probe_port(runs, exact, probes, "float32"), exact)
        theirs = _errors(probe.probe_reference(runs, probes, "float32"), exact)
        for kind in PROBES:
            # What the mean takes of the digits, it takes of both sides' alike; how much, is chance.
            rule = dataclasses.replace(FLOAT32, floor=FLOAT32.floor * (MEAN if kind == LARGE_MEAN else 1.0))
            of_kind = ({n: e for n, e in side.items() if n.endswith(f", {kind}")} for side in (ours, theirs))
            sections.append(float32.judged(f"modules by themselves, {kind}", *of_kind, rule=rule))
    return sections


def probe_inputs(given: np.ndarray) -> dict[str, np.ndarray]:
    """Two rows of what a module was given, centred and brought to extremes."""
    few = given[:2]
    spread = few - few.mean(axis=-1, keepdims=True)
    spread = spread / max(float(spread.std()), 1e-30)
    return {kind: change(spread) for kind, change in PROBES.items()}


def _errors(run: probe.Probes, exact: probe.Probes) -> dict[str, float]:
    return {
        f"{name}, {kind}": relative_error(run[name][kind], array)
        for name, kinds in exact.items()
        for kind, array in kinds.items()
    }
