"""Rung 5: both draw initial parameters from the same distributions (P5): statistical, pooled over seeds.

Elements that never change (zero biases, norms of one, the row of padding) must be the same on both sides, exactly. The
others are pooled over elements and seeds and compared by mean, scale, shape, distribution, range, and the norms of
rows, which tell an orthogonal matrix from independent numbers. All tests together raise a false alarm once in a million
runs; a scale off by √2 is seen for every parameter, or the report names those for which it would not have been.

Evidence, of the parameter whose values differ most or, where only what never changes differs, of the first of those:
`parameter`, its `shape`, `reference` and `port` values of all seeds together, one dimension, in the port's layout.
"""

import dataclasses
import fnmatch
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from parity import training
from parity.compare import Comparison
from parity.pair import KnownDifference
from parity.rungs import Outcome, section
from parity.runs import Runs
from parity.statistics import (
    distribution_test,
    kolmogorov_limit,
    log_variance_error,
    mean_test,
    normal_distance,
    normal_limit,
    range_test,
    scale_test,
    shape_test,
)
from parity.tolerances import (
    INITIALISATION_EXEMPT_RULE,
    INITIALISATION_FALSE_ALARM,
    INITIALISATION_FIXED_RULE,
    INITIALISATION_RULE,
)
from parity.training import Trained

Tensors = Mapping[str, np.ndarray]

KNOWN = "initialisation"
"""Kind of a KnownDifference of the pair: parameters of the port (patterns as of files) that are meant to begin
otherwise, because weights are always ported."""

TESTS = 6
MIN_VALUES = 2_048
"""Pooled over seeds: sees a factor of √2 (from 1.3 on) and a uniform for a normal distribution, all but certainly."""

MIN_FOR_MOMENTS = 500
"""Of fewer values, means and standard deviations are too far from normal six standard errors out: then only the test of
the distribution is made, which holds for any number."""

MAX_VALUES = 1 << 15
"""Of one parameter; a factor is seen from 1.04 on."""

MAX_ROWS = 1 << 13
"""Of a draw, whose norms are looked at."""

MIN_DRAWS, MAX_DRAWS = 3, 1_024
"""With two draws, a pair of equal values among a million is likely; with three, one in 10^14 an element."""

MAX_SECONDS = 8.0
"""For each side's draws, beyond the least number of them."""

SCALE_TO_SEE = math.sqrt(2.0)


def climb(runs: Runs) -> Outcome:
    """Fixed elements, then distributions."""
    every = training.trained(runs, max_elements=None)
    trained = every.only([step for step in every.steps if not every.merges(step)])
    names = list(trained.port_shapes)
    exempt = {name: known for name in names if (known := _exempt(runs, name)) is not None}
    judged = [name for name in names if name not in exempt]
    reference, port = (_Drawn(draw, judged) for draw in (_reference_draws(runs, trained), _port_draws(runs, trained)))
    limit = INITIALISATION_FALSE_ALARM / (TESTS * max(1, len(judged)))
    fixed, drawn, blind = [_fixed(name, reference, port) for name in judged], [], []
    worst, evidence = -1.0, dict[str, Any]()
    for comparison in [c for c in fixed if c.passed]:
        name = comparison.tensor
        a, b = reference.values(name), port.values(name)
        if a.size == 0:
            continue  # nothing varies, and that was compared
        found, sees = _compared(name, a, b, (reference.rows(name), port.rows(name)), false_alarm=limit)
        drawn.append(found)
        if sees > SCALE_TO_SEE:
            blind.append(f"{name} (" + (f"a factor from {sees:.2f} on)" if math.isfinite(sees) else "no factor)"))
        if found.error > worst:
            worst = found.error
            evidence = {"parameter": name, "shape": reference.first[name].shape, "reference": a, "port": b}
    broken = [c.tensor for c in fixed if not c.passed and c.tensor in reference.first and c.tensor in port.first]
    if broken and worst <= 1.0:
        a, b = reference.first[broken[0]], port.first[broken[0]]
        evidence = {"parameter": broken[0], "shape": a.shape, "reference": a.ravel(), "port": b.ravel()}
    sections = []
    if fixed:
        sections.append(section("elements that never change", "bits", INITIALISATION_FIXED_RULE, fixed))
    if exempt:
        otherwise = [_finite(name, reference, port) for name in exempt]
        sections.append(section("meant to begin otherwise", "static", INITIALISATION_EXEMPT_RULE, otherwise))
    if drawn:
        sections.append(section("distributions", "statistics", INITIALISATION_RULE, drawn))
    merged = [name for name in every.shapes if name not in trained.shapes]
    return Outcome(
        sections=tuple(sections),
        known=tuple(dict.fromkeys(exempt.values())),
        notes=tuple(_notes(reference, port, blind, merged)),
        evidence=evidence,
    )


def _compared(
    name: str, a: np.ndarray, b: np.ndarray, rows: tuple[np.ndarray, np.ndarray], *, false_alarm: float
) -> tuple[Comparison, float]:
    """The comparison, and the smallest factor between the scales that it would have seen almost certainly."""
    verdicts = [test(a, b, false_alarm=false_alarm) for test in (distribution_test, range_test)]
    if min(a.size, b.size) >= MIN_FOR_MOMENTS:
        verdicts += [test(a, b, false_alarm=false_alarm) for test in (mean_test, scale_test, shape_test)]
    if min(rows[0].size, rows[1].size) > 0:
        # Three digits: what is left of an orthogonal matrix's equal norms is rounding, and the frameworks round alike.
        size = float(np.sqrt(np.mean(rows[0] ** 2)))
        norms = distribution_test(*(np.round(norms / size, 3) for norms in rows), false_alarm=false_alarm)
        verdicts.append(dataclasses.replace(norms, test="rows", detail=f"norms of rows: {norms.detail}"))
    worst = max(verdicts, key=lambda verdict: verdict.share)
    factor = f"standard deviation {b.std() / a.std():.3f} times the reference's" if a.std() > 0.0 else ""
    detail = worst.detail if worst.test == "scale" else f"{worst.detail}; {factor}"
    return Comparison(tensor=name, error=worst.share, bound=1.0, detail=detail), _visible_factor(a, b, false_alarm)


def _visible_factor(a: np.ndarray, b: np.ndarray, false_alarm: float) -> float:
    """Seen with a probability of 99.9%: the limit and three standard errors more. Infinite where none would be."""
    certain = normal_limit(2e-3)
    if min(a.size, b.size) >= MIN_FOR_MOMENTS:
        error = math.sqrt(log_variance_error(a) + log_variance_error(b))
        return math.exp((normal_limit(false_alarm) + certain) * error / 2.0)
    needed = kolmogorov_limit(a.size, b.size, false_alarm=false_alarm) + certain * math.sqrt(0.5 / min(a.size, b.size))
    return next((factor for factor in np.geomspace(1.1, 1e4, 100) if normal_distance(factor) > needed), math.inf)


def _fixed(name: str, reference: "_Drawn", port: "_Drawn") -> Comparison:
    """How many elements vary on one side and not on the other, or have another value on both."""
    if name not in reference.first or name not in port.first:
        which = "the port" if name not in reference.first else "the reference"
        return Comparison(tensor=name, error=math.inf, bound=0.0, detail=f"only {which} has it")
    theirs, ours = reference.first[name], port.first[name]
    if theirs.shape != ours.shape:
        detail = f"expected shape {theirs.shape}, found {ours.shape}"
        return Comparison(tensor=name, error=math.inf, bound=0.0, detail=detail)
    still, here = reference.still[name], port.still[name]
    other = (still != here) | (still & here & (theirs != ours))
    detail = ""
    if other.any():
        at = tuple(int(i) for i in np.argwhere(other)[0])
        found = "drawn" if not here[at] else f"always {ours[at]:.6g}"
        expected = "drawn" if not still[at] else f"always {theirs[at]:.6g}"
        detail = f"of {theirs.size:,} elements, the first at {list(at)}: expected {expected}, found {found}"
    return Comparison(tensor=name, error=int(other.sum()), bound=0.0, detail=detail)


def _finite(name: str, reference: "_Drawn", port: "_Drawn") -> Comparison:
    """All that can be said of a parameter that is meant to begin otherwise."""
    theirs, ours = reference.first.get(name, np.zeros(0)), port.first.get(name, np.zeros(0))
    fits = theirs.shape == ours.shape and bool(np.isfinite(ours).all() and np.isfinite(theirs).all())
    detail = f"expected shape {theirs.shape}, found {ours.shape}" if theirs.shape != ours.shape else ""
    return Comparison(tensor=name, error=0.0 if fits else math.inf, bound=0.0, detail=detail)


class _Drawn:
    """One side's parameters, drawn with one seed after the other, often enough for those that are judged."""

    def __init__(self, draw: Callable[[int], Tensors], judged: Sequence[str]):
        started = time.perf_counter()
        self._judged = frozenset(judged)
        self.first = {name: np.asarray(array, np.float32) for name, array in draw(0).items()}
        self.still = {name: np.ones(array.shape, bool) for name, array in self.first.items()}
        """Elements that had the same value in every draw."""
        self._values: dict[str, list[np.ndarray]] = {name: [] for name in self.first}
        self._rows: dict[str, list[np.ndarray]] = {name: [] for name in self.first}
        self.draws = 0
        self._keep(self.first)
        self.repeats = False
        """Whether the seed has no effect: then there is one draw."""
        if not judged:
            return
        second = {name: np.asarray(array, np.float32) for name, array in draw(1).items()}
        self.repeats = all(np.array_equal(second[name], array) for name, array in self.first.items())
        if self.repeats:
            # Then only the value tells: what is drawn is not all alike, nor exactly 0 or 1.
            self.still = {name: _looks_fixed(array) for name, array in self.first.items()}
            return
        self._keep(second)
        while self.draws < max(MIN_DRAWS, self._wanted()):
            if self.draws >= MIN_DRAWS and time.perf_counter() - started > MAX_SECONDS:
                break
            self._keep({name: np.asarray(array, np.float32) for name, array in draw(self.draws).items()})

    def values(self, name: str) -> np.ndarray:
        """Of the elements that vary, in every draw, in one dimension and float64."""
        free = ~self._places(self.still[name])
        return np.concatenate([values[free] for values in self._values[name]]).astype(np.float64)

    def rows(self, name: str) -> np.ndarray:
        """Norms along the last axis, of matrices in which every element varies."""
        if self.still[name].any() or not self._rows[name]:
            return np.zeros(0)
        return np.concatenate(self._rows[name])

    def _keep(self, drawn: Tensors) -> None:
        self.draws += 1
        for name, array in drawn.items():
            self.still[name] &= array == self.first[name]
            self._values[name].append(self._places(array))
            if array.ndim >= 2 and array.shape[-1] > 1:
                rows = array.reshape(-1, array.shape[-1])[:MAX_ROWS].astype(np.float64)
                self._rows[name].append(np.sqrt((rows**2).sum(axis=-1)))

    def _places(self, array: np.ndarray) -> np.ndarray:
        """All elements, or as many as are kept of a large tensor, always the same ones."""
        flat, most = array.reshape(-1), MAX_VALUES // MIN_DRAWS
        return flat.copy() if flat.size <= most else flat[np.linspace(0, flat.size - 1, most).astype(int)]

    def _wanted(self) -> int:
        free = [int((~still).sum()) for name, still in self.still.items() if name in self._judged]
        return min(MAX_DRAWS, max((math.ceil(MIN_VALUES / count) for count in free if count), default=0))


def _looks_fixed(array: np.ndarray) -> np.ndarray:
    if array.size > 1 and (array == array.flat[0]).all():
        return np.ones(array.shape, bool)
    return (array == 0.0) | (array == 1.0)


def _reference_draws(runs: Runs, names: Trained) -> Callable[[int], Tensors]:
    runs.live_reference()
    from parity.training_torch import initial

    side, wanted = runs.pair.reference, frozenset(names.shapes)
    return lambda seed: names.in_port_layout(initial(side, seed, wanted), kind="value")


def _port_draws(runs: Runs, names: Trained) -> Callable[[int], Tensors]:
    from parity.training_flax import Initial

    return Initial(runs.port_runner("float32"), frozenset(names.port_shapes))


def _exempt(runs: Runs, name: str) -> KnownDifference | None:
    """The pair's word that a parameter of the port is initialised otherwise on purpose."""
    for known in runs.pair.known:
        if known.kind == KNOWN and any(fnmatch.fnmatch(name, pattern) for pattern in known.tensors):
            return known
    return None


def _notes(reference: _Drawn, port: _Drawn, blind: list[str], merged: list[str]) -> Iterator[str]:
    yield f"draws: {reference.draws} of the reference, {port.draws} of the port"
    for side, drawn, how in (("reference", reference, "torch's global seed"), ("port", port, "a parameter `rngs`")):
        if drawn.repeats:
            yield (
                f"one draw of the {side}: its builder gives the same with every seed; let it take {how}, or bring "
                "`initial`, to have more"
            )
    if blind:
        yield f"a scale off by √2 would not have been seen for certain: {', '.join(blind)}"
    if merged:
        yield f"not compared, the port has only their sum: {', '.join(merged)}"
