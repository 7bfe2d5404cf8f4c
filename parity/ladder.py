"""Climbs the rungs for a Pair, and says where the two first differ."""

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from parity.capture import PortRunner, Trace, parameter_specs, run_reference
from parity.compare import (
    NOTHING_COMPARED,
    Comparison,
    Identical,
    identical_after_rounding,
)
from parity.locate import Location, locate, locate_float32, locate_gradient
from parity.pair import Inputs, Pair, Precision
from parity.rungs import Rung, forward, gradients, weights
from parity.tolerances import FLOAT32_DRAWS, FLOAT32_RATIO, UNITS_AFTER_ROUNDING, allowed_unequal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distance:
    """Root mean square, over tensors, of the relative errors of both float32 runs against the float64 answer."""

    port: float
    reference: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a check."""

    name: str
    rungs: tuple[Rung, ...]
    logits_identical: Identical
    gradients_identical: Identical
    """Over the gradients that are not zero in exact arithmetic."""
    float32: Mapping[str, Distance]
    """By what was compared; of several batches, the one in which the port is furthest."""
    zero_gradients: tuple[str, ...]
    """Parameters whose gradient is zero in exact arithmetic, judged apart."""
    redrawn: tuple[str, ...]
    """Tensors whose float32 error was beyond twice the reference's, and was judged by further runs of the reference."""
    first_difference: Location | None
    num_parameters: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Every rung."""
        return bool(self.rungs) and all(rung.passed for rung in self.rungs)


ANY_PRECISION: tuple[Precision, ...] = ("float64", "float32")


def check(pair: Pair) -> Report:
    """Compares reference and port: weights, then float64 against float64, then float32 by the float64 answer.

    Raises MappingError if the weights cannot be mapped, which names the keys.
    """
    started = time.perf_counter()
    port_weights = pair.mapping.apply(pair.weights, expected=parameter_specs(pair.build_port("float32")))
    climb = _Climb(pair, port_weights)
    climb.record("weights there and back", "bits", weights.there_and_back(pair.weights, port_weights, pair.mapping))
    for number, inputs in enumerate(pair.batches, start=1):
        climb.batch(inputs, label=f" (batch {number})" if len(pair.batches) > 1 else "")
    return Report(
        name=pair.name,
        rungs=climb.rungs(),
        logits_identical=climb.logits_identical,
        gradients_identical=climb.gradients_identical,
        float32=climb.float32,
        zero_gradients=tuple(sorted(climb.zero)),
        redrawn=tuple(sorted(climb.redrawn)),
        first_difference=climb.first_difference,
        num_parameters=sum(array.size for array in port_weights.values()),
        seconds=time.perf_counter() - started,
    )


class _Climb:
    """Comparisons as they come in, by rung."""

    def __init__(self, pair: Pair, port_weights: Mapping[str, np.ndarray]):
        self.pair = pair
        self.port_weights = port_weights
        self.references = {precision: pair.build_reference(precision) for precision in ANY_PRECISION}
        self.ports = {
            precision: PortRunner(pair.build_port, pair.run_port, precision=precision) for precision in ANY_PRECISION
        }
        self.comparisons: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
        self.logits_identical = NOTHING_COMPARED
        self.gradients_identical = NOTHING_COMPARED
        self.float32: dict[str, Distance] = {}
        self.zero: set[str] = set()
        self.redrawn: set[str] = set()
        self.first_difference: Location | None = None

    def record(self, rung: str, precision: str, comparisons: Iterable[Comparison], label: str = "") -> None:
        for comparison in comparisons:
            self.comparisons[rung, precision].append(dataclasses.replace(comparison, tensor=comparison.tensor + label))

    def batch(self, inputs: Inputs, *, label: str) -> None:
        mapping = self.pair.mapping
        reference = self._reference("float64", inputs)
        port = self.ports["float64"](self.port_weights, inputs)
        answer = gradients.in_port_layout(reference, mapping)
        summed = gradients.summed_in_port_layout(reference, mapping)
        zero = gradients.zero_gradients(answer, summed)
        self.zero |= zero
        self.record("module outputs", "float64", forward.outputs(port, reference), label)
        self.record("logits and loss", "float64", forward.results(port, reference), label)
        float64 = list(gradients.float64_gradients(port.gradients, answer, zero=zero))
        self.record("gradients", "float64", float64, label)
        noise = gradients.zeros(port.gradients, summed, zero=zero, dtype=np.float64)
        self.record("zero gradients", "float64", noise, label)
        self.logits_identical += identical_after_rounding(port.logits, reference.logits)
        for name in answer.keys() - zero:
            self.gradients_identical += identical_after_rounding(port.gradients[name], answer[name])
        if self.first_difference is None:
            self.first_difference = locate(port, reference) or locate_gradient(float64, reference)
        del port
        if self._failed("float64"):
            # Whoever computes something else has no float32 error to speak of. What was not compared is not passed.
            self.comparisons["outputs, logits and loss", "float32"].clear()
            self.comparisons["gradients", "float32"].clear()
            return
        self._float32(inputs, reference, answer, summed, zero, label)

    def _float32(
        self,
        inputs: Inputs,
        exact: Trace,
        answer: Mapping[str, np.ndarray],
        summed: Mapping[str, np.ndarray],
        zero: frozenset[str],
        label: str,
    ) -> None:
        port = self.ports["float32"](self.port_weights, inputs)
        ours = self._errors(port, exact, port.gradients, answer, zero)
        theirs = self._reference_errors(inputs, self.pair.weights, zero, exact=(exact, answer))
        judged = [list(forward.against_float64(*sides)) for sides in zip(ours, theirs, strict=True)]
        first = failed = [c for comparisons in judged for c in comparisons if not c.passed]
        further: list[tuple[dict[str, float], dict[str, float]]] = []
        while failed and len(further) < FLOAT32_DRAWS and all(math.isfinite(c.error) for c in failed):
            moved = moved_by_a_rounding(self.pair.weights, seed=len(further))
            further.append(self._reference_errors(inputs, moved, zero))
            runs = zip(*further, strict=True)
            again = [list(forward.judged_again(*sides)) for sides in zip(judged, runs, strict=True)]
            failed = [c for comparisons in again for c in comparisons if not c.passed]
            if not failed:
                judged = again
                self.redrawn |= {c.tensor for c in first}
        for rung, comparisons in zip(("outputs, logits and loss", "gradients"), judged, strict=True):
            self.record(rung, "float32", comparisons, label)
            pooled = comparisons[-1]
            distance = Distance(port=pooled.error, reference=pooled.bound / FLOAT32_RATIO)
            self.float32[rung] = max(self.float32.get(rung, distance), distance, key=lambda d: d.port)
        noise = gradients.zeros(port.gradients, summed, zero=zero, dtype=np.float32)
        self.record("zero gradients", "float32", noise, label)
        if self.first_difference is None:
            self.first_difference = locate_float32(judged[0], judged[1], exact)

    def _reference_errors(
        self,
        inputs: Inputs,
        weights: Mapping[str, np.ndarray],
        zero: frozenset[str],
        *,
        exact: tuple[Trace, Mapping[str, np.ndarray]] | None = None,
    ) -> tuple[dict[str, float], dict[str, float]]:
        """How far the reference's float32 run is from its float64 run, with the same weights."""
        if exact is None:
            trace = self._reference("float64", inputs, weights=weights)
            exact = trace, gradients.in_port_layout(trace, self.pair.mapping)
        run = self._reference("float32", inputs, weights=weights)
        return self._errors(run, exact[0], gradients.in_port_layout(run, self.pair.mapping), exact[1], zero)

    @staticmethod
    def _errors(
        run: Trace,
        exact: Trace,
        run_gradients: Mapping[str, np.ndarray],
        exact_gradients: Mapping[str, np.ndarray],
        zero: frozenset[str],
    ) -> tuple[dict[str, float], dict[str, float]]:
        outputs = forward.errors(run.everything, exact.everything)
        return outputs, forward.errors(run_gradients, gradients.without(exact_gradients, zero))

    def _failed(self, precision: Precision) -> bool:
        return any(
            not comparison.passed
            for (_, judged), comparisons in self.comparisons.items()
            if judged == precision
            for comparison in comparisons
        )

    def _reference(
        self, precision: Precision, inputs: Inputs, *, weights: Mapping[str, np.ndarray] | None = None
    ) -> Trace:
        weights = self.pair.weights if weights is None else weights
        module = self.references[precision]
        return run_reference(module, self.pair.run_reference, inputs, weights=weights, precision=precision)

    def rungs(self) -> tuple[Rung, ...]:
        judged = []
        for (name, precision), comparisons in self.comparisons.items():
            judged.append(Rung.of(name, precision, comparisons))
            if (name, precision) == ("logits and loss", "float64"):
                judged.append(self._rounded_logits())
        return tuple(judged)

    def _rounded_logits(self) -> Rung:
        identical = self.logits_identical
        unequal = Comparison(
            tensor="logits: how many differ", error=identical.unequal, bound=allowed_unequal(identical.count)
        )
        units = Comparison(tensor="logits: units apart", error=identical.max_units, bound=UNITS_AFTER_ROUNDING)
        return Rung.of("logits after rounding to float32", "rounded", [unequal, units])


def moved_by_a_rounding(weights: Mapping[str, np.ndarray], *, seed: int) -> dict[str, np.ndarray]:
    """Each float32 weight moved to one of its neighbours, or not at all."""
    rng = np.random.default_rng(seed)
    directions = (np.float32(-np.inf), np.float32(np.inf))
    moved = {}
    for name, weight in weights.items():
        which = rng.integers(0, 3, weight.shape)
        moved[name] = np.where(
            which == 2, weight, np.where(which == 1, *(np.nextafter(weight, limit) for limit in directions))
        )
    return moved
