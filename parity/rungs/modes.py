"""Rung 16: the port against itself: not watched, eager, on several devices under jit and under pmap; its training too.

The other rungs run the port jitted, on one device, with every module watched. Watching changes what the compiler fuses
(P24), devices change the order of sums, and a loss averaged per device is another loss (P7): so what users run is
compared with what was proven equal. Needs no reference but its float64 answer.

A side that brings its own training step may bring it as it is run besides (`Training.modes`): steps in each mode are
compared with steps of the one that the trajectory has compared with the reference's.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from parity import training_modes
from parity.compare import relative_error
from parity.compilation import jit, pmap
from parity.pair import Inputs
from parity.rungs import Outcome, Section, float32, section
from parity.rungs.forward import compare_all
from parity.rungs.gradients import FLOAT32_GRADIENTS, float64_bounds, floors
from parity.rungs.rows import common_rows, repeats, tiled
from parity.runs import Runs
from parity.tolerances import FLOAT64_GRADIENTS_RULE
from parity.trace import LOSS, OUTPUT, leaves

Values = dict[str, np.ndarray]


def climb(runs: Runs) -> Outcome:
    """Each mode in float64, where only semantics and the order of sums can differ; untapped in float32 too.

    Nobody watches in any of them. In float64 on one device the port is only compiled once more where no other mode
    gave all that was expected, gradients included.
    """
    inputs = runs.batches[0]
    exact = runs.port("float64")
    expected = _values(runs, exact.results, exact.loss, exact.gradients)
    modes = _Modes(runs)
    bounds = float64_bounds(exact.gradients, {})

    def judged(name: str, values: Values) -> Section:
        compared = compare_all(values, _of(expected, values), bounds=bounds)
        return section(name, "float64", FLOAT64_GRADIENTS_RULE, compared)

    computed = dict(modes.run(inputs))
    sections = [judged(name, values) for name, values in computed.items()]
    if not any(s.passed and computed[s.title].keys() == expected.keys() for s in sections):
        sections.insert(0, judged("untapped", modes.untapped(inputs)))
    if all(s.passed for s in sections):
        sections.append(_untapped_float32(runs, inputs, expected))
    trained, notes = training_modes.climb(runs)
    return Outcome(sections=(*sections, *trained), notes=(*modes.notes, *notes))


def _untapped_float32(runs: Runs, inputs: Inputs, expected: Values) -> Section:
    """The program that users run, by the reference's distance from the float64 answer.

    On a CPU the forward pass: to compile a tiny model's backward pass as users do takes 8 s more there, a seventh of
    the ladder, and its gradients were judged when it was watched.
    """
    plain = runs.run_port(inputs, "float32", tap=False, backward=jax.default_backend() != "cpu")
    values = _values(runs, plain.results, plain.loss, plain.gradients)
    wanted = _of(expected, values)
    ours = {n: relative_error(values[n], array) if n in values else math.inf for n, array in wanted.items()}
    outputs, gradients = runs.reference_errors(0)
    theirs = {name: (outputs | gradients)[name] for name in ours}

    def again(draw: int) -> dict[str, float]:
        further, further_gradients = runs.reference_errors(0, draw)
        return further | further_gradients

    least = floors(runs.reference_gradients(0), "float32")
    return float32.judged(
        "untapped", ours, theirs, again=again, redrawn=runs.redrawn, rule=FLOAT32_GRADIENTS, floors=least
    )


class _Modes:
    """Every way of running the port in float64."""

    def __init__(self, runs: Runs):
        self.runs = runs
        self.runner = runs.port_runner("float64")
        self.notes: list[str] = []
        trained = self.runner.trained()
        with self.runner.numerics():
            arrays = self.runner.cast(runs.port_weights)
        self.trained = {name: array for name, array in arrays.items() if name in trained}
        self.fixed = {name: array for name, array in arrays.items() if name not in trained}

    def run(self, inputs: Inputs) -> Iterator[tuple[str, Values]]:
        """(mode, what it computed), except for `untapped`."""
        with self.runner.numerics():
            yield "eager", self._eager(inputs)
            yield from self._several_devices(inputs)

    def untapped(self, inputs: Inputs) -> Values:
        """Under jit, on one device."""
        plain = self.runner.trace(inputs, weights=self.runs.port_weights, tap=False)
        return _values(self.runs, plain.results, plain.loss, plain.gradients)

    def _eager(self, inputs: Inputs) -> Values:
        """Operation by operation; the forward pass alone."""
        results, loss = self._forward(self.trained, self.runner.inputs(inputs))
        loss = loss if loss is None or not isinstance(loss, tuple) else loss[0] / loss[1]
        return _values(self.runs, _host(results), loss, {})

    def _several_devices(self, inputs: Inputs) -> Iterator[tuple[str, Values]]:
        devices = jax.devices()
        rows = common_rows(inputs)
        if len(devices) < 2 or rows is None:
            why = "the inputs have no common batch axis" if rows is None else "there is one device only"
            self.notes.append(f"not compared on several devices: {why}")
            return
        count = len(devices)
        # Until every device has as many rows.
        many = tiled(inputs, repeats(rows, count))
        for name, run in (("sharded", self._sharded), ("pmap", self._pmap)):
            try:
                yield f"{name} over {count} devices", self._untiled(run(many, devices), rows)
            except NotImplementedError as error:
                self.notes.append(f"not compared under {name}: {error}")

    def _untiled(self, computed: tuple[Any, Any, Any], rows: int) -> Values:
        results, loss, gradients = computed
        results = {name: array[:rows] for name, array in _host(results).items()}
        return _values(self.runs, results, loss, {} if gradients is None else _host(gradients))

    def _forward(self, trained: Mapping[str, jax.Array], inputs: Any) -> tuple[Any, Any]:
        """Results, and the loss as the side gives it: (sum, weight), a scalar, or None if it brings none."""
        side = self.runner.side
        output = side.call(self.runner.merged(dict(trained) | self.fixed), inputs)
        results = {OUTPUT + suffix: array for suffix, array in leaves(output, lambda x: isinstance(x, jax.Array))}
        return results, None if side.loss is None else side.loss(output, inputs)

    def _sharded(self, inputs: Inputs, devices: list[Any]) -> tuple[Any, Any, Any]:
        """jit over a mesh: rows on the devices, weights on all of them."""
        mesh = jax.sharding.Mesh(np.asarray(devices), ("batch",))
        by_row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        given = jax.device_put(self.runner.inputs(inputs), by_row)
        trained = jax.device_put(self.trained, everywhere)

        def step(trained: Any, given: Any) -> tuple[Any, Any, Any]:
            def loss(trained: Any) -> tuple[Any, Any]:
                results, (total, weight) = self._sums(trained, given)
                return total / weight, results

            (value, results), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
            return results, value, gradients

        if self._has_sums(trained, given):
            return jit(step)(trained, given)
        forward = jit(lambda t, g: self._forward(t, g)[0])
        return forward(trained, given), None, None

    def _pmap(self, inputs: Inputs, devices: list[Any]) -> tuple[Any, Any, Any]:
        """One program a device; sums of losses, weights and gradients are added up over devices, then divided."""
        count = len(devices)
        split = {name: array.reshape(count, -1, *array.shape[1:]) for name, array in inputs.items()}
        given = self.runner.inputs(split)

        def step(trained: Any, given: Any) -> tuple[Any, Any, Any]:
            def total(trained: Any) -> tuple[Any, Any]:
                results, (loss, weight) = self._sums(trained, given)
                return loss, (results, loss, weight)

            gradients, (results, loss, weight) = jax.grad(total, has_aux=True)(trained)
            loss, weight, gradients = jax.lax.psum((loss, weight, gradients), "devices")
            return results, loss / weight, jax.tree.map(lambda g: g / weight, gradients)

        one = jax.tree.map(lambda x: x[0], given)
        if self._has_sums(self.trained, one):
            run = pmap(
                step,
                axis_name="devices",
                in_axes=(None, 0),
                out_axes=(0, None, None),
                devices=devices,
            )
            results, loss, gradients = run(self.trained, given)
        else:
            forward = pmap(lambda t, g: self._forward(t, g)[0], in_axes=(None, 0), devices=devices)
            results, loss, gradients = forward(self.trained, given), None, None
        return {name: array.reshape(-1, *array.shape[2:]) for name, array in results.items()}, loss, gradients

    def _has_sums(self, trained: Any, given: Any) -> bool:
        if self.runner.side.loss is None:
            return False
        sums = isinstance(jax.eval_shape(lambda t, g: self._forward(t, g)[1], trained, given), tuple)
        if not sums:
            self.notes.append("gradients not compared on several devices: the loss is not given as (sum, weight)")
        return sums

    def _sums(self, trained: Any, given: Any) -> tuple[Any, tuple[Any, Any]]:
        results, loss = self._forward(trained, given)
        return results, loss


def _values(runs: Runs, results: Values, loss: Any, gradients: Values) -> Values:
    """What is compared of a run."""
    zero = runs.zero_gradients(0)
    values = results | {name: array for name, array in gradients.items() if name not in zero}
    return values if loss is None or runs.pair.port.loss is None else values | {LOSS: np.asarray(loss)}


def _of(expected: Values, values: Values) -> Values:
    """What a mode is held against: every result, and of loss and gradients what it has."""
    return {name: array for name, array in expected.items() if name in values or name.startswith(OUTPUT)}


def _host(arrays: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in arrays.items()}
