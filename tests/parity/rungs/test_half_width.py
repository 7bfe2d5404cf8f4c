"""Rung 17: bfloat16, judged by the reference's own distance from the float64 answer."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from parity import ladder
from parity.pair import Pair
from parity.tolerances import BFLOAT16, sum_floor

WIDTH = 6


class Reference(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Port(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


class PortWithFewerBits(Port):
    """In bfloat16 only: three bits of the fraction instead of seven."""

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.layer(x)
        return y if y.dtype != jnp.bfloat16 else y.astype(jnp.float8_e4m3fn).astype(y.dtype)


def check(port: type[Port]) -> ladder.Report:
    x = np.random.default_rng(0).standard_normal((9, WIDTH))
    return ladder.check(
        Pair(reference=Reference, port=port, inputs={"x": x}),
        rungs=("weights", "forward", "half_width"),
        keep_going=True,
    )


def test_a_port_as_good_as_the_reference_passes() -> None:
    rung = check(Port).rung("half_width")
    assert rung.passed, rung.failures
    assert {section.precision for section in rung.outcome.sections} == {"bfloat16"}


def test_fewer_bits_than_the_reference_has_fail() -> None:
    outcome = check(PortWithFewerBits)
    assert outcome.rung("forward").passed, "in float64 and float32 the port is right"
    assert "output" in {failure.tensor for failure in outcome.rung("half_width").failures}


def test_a_bias_summed_over_many_places_may_lose_more() -> None:
    x = np.random.default_rng(0).standard_normal((400, WIDTH))
    pair = Pair(reference=Reference, port=Port, inputs={"x": x})
    rung = ladder.check(pair, rungs=("weights", "forward", "half_width")).rung("half_width")
    assert rung.passed, rung.failures
    bounds = {c.tensor: c.bound for section in rung.outcome.sections for c in section.comparisons}
    assert bounds["layer.bias"] >= sum_floor(400) > BFLOAT16.floor
    assert sum_floor(400) == 3 * 20 * 2.0**-9
    assert bounds["layer.kernel"] < sum_floor(400)
