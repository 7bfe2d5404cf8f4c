"""Rung 16: the port run in other ways than the one that was proven equal."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity import ladder
from parity.pair import Pair, Side


class Reference(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Port(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(5, 6, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


def call(module: Any, inputs: Any) -> Any:
    return module(inputs["x"])


def sums(output: Any, inputs: Any) -> Any:
    """(sum, weight): rows weigh differently."""
    return (output**2 * inputs["weight"][:, None]).sum(), inputs["weight"].sum()


def quotient(output: Any, inputs: Any) -> Any:
    """(mean of these rows, 1): over devices, a mean of means (P7)."""
    total, weight = sums(output, inputs)
    return total / weight, jnp.ones(())


def mean(output: Any, inputs: Any) -> Any:
    """The same number as `sums` gives, divided already."""
    total, weight = sums(output, inputs)
    return total / weight


def make_pair(port: Any = Port, *, loss: Any = sums, rows: int = 4) -> Pair:
    rng = np.random.default_rng(0)
    return Pair(
        reference=Side(build=Reference, call=call, loss=sums),
        port=Side(build=port, call=call, loss=loss),
        inputs={"x": rng.standard_normal((rows, 5)), "weight": np.arange(1.0, rows + 1.0)},
    )


def modes(pair: Pair) -> ladder.Rung:
    outcome = ladder.check(pair, rungs=("weights", "forward", "gradients", "modes"), keep_going=True)
    assert outcome.rung("forward").passed, "the fault is to show in another mode only"
    assert outcome.rung("gradients").passed
    return outcome.rung("modes")


def failed(rung: ladder.Rung) -> set[str]:
    return {section.title for section in rung.outcome.sections if not section.passed}


@pytest.fixture(scope="module")
def devices() -> int:
    count = jax.device_count()
    assert count > 1, "conftest asks for several virtual devices"
    return count


def test_every_mode_is_compared_and_equal(devices: int) -> None:
    rung = modes(make_pair())
    titles = [(s.title, s.precision) for s in rung.outcome.sections]
    over = f"over {devices} devices"
    assert titles == [
        ("eager", "float64"),
        (f"sharded {over}", "float64"),
        (f"pmap {over}", "float64"),
        ("untapped", "float32"),
    ]
    assert rung.passed, rung.failures
    assert {"output", "loss", "layer.kernel"} <= {c.tensor for c in rung.outcome.sections[2].comparisons}


def test_where_no_other_mode_has_gradients_it_is_compiled_unwatched_for_one_device() -> None:
    rung = modes(make_pair(loss=mean))
    assert rung.passed, rung.failures
    first = rung.outcome.sections[0]
    assert (first.title, first.precision) == ("untapped", "float64")
    assert {"output", "loss", "layer.kernel"} <= {c.tensor for c in first.comparisons}


def test_a_mean_of_means_over_devices_fails(devices: int) -> None:
    rung = modes(make_pair(loss=quotient))
    assert failed(rung) == {f"pmap over {devices} devices"}
    assert {"loss", "layer.kernel", "layer.bias"} == {failure.tensor for failure in rung.failures}


def test_a_port_that_looks_at_the_whole_batch_fails_under_pmap(devices: int) -> None:
    class Centred(Port):
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layer(x - x.mean(axis=0))

    class CentredReference(Reference):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x - x.mean(dim=0))

    pair = make_pair(Centred)
    pair = Pair(reference=Side(build=CentredReference, call=call, loss=sums), port=pair.port, inputs=pair.inputs)
    assert failed(modes(pair)) == {f"pmap over {devices} devices"}


def test_a_port_that_computes_something_else_when_it_is_not_watched_fails() -> None:
    class Shy(Port):
        times = 0

        def __call__(self, x: jax.Array) -> jax.Array:
            # Traced once watched in float64, once in float32; then not watched.
            Shy.times += 1
            return self.layer(x) * (1.0 if Shy.times <= 2 else 1.0 + 1e-9)

    assert "untapped" in failed(modes(make_pair(Shy)))


def test_a_result_that_is_only_there_when_watched_is_missed(devices: int) -> None:
    class Sparing(Port):
        times = 0

        def __call__(self, x: jax.Array) -> Any:
            Sparing.times += 1
            both = {"a": self.layer(x), "b": self.layer(x) + 1.0}
            return both if Sparing.times <= 2 else {"a": both["a"]}

    class SparingReference(Reference):
        def forward(self, x: torch.Tensor) -> Any:
            return {"a": self.layer(x), "b": self.layer(x) + 1.0}

    pair = make_pair(Sparing)
    pair = Pair(
        reference=Side(build=SparingReference, call=call), port=Side(build=Sparing, call=call), inputs=pair.inputs
    )
    rung = modes(pair)
    assert {"untapped", "eager", f"sharded over {devices} devices"} <= failed(rung)
    assert "output[b]" in {failure.tensor for failure in rung.failures}


def test_without_a_common_axis_several_devices_are_not_compared_and_said_so() -> None:
    pair = make_pair()
    pair = Pair(
        reference=Side(build=Reference, call=call),
        port=Side(build=Port, call=call),
        inputs={"x": np.ones((4, 5)), "scale": np.float64(2.0)},
    )
    rung = modes(pair)
    assert rung.passed
    assert any("no common batch axis" in note for note in rung.outcome.notes)
    assert not any("devices" in section.title for section in rung.outcome.sections)
