"""Both sides of a pair, built once, and every run of them that several rungs look at."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from parity import float64_end
from parity.compare import NOTHING_COMPARED, norm, relative_error
from parity.naming import by_position, names_by_call, selected
from parity.pair import Inputs, Masks, Pair, Precision
from parity.sides import Reference, Sides
from parity.tolerances import zero_noise
from parity.trace import LOSS, OUTPUT, Trace, call_of, method_of, module_of
from parity.weights.variation import moved_by_a_rounding

__all__ = ["GATES", "Errors", "Reference", "Runs", "moved_by_a_rounding", "zero_among"]

Errors = dict[str, float]
"""Relative error of each tensor of a run against the float64 answer."""


class Runs(Sides):
    """What the rungs share. Runs are kept by (precision, batch); weights, mapping and names are worked out once.

    In a port's trace, calls bear the reference's module names; gradients and buffers the port's own.
    """

    def __init__(self, pair: Pair, *, seed: int = 0, golden: Any = None):
        super().__init__(pair, seed=seed, golden=golden)
        self.batches: tuple[Inputs, ...] = (
            golden.batches if golden is not None else tuple(self.of_part(b) for b in pair.batches(seed=seed))
        )
        self.redrawn: set[str] = set()
        """Tensors that further runs of the reference judged; see FLOAT32_DRAWS."""
        self.uncompared: set[str] = set()
        """Modules (and methods) of which only one side has outputs."""
        self.matched_by_position: set[str] = set()
        """Calls whose arrays bear other keys on the two sides."""
        self.results_identical = self.gradients_identical = NOTHING_COMPARED
        self._zero: dict[int, frozenset[str]] = {}
        self._reference_errors: dict[tuple[int, int | None], tuple[Errors, Errors]] = {}
        self._traces: dict[tuple[str, str, int], Trace] = {}

    def reference(self, precision: Precision, batch: int = 0) -> Trace:
        """The reference's run on this batch."""
        return self._kept("reference", precision, batch)

    def port(self, precision: Precision, batch: int = 0) -> Trace:
        """The port's run on this batch, tapped."""
        return self._kept("port", precision, batch)

    def run_reference(
        self,
        inputs: Inputs,
        precision: Precision,
        *,
        weights: Mapping[str, np.ndarray] | None = None,
        training: bool = False,
        masks: Masks | None = None,
        seed: int = 0,
    ) -> Trace:
        """A run that is not kept; arrays with their axes in the port's order, at valid positions alone.

        `masks`: keep masks by site, by the reference's names; they imply training mode. `seed`: of what the model draws
        by itself.
        """
        weights = self.weights if weights is None else weights
        inputs, valid = self.of_part(inputs), self.valid(inputs)
        options: dict[str, Any] = {"training": training or masks is not None}
        if self.golden is None:
            options |= {"training": training, "masks": masks, "valid": valid, "seed": seed}
        trace = self.reference_runner.trace(inputs, weights=weights, precision=precision, **options)
        trace = trace if self.pair.port is None else self.layouts.apply(trace)
        return trace if valid is None else selected(trace, valid)

    def run_port(
        self,
        inputs: Inputs,
        precision: Precision,
        *,
        weights: Mapping[str, np.ndarray] | None = None,
        tap: bool = True,
        training: bool = False,
        masks: Masks | None = None,
        handed: Mapping[str, list[np.ndarray]] | None = None,
        seed: int = 0,
        backward: bool = True,
        eager: bool = False,
    ) -> Trace:
        """A run that is not kept; `weights` by the port's names, `masks` by the sites' names in the reference."""
        weights = self.port_weights if weights is None else weights
        inputs, valid = self.of_part(inputs), self.valid(inputs)
        trace = self.port_runner(precision).trace(
            inputs,
            weights=weights,
            tap=tap,
            training=training,
            masks=None if masks is None else self._in_port_names(masks),
            handed=None if handed is None else self._in_port_names(handed),
            valid=valid,
            results=self._names_of_arrays.get(OUTPUT, ()),
            seed=seed,
            backward=backward,
            eager=eager,
        )
        trace = self.framework_calls.apply(self.names.apply(trace), self._names_of_arrays)
        trace, calls = by_position(trace, self._names_of_arrays)
        self.matched_by_position |= set(calls)
        return trace if valid is None else selected(trace, valid)

    def handed(self, batch: int = 0) -> Trace:
        """The port's float64 run in which every module is given the reference's own inputs: errors do not add up.

        `given` is what the port would have given to a call; `outputs` what the module made of the reference's inputs.
        Masks, ids and settings, and arrays of another shape, stay the port's own; so do inputs inside `nnx.scan`.
        """
        key = ("handed", "float64", batch)
        if key not in self._traces:
            inputs = self.batches[batch]
            reference = self.reference("float64", batch)
            if self.valid(inputs) is not None and self.golden is None:  # whole arrays, not their valid positions
                reference = self.layouts.apply(
                    self.reference_runner.trace(inputs, weights=self.weights, precision="float64")
                )
            given: dict[str, list[np.ndarray]] = {}
            for name, array in reference.given.items():
                given.setdefault(call_of(name), []).append(array)
            self._traces[key] = self.run_port(inputs, "float64", handed=self.framework_calls.handed(given))
        return self._traces[key]

    def draw_masks(
        self, side: str, seed: int, *, batch: int = 0, inputs: Inputs | None = None
    ) -> dict[str, np.ndarray]:
        """Keep masks by site (the reference's names), as the dropout of a side, `reference` or `port`, draws them.

        For the pair's batch of this number, or for other inputs.
        """
        given = self.batches[batch] if inputs is None else self.of_part(inputs)
        if side == "reference":
            return dict(self.live_reference().draw_masks(given, seed, weights=self.weights))
        if side != "port":
            raise ValueError(f"expected 'reference' or 'port', got {side!r}")
        drawn = self.port_runner("float32").draw_masks(given, seed, weights=self.port_weights)
        return {self.names.of(module_of(site)) + site[len(module_of(site)) :]: mask for site, mask in drawn.items()}

    def gradients_in_port_layout(self, reference: Trace) -> dict[str, np.ndarray]:
        """The reference's gradients under the port's names."""
        return self.mapping.apply(
            {name: array for name, array in reference.gradients.items() if self.derived.travels(name)}, kind="gradient"
        )

    def loss(self, run: Trace) -> dict[str, np.ndarray]:
        """Under LOSS, or nothing where the pair brings none: the terms of the random projection that stands for it
        cancel, and it is made of results that are compared."""
        return {} if self.pair.port.loss is None else {LOSS: run.loss}

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
            measured = self._live_errors if self.golden is None else self._recorded_errors
            self._reference_errors[key] = measured(batch, draw)
        return self._reference_errors[key]

    def _recorded_errors(self, batch: int, draw: int | None) -> tuple[Errors, Errors]:
        recorded = self.golden.float32(batch, draw)
        gradients: Errors = {}
        for step in self.mapping.plan(name for name in recorded.exact if self.derived.travels(name)):
            try:
                difference, exact = (step.apply(m, kind="gradient") for m in (recorded.difference, recorded.exact))
            except ValueError:
                # An operation that expects two gradients to be equal: those are, but for their rounding errors.
                pairs = [(recorded.exact[name], recorded.difference[name]) for name in step.sources]
                gradients |= dict.fromkeys(step.given, max(relative_error(x + d, x) for x, d in pairs))
            else:
                gradients |= {name: relative_error(exact[name] + difference[name], exact[name]) for name in exact}
        zero = self.zero_gradients(batch)
        return recorded.outputs, {name: error for name, error in gradients.items() if name not in zero}

    def _live_errors(self, batch: int, draw: int | None) -> tuple[Errors, Errors]:
        if draw is None:
            exact, run = self.reference("float64", batch), self.reference("float32", batch)
        else:
            moved = moved_by_a_rounding(self.weights, seed=draw)
            exact, run = (self.run_reference(self.batches[batch], precision, weights=moved) for precision in GATES)
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
        """The same for any run of the reference; at least the norm of all gradients together (see zero_noise)."""
        gradients = self.gradients_in_port_layout(reference)
        together = np.sqrt(sum(norm(gradient) ** 2 for gradient in gradients.values()))
        known: dict[str, np.ndarray] = dict.fromkeys(gradients, np.asarray(together))
        for step in self.mapping.plan(n for n in reference.gradients if self.derived.travels(n)):
            if all(name in reference.summed for name in step.sources):
                watched = step.apply(reference.summed)
                known |= {name: scale for name, scale in watched.items() if norm(scale) > together}
        return known

    def zero_gradients(self, batch: int) -> frozenset[str]:
        """The port's parameters whose float64 gradient is nothing but the rounding of what was summed."""
        if batch not in self._zero:
            reference = self.reference("float64", batch)
            dtype = np.float32 if LOSS in float64_end.narrow(reference) else np.float64
            self._zero[batch] = zero_among(self.reference_gradients(batch), self.summed(batch), dtype=dtype)
        return self._zero[batch]

    def zero_names(self) -> frozenset[str]:
        """Of every batch that was looked at."""
        return frozenset().union(*self._zero.values())

    def comparable(self, reference: Trace, port: Trace) -> frozenset[str]:
        """Names of module outputs to compare: of modules that both sides have and the reference called, whether or not
        the port called them; of other methods where both called them."""
        silent = port.not_captured.keys() | reference.not_captured.keys()
        here = {name for path in self.port_facts for name in self.names.every(path)}
        here |= {module_of(name) for name in port.outputs} | silent
        both = self.reference_facts.keys() & here & {module_of(name) for name in reference.outputs}
        names: set[str] = set()
        for name in {**reference.outputs, **port.outputs}:
            module, method = module_of(name), method_of(name)
            one_sided = method and not (name in reference.outputs and name in port.outputs)
            if module in silent or module in self.derived.inside:
                continue
            if module not in both or one_sided:
                self.uncompared.add(f"{module}:{method}" if method else module)
            elif self.framework_calls.of_one_side(name, reference, port):
                self.uncompared.add(call_of(name).partition("#")[0] + name[len(call_of(name)) :])
            else:
                names.add(name)
        return frozenset(names)

    def float64_ends(self, batch: int) -> str | None:
        """Where float32, or less, first enters either float64 run: the module, the side and the line."""
        return float64_end.place(self.reference("float64", batch), self.port("float64", batch))

    def float64_bounds(self, batch: int) -> dict[str, float]:
        """Bounds other than FLOAT64_RELATIVE: those of float32, for tensors that float32 entered on either side."""
        if self.float64_ends(batch) is None:
            return {}
        traces = (self.port("float64", batch), self.reference("float64", batch))
        return float64_end.bounds(float64_end.narrow(*traces), self.reference_errors(batch)[0])

    def float64_gradient_bounds(self, batch: int) -> dict[str, float]:
        """The same for gradients: of all of them, if float32 entered the loss."""
        if self.gradient_dtype(batch) is np.float64:
            return {}
        theirs = self.reference_errors(batch)[1]
        return float64_end.bounds(theirs.keys(), theirs)

    def gradient_dtype(self, batch: int) -> type:
        """That of the rounding noise in the gradients of the float64 runs: float32 where that entered the loss."""
        traces = (self.port("float64", batch), self.reference("float64", batch))
        return np.float32 if LOSS in float64_end.narrow(*traces) else np.float64

    def release(self) -> None:
        """Forgets the runs: those of a large model take gigabytes."""
        self._traces.clear()

    def _kept(self, side: str, precision: Precision, batch: int) -> Trace:
        key = (side, precision, batch)
        if key not in self._traces:
            run = self.run_reference if side == "reference" else self.run_port
            self._traces[key] = run(self.batches[batch], precision)
        return self._traces[key]

    @functools.cached_property
    def _names_of_arrays(self) -> dict[str, list[str]]:
        trace = self.reference("float64")
        return names_by_call([*trace.outputs, *trace.results])


GATES: tuple[Precision, Precision] = ("float64", "float32")


def zero_among(
    gradients: Mapping[str, np.ndarray], summed: Mapping[str, np.ndarray], *, dtype: type = np.float64
) -> frozenset[str]:
    """Names of the gradients, computed in `dtype`, that are nothing but the rounding of what was summed."""
    return frozenset(
        name
        for name, scale in summed.items()
        if norm(scale) > 0 and norm(gradients[name]) <= zero_noise(norm(scale), dtype)
    )
