"""Where a port differs from itself: run without jit, or on the rows that one of several devices sees."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from parity.follow import Followed, follow
from parity.part import derived
from parity.rungs import Section
from parity.rungs.rows import common_rows, rows_of_a_device
from parity.runs import Runs
from parity.trace import Trace


def first_in_mode(runs: Runs, section: Section) -> Followed | None:
    """The first module that computes something else in the mode that failed; None if all of them are equal."""
    ways: Mapping[str, Callable[[Runs], tuple[Trace, Trace] | None]] = {
        "eager": _eagerly,
        "sharded": _by_rows,
        "pmap": _by_rows,
    }
    way = ways.get(section.title.partition(" ")[0])
    traces = None if way is None else way(runs)
    if traces is None:
        return None
    whole, other = traces
    # Only where both have values: without jit, what runs inside a transformation is not watched.
    found = follow(other, whole, names=frozenset(whole.outputs.keys() & other.outputs.keys()))
    return found if found is not None and found.call else None


def _eagerly(runs: Runs) -> tuple[Trace, Trace]:
    return runs.port("float64"), runs.run_port(runs.batches[0], "float64", eager=True)


def _by_rows(runs: Runs) -> tuple[Trace, Trace] | None:
    """The rows of the first device among the others, and alone."""
    import jax

    inputs = runs.batches[0]
    rows = common_rows(inputs)
    share = None if rows is None else rows_of_a_device(rows, len(jax.devices()))
    if rows is None or share is None or share >= rows:
        return None
    few = derived(inputs, {name: array[:share] for name, array in inputs.items()})
    alone = runs.run_port(few, "float64", backward=False)
    return _rows(runs.port("float64"), rows, share, like=alone), alone


def _rows(trace: Trace, rows: int, share: int, *, like: Trace) -> Trace:
    """The first rows of every array that has one for each row of the batch; of the rest nothing."""

    def of(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: array[:share] for name, array in arrays.items() if array.ndim and len(array) == rows}

    return dataclasses.replace(
        trace,
        given=of(trace.given),
        given_ids=of(trace.given_ids),
        outputs=of(trace.outputs),
        results=of(trace.results),
        loss=like.loss,
    )
