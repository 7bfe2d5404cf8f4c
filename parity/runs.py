"""Both sides of a pair, built once, and every run of them that several rungs look at."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from parity.capture_flax import FlaxRunner
from parity.compare import NOTHING_COMPARED, norm, relative_error
from parity.facts import Facts
from parity.pair import Inputs, KnownDifference, Pair, Precision
from parity.rungs import NotComparedError
from parity.tolerances import zero_noise
from parity.trace import Trace, module_of
from parity.weights.derive import Derived, derive
from parity.weights.mapping import WeightMapping

Errors = dict[str, float]
"""Relative error of each tensor of a run against the float64 answer."""


class Reference(Protocol):
    """The reference's side: alive (capture_torch.TorchRunner), or remembered by a golden file (golden.Golden)."""

    def weights(self) -> dict[str, np.ndarray]:
        """Parameters and floating-point buffers by name, in float32."""

    def trained(self) -> frozenset[str]:
        """Names of the parameters that are trained."""

    def facts(self) -> Facts:
        """Types, tensors and settings of every module."""

    def trace(self, inputs: Inputs, *, weights: Mapping[str, np.ndarray], precision: Precision) -> Trace:
        """One forward and backward pass. Raises NotComparedError for a run that a golden file does not hold."""


class Runs:
    """What the rungs share. Runs are kept by (precision, batch); weights, mapping and names are worked out once.

    In a port's trace, calls bear the reference's module names; gradients and buffers the port's own.
    """

    def __init__(self, pair: Pair, *, seed: int = 0, golden: Any = None):
        self.pair = pair
        self.seed = seed
        self.golden = golden
        self.batches: tuple[Inputs, ...] = golden.batches if golden is not None else pair.batches(seed=seed)
        self.redrawn: set[str] = set()
        """Tensors that further runs of the reference judged; see FLOAT32_DRAWS."""
        self.uncompared: set[str] = set()
        """Modules that only one side has."""
        self.results_identical = self.gradients_identical = NOTHING_COMPARED
        self._zero: dict[int, frozenset[str]] = {}
        self._reference_errors: dict[tuple[int, int | None], tuple[Errors, Errors]] = {}
        self._traces: dict[tuple[str, str, int], Trace] = {}
        self._ports: dict[Precision, FlaxRunner] = {}

    @functools.cached_property
    def reference_runner(self) -> Any:
        """See Reference. Raises NotComparedError where there is none; ImportError where torch is not installed."""
        if self.golden is not None:
            return self.golden
        if self.pair.reference is None:
            raise NotComparedError("the pair has no reference: check it --against a golden file")
        from parity.capture_torch import TorchRunner

        return TorchRunner(self.pair.reference)

    def live_reference(self) -> Any:
        """The TorchRunner. Raises NotComparedError if a golden file stands for it."""
        if self.golden is not None:
            raise NotComparedError("the golden file holds no such run of the reference")
        return self.reference_runner

    def port_runner(self, precision: Precision) -> FlaxRunner:
        """The port in this precision. Raises NotComparedError where there is none."""
        if self.pair.port is None:
            raise NotComparedError("the pair has no port")
        if precision not in self._ports:
            self._ports[precision] = FlaxRunner(self.pair.port, precision=precision)
        return self._ports[precision]

    @functools.cached_property
    def reference_facts(self) -> Facts:
        """Of every module of the reference."""
        return self.reference_runner.facts()

    @functools.cached_property
    def port_facts(self) -> Facts:
        """Of every module of the port."""
        return self.port_runner("float32").facts()

    @functools.cached_property
    def derived(self) -> Derived:
        """How the weights and the module names of the two correspond, and which differences are known beforehand."""
        return derive(
            self.reference_facts, self.port_facts, mapping=self.pair.mapping, modules=tuple(self.pair.modules)
        )

    @property
    def mapping(self) -> WeightMapping:
        """From the reference's names and layouts to the port's."""
        return self.derived.mapping

    @property
    def known(self) -> tuple[KnownDifference, ...]:
        """The frameworks' own, and those the pair names."""
        return self.derived.known + self.pair.known

    @functools.cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """What the reference is loaded with, in float32: see `Pair.weights`; adjusted where a known difference asks."""
        given = self.pair.weights
        weights = dict(given) if given is not None else _without_constants(self.reference_runner.weights(), self.seed)
        return self.derived.adjust(weights)

    @functools.cached_property
    def port_weights(self) -> dict[str, np.ndarray]:
        """The same for the port. Raises MappingError, which names every key that does not fit."""
        used = {name: array for name, array in self.weights.items() if self.derived.travels(name)}
        expected = {n: s for n, s in self.port_runner("float32").specs().items() if self.derived.expects(n)}
        expected = {n: np.broadcast_to(np.float32(0), s.shape) for n, s in expected.items()}
        return self.mapping.apply(used, expected=expected)

    def reference(self, precision: Precision, batch: int = 0) -> Trace:
        """The reference's run on this batch."""
        return self._kept("reference", precision, batch)

    def port(self, precision: Precision, batch: int = 0) -> Trace:
        """The port's run on this batch, tapped."""
        return self._kept("port", precision, batch)

    def run_reference(
        self, inputs: Inputs, precision: Precision, *, weights: Mapping[str, np.ndarray] | None = None
    ) -> Trace:
        """A run that is not kept."""
        weights = self.weights if weights is None else weights
        return self.reference_runner.trace(inputs, weights=weights, precision=precision)

    def run_port(
        self,
        inputs: Inputs,
        precision: Precision,
        *,
        weights: Mapping[str, np.ndarray] | None = None,
        tap: bool = True,
    ) -> Trace:
        """A run that is not kept; `weights` by the port's names."""
        weights = self.port_weights if weights is None else weights
        trace = self.port_runner(precision).trace(inputs, weights=weights, tap=tap)
        return self._in_reference_names(trace)

    def gradients_in_port_layout(self, reference: Trace) -> dict[str, np.ndarray]:
        """The reference's gradients under the port's names."""
        return self.mapping.apply(
            {name: array for name, array in reference.gradients.items() if self.derived.travels(name)}, kind="gradient"
        )

    def errors(self, run: Trace, exact: Trace) -> Errors:
        """Of every output, result and the loss of a run. Infinite where a tensor is missing."""
        got = run.everything
        return {
            name: relative_error(got[name], array) if name in got else float("inf")
            for name, array in exact.everything.items()
        }

    def reference_errors(self, batch: int, draw: int | None = None) -> tuple[Errors, Errors]:
        """How far the reference's float32 run is from its float64 run: (outputs, results, loss; gradients).

        `draw`: with every weight moved by at most one rounding, another way for each number.
        """
        key = (batch, draw)
        if key not in self._reference_errors:
            if self.golden is not None:
                self._reference_errors[key] = self.golden.errors(batch, draw)
            else:
                self._reference_errors[key] = self._live_errors(batch, draw)
        return self._reference_errors[key]

    def _live_errors(self, batch: int, draw: int | None) -> tuple[Errors, Errors]:
        if draw is None:
            exact, run = self.reference("float64", batch), self.reference("float32", batch)
        else:
            moved = moved_by_a_rounding(self.weights, seed=draw)
            exact, run = (
                self.run_reference(self.batches[batch], precision, weights=moved) for precision in GATES
            )
        zero = self.zero_gradients(batch)
        gradients = {
            name: relative_error(array, exact_array)
            for (name, array), exact_array in zip(
                self.gradients_in_port_layout(run).items(),
                self.gradients_in_port_layout(exact).values(),
                strict=True,
            )
            if name not in zero
        }
        return self.errors(run, exact), gradients

    def reference_gradients(self, batch: int) -> dict[str, np.ndarray]:
        """The float64 answer under the port's names."""
        return self.gradients_in_port_layout(self.reference("float64", batch))

    def summed(self, batch: int) -> dict[str, np.ndarray]:
        """For biases, the sums of absolute values behind the gradients, under the port's names."""
        return self.summed_in_port_layout(self.reference("float64", batch))

    def summed_in_port_layout(self, reference: Trace) -> dict[str, np.ndarray]:
        """The same for any run of the reference."""
        known: dict[str, np.ndarray] = {}
        for step in self.mapping.plan(n for n in reference.gradients if self.derived.travels(n)):
            if all(name in reference.summed for name in step.sources):
                known |= step.apply(reference.summed)
        return known

    def zero_gradients(self, batch: int) -> frozenset[str]:
        """The port's parameters whose float64 gradient is nothing but the rounding of what was summed."""
        if batch not in self._zero:
            self._zero[batch] = zero_among(self.reference_gradients(batch), self.summed(batch))
        return self._zero[batch]

    def zero_names(self) -> frozenset[str]:
        """Of every batch that was looked at."""
        return frozenset().union(*self._zero.values())

    def comparable(self, reference: Trace, port: Trace) -> frozenset[str]:
        """Names of module outputs to compare: of modules that both sides have, whether or not both called them."""
        here = {self.derived.modules.get(path, path) for path in self.port_facts}
        both = self.reference_facts.keys() & here
        outputs = [*reference.outputs, *port.outputs]
        missing = {module_of(name) for name in outputs if module_of(name) not in both}
        self.uncompared |= missing
        silent = port.not_captured.keys() | reference.not_captured.keys()
        return frozenset(n for n in outputs if module_of(n) not in missing and module_of(n) not in silent)

    def float64_ends(self, batch: int) -> str | None:
        """The first tensor of either float64 run that is not float64: a module casts to float32 inside."""
        for side, trace in (("reference", self.reference("float64", batch)), ("port", self.port("float64", batch))):
            for name, array in trace.everything.items():
                if array.dtype != np.float64:
                    return f"{name} of the {side}"
        return None

    def float64_bounds(self, batch: int) -> dict[str, float]:
        """Bounds other than FLOAT64_RELATIVE: those of float32, from where float64 ends."""
        return {}

    def float64_gradient_bounds(self, batch: int) -> dict[str, float]:
        """The same for gradients."""
        return {}

    def reference_brings(self, what: str) -> bool:
        """Whether the reference's side has this field, or the golden file was recorded with it."""
        if self.golden is not None:
            return bool(self.golden.brings(what))
        return self.pair.reference is not None and getattr(self.pair.reference, what) is not None

    def expect_both(self, field: str, what: str) -> None:
        """Raises NotComparedError unless both sides bring this field, saying which does not; or for a golden file."""
        self.live_reference()
        sides = {"reference": self.pair.reference, "port": self.pair.port}
        lacking = [name for name, side in sides.items() if side is None or getattr(side, field) is None]
        if lacking:
            raise NotComparedError(f"the pair's {' and '.join(lacking)} brings no {what}")

    def release(self) -> None:
        """Forgets the runs: those of a large model take gigabytes."""
        self._traces.clear()

    def _kept(self, side: str, precision: Precision, batch: int) -> Trace:
        key = (side, precision, batch)
        if key not in self._traces:
            run = self.run_reference if side == "reference" else self.run_port
            self._traces[key] = run(self.batches[batch], precision)
        return self._traces[key]

    def _in_reference_names(self, trace: Trace) -> Trace:
        names = self.derived.modules

        def renamed(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {names.get(module_of(name), module_of(name)) + name[len(module_of(name)) :]: a for name, a in arrays.items()}

        if not names:
            return trace
        return dataclasses.replace(
            trace,
            given=renamed(trace.given),
            given_ids=renamed(trace.given_ids),
            outputs=renamed(trace.outputs),
            not_captured={names.get(name, name): why for name, why in trace.not_captured.items()},
        )


GATES: tuple[Precision, Precision] = ("float64", "float32")


def zero_among(gradients: Mapping[str, np.ndarray], summed: Mapping[str, np.ndarray]) -> frozenset[str]:
    """Names of the float64 gradients that are nothing but the rounding of what was summed."""
    return frozenset(
        name
        for name, scale in summed.items()
        if norm(scale) > 0 and norm(gradients[name]) <= zero_noise(norm(scale), np.float64)
    )


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


def _without_constants(weights: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Noise on tensors of one value: at their initial 0 and 1, two biases that were exchanged would look alike."""
    rng = np.random.default_rng(seed)
    varied = {}
    for name, array in weights.items():
        constant = array.size > 0 and bool((array == array.flat[0]).all())
        if constant and array.flat[0] == 0.0:
            array = array + 0.1 * rng.standard_normal(array.shape)
        elif constant:  # positive stays positive: it may be a variance
            array = array * (1.0 + 0.5 * rng.random(array.shape))
        varied[name] = np.asarray(array, np.float32)
    return varied
