"""Rung 17: both sides in bfloat16, each by its distance from the float64 answer."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from parity.pair import Inputs
from parity.rungs import NotComparedError, Outcome, Section, float32
from parity.rungs.forward import label
from parity.rungs.gradients import floors, gradient_errors
from parity.runs import Errors, Runs
from parity.tolerances import BFLOAT16, OF_ALL_GRADIENTS, OF_LONG_SUMS, sum_floor
from parity.trace import Trace, module_of

UNIT = 2.0**-8
"""Spacing of bfloat16 numbers at 1."""


def climb(runs: Runs) -> Outcome:
    """Raises NotComparedError where no live reference can be run in bfloat16."""
    runs.live_reference()
    redrawn: set[str] = set()
    sections: list[Section] = []
    for number, inputs in enumerate(runs.batches):
        exact = runs.reference("float64", number)
        try:
            theirs = _errors(runs, runs.run_reference(inputs, "bfloat16"), exact, number, of_port=False)
        except RuntimeError as error:  # torch has kernels that know no bfloat16
            raise NotComparedError(f"the reference does not run in bfloat16: {error}") from error
        port = runs.run_port(inputs, "bfloat16")
        ours = _errors(runs, port, exact, number, of_port=True)
        names = runs.comparable(exact, port) | exact.results.keys()
        again = _further(runs, inputs, number)
        least = [{}, _floors(runs, exact, number)]
        for kind, title in enumerate(("modules and results", "gradients")):
            kept = ours[kind].keys() & names if kind == 0 else ours[kind].keys()
            sections.append(
                float32.judged(
                    title + label(runs, number),
                    {name: error for name, error in ours[kind].items() if name in kept},
                    {name: error for name, error in theirs[kind].items() if name in kept},
                    again=lambda draw, again=again, kind=kind: again(draw)[kind],  # type: ignore[misc]
                    redrawn=redrawn,
                    rule=dataclasses.replace(BFLOAT16, also=OF_ALL_GRADIENTS + OF_LONG_SUMS) if kind else BFLOAT16,
                    floors=least[kind],
                )
            )
    notes = [f"judged by further runs of the reference: {', '.join(sorted(redrawn))}"] if redrawn else []
    return Outcome(sections=tuple(sections), notes=tuple(notes))


def _errors(runs: Runs, run: Trace, exact: Trace, batch: int, *, of_port: bool) -> tuple[Errors, Errors]:
    """(outputs and results, gradients) of one run in bfloat16, against the float64 answer with the same weights."""
    answer = runs.gradients_in_port_layout(exact)
    gradients = run.gradients if of_port else runs.gradients_in_port_layout(run)
    return runs.errors(run, exact), gradient_errors(gradients, answer, runs.zero_gradients(batch))


def _floors(runs: Runs, exact: Trace, batch: int) -> Errors:
    """Of gradients that are small beside the others, the rounding of all; of sums over the places of an output, that
    of adding them up."""
    sizes: dict[str, int] = {}
    for name, output in exact.outputs.items():
        sizes[module_of(name)] = sizes.get(module_of(name), 0) + output.size
    gradients = runs.reference_gradients(batch)
    least = floors(gradients, "bfloat16")
    for name, gradient in gradients.items():
        path = name.rpartition(".")[0]
        size = sizes.get(runs.derived.modules.get(path, path), 0)
        if gradient.ndim == 1 and size:
            least[name] = max(least[name], sum_floor(size / gradient.size))
    return least


def _further(runs: Runs, inputs: Inputs, batch: int) -> Callable[[int], tuple[Errors, Errors]]:
    """The reference's errors with every weight moved by up to half a unit of bfloat16: other draws of its roundings."""

    @functools.cache
    def again(draw: int) -> tuple[Errors, Errors]:
        rng = np.random.default_rng(draw)
        moved = {
            name: (weight * (1.0 + UNIT * (rng.random(weight.shape) - 0.5))).astype(np.float32)
            for name, weight in runs.weights.items()
        }
        exact = runs.run_reference(inputs, "float64", weights=moved)
        return _errors(runs, runs.run_reference(inputs, "bfloat16", weights=moved), exact, batch, of_port=False)

    return again
