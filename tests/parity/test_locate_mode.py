"""A port that differs from itself in another mode of execution: the module is found."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from parity import ladder
from tests.parity.residual_blocks import Model, pair, reclass


def without_jit(self: Any, x: jax.Array) -> jax.Array:
    y = nnx.Linear.__call__(self, x)
    return y if isinstance(x, jax.core.Tracer) else y * (1 + 1e-6)


def alone(self: Any, x: jax.Array) -> jax.Array:
    return nnx.Linear.__call__(self, x) * (1 + 1e-6 * (x.shape[0] == 1))


@pytest.mark.parametrize(
    ("method", "kind", "mode"),
    [(without_jit, "eager differs from jit", "eager"), (alone, "depends on the batch", "pmap over 8 devices")],
)
def test_the_module_is_found(method: Any, kind: str, mode: str) -> None:
    def wrong(model: Model) -> None:
        reclass(model.blocks[1].up, __call__=method)

    report = ladder.check(pair(wrong), rungs=("weights", "forward", "modes"))
    assert [rung.name for rung in report.failed] == ["modes"]
    assert report.first_difference is not None
    assert report.first_difference.module == "blocks.1.up"
    assert report.first_difference.explanation == f"{mode}, against the port's own jitted run of the whole batch"
    assert report.first_difference.error == pytest.approx(1e-6, rel=1e-3)
    assert report.diagnosis is not None
    assert report.diagnosis.kind == kind


def test_a_port_that_is_the_same_in_every_mode_passes() -> None:
    report = ladder.check(pair(), rungs=("weights", "forward", "modes"))
    assert report.passed
    assert np.isfinite(report.rung("modes").seconds)
