"""Rung 15: the decoders of both sides on the same inputs, in float64: the same ids, the same scores."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from parity.compare import Comparison, relative_error
from parity.compilation import jit
from parity.pair import Inputs
from parity.rungs import Outcome, section
from parity.rungs.forward import label
from parity.runs import Runs
from parity.tolerances import DECODING_RULE, SCORES_RELATIVE

Weights = Mapping[str, np.ndarray]

LIVELY = np.float32(4.0)
"""A power of two: weights stay float32 numbers."""


def climb(runs: Runs) -> Outcome:
    """Evidence: {"reference", "port"}, the ids, or else scores, of the first result that differs.

    Raises NotComparedError unless both sides bring a decoder.
    """
    runs.expect_both("decode", "decoder")
    comparisons: list[Comparison] = []
    evidence: list[dict[str, Any]] = []
    for (kind, weights), (number, inputs) in itertools.product(_weights(runs).items(), enumerate(runs.batches)):
        expected, got = _reference(runs, inputs, weights), _port(runs, inputs, weights)
        for comparison in _compared(got, expected, kind + label(runs, number)):
            if not comparison.passed:
                name = comparison.tensor.split(" ")[0]
                evidence.append({"reference": expected.get(name), "port": got.get(name), "inputs": inputs})
            comparisons.append(comparison)
    # Other ids say more than other scores.
    evidence.sort(key=lambda each: np.issubdtype(np.asarray(each["reference"]).dtype, np.floating))
    return Outcome(
        sections=(section("decoded", "float64", DECODING_RULE, comparisons),),
        evidence=evidence[0] if evidence else {},
    )


def _weights(runs: Runs) -> dict[str, dict[str, np.ndarray]]:
    """The pair's own, and with larger matrices: an untrained model mostly repeats one token, whatever it is given."""
    larger = {name: array * LIVELY if array.ndim > 1 else array for name, array in runs.weights.items()}
    return {"": runs.weights, " with larger matrices": larger}


def _compared(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], batch: str) -> Iterator[Comparison]:
    for name in [*expected, *(name for name in got if name not in expected)]:
        if name not in got or name not in expected:
            detail = f"only the {'port' if name in got else 'reference'} returns it"
            yield Comparison(tensor=name + batch, error=float("inf"), bound=0.0, detail=detail)
        elif np.issubdtype(expected[name].dtype, np.floating):
            error = relative_error(got[name], expected[name])
            yield Comparison(tensor=name + batch, error=error, bound=SCORES_RELATIVE)
        else:
            yield _ids(name + batch, got[name], expected[name])


def _ids(name: str, got: np.ndarray, expected: np.ndarray) -> Comparison:
    if got.shape != expected.shape:
        detail = f"shape: reference {expected.shape}, port {got.shape}"
        return Comparison(tensor=name, error=float("inf"), bound=0.0, detail=detail)
    unequal = np.argwhere(got != expected)
    detail = ""
    if len(unequal):
        place = tuple(int(i) for i in unequal[0])
        detail = f"first at {place}: reference {expected[place]}, port {got[place]}"
    return Comparison(tensor=name, error=float(len(unequal)), bound=0.0, detail=detail)


def _reference(runs: Runs, inputs: Inputs, weights: Weights) -> dict[str, np.ndarray]:
    import torch

    from parity.capture_torch import load_reference, tensors_of, to_numpy

    runner = runs.live_reference()
    module = runner.module("float64")
    load_reference(module, weights, precision="float64")
    with torch.no_grad():
        decoded = runner.side.decode(module, tensors_of(inputs, "float64"))
    return {name: to_numpy(tensor) for name, tensor in _named(decoded).items()}


def _port(runs: Runs, inputs: Inputs, weights: Weights) -> dict[str, np.ndarray]:
    runner = runs.port_runner("float64")
    decode = runner.side.decode
    assert decode is not None  # expect_both has seen it
    compiled = jit(lambda arrays, given: _named(decode(runner.merged(arrays), given)))
    with runner.numerics():
        decoded = compiled(runner.cast(runs.to_port(weights)), runner.inputs(inputs))
        return {name: np.asarray(array) for name, array in decoded.items()}


def _named(decoded: Any) -> dict[str, Any]:
    return dict(decoded) if isinstance(decoded, Mapping) else {"ids": decoded}
