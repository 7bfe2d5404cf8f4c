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
    relative_error,
)
from parity.pair import Inputs, Pair, Precision
from parity.rungs import Rung, forward, gradients, weights
from parity.tolerances import FLOAT32_DRAWS, FLOAT64_RELATIVE, UNITS_AFTER_ROUNDING, allowed_unequal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Location:
    """The first module whose output differs although what it was given does not."""

    module: str
    error: float
    """Relative error of its output in float64."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a check."""

    name: str
    rungs: tuple[Rung, ...]
    logits_identical: Identical
    gradients_identical: Identical
    """Over the gradients that are not zero in exact arithmetic."""
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
        float64 = gradients.float64_gradients(port.gradients, answer, zero=zero)
        self.record("gradients", "float64", float64, label)
        noise = gradients.zeros(port.gradients, summed, zero=zero, dtype=np.float64)
        self.record("zero gradients", "float64", noise, label)
        self.logits_identical += identical_after_rounding(port.logits, reference.logits)
        for name in answer.keys() - zero:
            self.gradients_identical += identical_after_rounding(port.gradients[name], answer[name])
        if self.first_difference is None:
            self.first_difference = locate(port, reference)
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
        forward_answer, gradient_answer = _forward_tensors(exact), gradients.without(answer, zero)
        port = self.ports["float32"](self.port_weights, inputs)
        ours = forward.errors(_forward_tensors(port), forward_answer), forward.errors(port.gradients, gradient_answer)
        theirs: list[tuple[dict[str, float], dict[str, float]]] = []

        def draw(weights: Mapping[str, np.ndarray]) -> None:
            run = self._reference("float32", inputs, weights=weights)
            in_port_layout = gradients.in_port_layout(run, self.pair.mapping)
            theirs.append(
                (forward.errors(_forward_tensors(run), forward_answer), forward.errors(in_port_layout, gradient_answer))
            )

        def judge() -> tuple[list[Comparison], list[Comparison]]:
            outputs, parameters = zip(*theirs, strict=True)
            return list(forward.against_float64(ours[0], outputs)), list(forward.against_float64(ours[1], parameters))

        draw(self.pair.weights)
        judged = judge()
        first = failed = [c for c in (*judged[0], *judged[1]) if not c.passed]
        for number in range(FLOAT32_DRAWS):
            if not failed or not all(math.isfinite(c.error) for c in failed):
                break
            draw(moved_by_a_rounding(self.pair.weights, seed=number))
            judged = judge()
            failed = [c for c in (*judged[0], *judged[1]) if not c.passed]
            self.redrawn |= {c.tensor for c in first}
        self.record("outputs, logits and loss", "float32", judged[0], label)
        self.record("gradients", "float32", judged[1], label)
        noise = gradients.zeros(port.gradients, summed, zero=zero, dtype=np.float32)
        self.record("zero gradients", "float32", noise, label)

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


def _forward_tensors(trace: Trace) -> dict[str, np.ndarray]:
    return trace.outputs | {"logits": trace.logits, "loss": trace.loss}


def locate(port: Trace, reference: Trace) -> Location | None:
    """The first module call, in the order in which calls end, that was given the same and returned something else.

    A call that the port did not make counts as one. If every differing module was given something that differs
    already, it is the first that differs.
    """
    first = None
    for name, expected in reference.outputs.items():
        made = name in port.outputs
        error = relative_error(port.outputs[name], expected) if made else float("inf")
        if error <= FLOAT64_RELATIVE:
            continue
        call = name.split("[")[0]
        location = Location(module=call, error=error)
        first = first or location
        given = [key for key in reference.given if key.split("[")[0] == call]
        if not made or all(
            key in port.given and relative_error(port.given[key], reference.given[key]) <= FLOAT64_RELATIVE
            for key in given
        ):
            return location
    return first
