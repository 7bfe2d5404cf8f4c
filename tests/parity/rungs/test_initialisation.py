"""Initial distributions: equal ones pass, another scale, shape or constant is seen, and chance is kept in check."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity import statistics, training_torch
from parity.capture_flax import FlaxRunner
from parity.pair import KnownDifference, Pair, Side
from parity.rungs import NotComparedError, initialisation
from parity.runs import Runs
from parity.training_flax import Initial
from tests.parity.rungs import small_pair
from tests.parity.rungs.small_pair import WIDTHS, Port, Reference, linear


def climb(**fields: Any) -> Any:
    return initialisation.climb(small_pair.runs(**fields))


def scaled(factor: float) -> type[Port]:
    class Scaled(Port):
        def layer(self, fan_in: int, out: int, *, rngs: nnx.Rngs) -> nnx.Linear:
            return linear(fan_in, out, rngs=rngs, scale=factor)

    return Scaled


def with_initialisers(kernel: Callable[..., Any], bias: Callable[..., Any] | None = None) -> type[Port]:
    class Other(Port):
        def layer(self, fan_in: int, out: int, *, rngs: nnx.Rngs) -> nnx.Linear:
            layer = linear(fan_in, out, rngs=rngs)
            layer.kernel.set_value(kernel(rngs.params(), (fan_in, out), jnp.float32))
            if bias is not None:
                layer.bias.set_value(bias(rngs.params(), (out,), jnp.float32))
            return layer

    return Other


def failed(outcome: Any) -> dict[str, set[str]]:
    return {s.title: {c.tensor for c in s.failures} for s in outcome.sections if s.failures}


@pytest.fixture(scope="module")
def equal() -> Any:
    return climb()


def test_equal_distributions_pass_and_a_factor_of_root_2_would_have_been_seen(equal: Any) -> None:
    assert not failed(equal)
    fixed, drawn = equal.sections
    assert {c.tensor for c in fixed.comparisons} >= {"norm.scale", "norm.bias", "first.kernel"}
    assert {c.tensor for c in drawn.comparisons} == {
        f"{m}.{t}" for m in ("first", "second") for t in ("kernel", "bias")
    }
    assert "a scale off" not in " ".join(equal.notes), "enough draws even for a bias of three elements"
    draws = math.ceil(initialisation.MIN_VALUES / WIDTHS[2])
    assert equal.notes[0] == f"draws: {draws} of the reference, {draws} of the port"


@pytest.mark.parametrize("factor", [math.sqrt(2.0)])
def test_a_scale_off_by_root_2_is_seen_in_every_parameter(factor: float) -> None:
    outcome = climb(port={"build": scaled(factor)})
    assert failed(outcome) == {"distributions": {f"{m}.{t}" for m in ("first", "second") for t in ("kernel", "bias")}}
    assert any(f"{factor:.1f}" in c.detail for c in outcome.sections[1].failures)
    evidence = outcome.evidence
    assert evidence["port"].std() / evidence["reference"].std() == pytest.approx(factor, rel=0.1)
    assert evidence["shape"] in {(5, 7), (7, 3), (7,), (3,)}


@pytest.mark.parametrize(
    "kernel",
    [
        nnx.initializers.variance_scaling(1 / 3, "fan_in", "normal"),
        nnx.initializers.variance_scaling(1 / 3, "fan_in", "truncated_normal"),
        nnx.initializers.lecun_normal(),
        nnx.initializers.xavier_uniform(),
    ],
    ids=["normal", "truncated normal", "lecun", "xavier"],
)
def test_other_initialisers_are_seen(kernel: Any) -> None:
    outcome = climb(port={"build": with_initialisers(kernel)})
    assert failed(outcome) == {"distributions": {"first.kernel", "second.kernel"}}


def test_zero_biases_for_drawn_ones_and_the_other_way_round() -> None:
    zero_biases = with_initialisers(nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform"), jnp_zeros)
    outcome = climb(port={"build": zero_biases})
    assert failed(outcome)["elements that never change"] == {"first.bias", "second.bias"}
    detail = outcome.sections[0].failures[0].detail
    assert "expected drawn, found always 0" in detail
    assert outcome.evidence["parameter"] == "first.bias"

    class DrawnNorm(Port):
        def __init__(self, *, rngs: nnx.Rngs):
            super().__init__(rngs=rngs)
            self.norm.bias.set_value(0.01 * jax.random.normal(rngs.params(), (WIDTHS[1],)))

    assert failed(climb(port={"build": DrawnNorm})) == {"elements that never change": {"norm.bias"}}


def test_another_constant() -> None:
    class Other(Port):
        def __init__(self, *, rngs: nnx.Rngs):
            super().__init__(rngs=rngs)
            self.norm.scale.set_value(jnp.full((WIDTHS[1],), 0.999))

    outcome = climb(port={"build": Other})
    assert failed(outcome) == {"elements that never change": {"norm.scale"}}
    assert "expected always 1, found always 0.999" in outcome.sections[0].failures[0].detail


def test_a_row_of_padding_that_is_zero_on_one_side() -> None:
    def with_row(build: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
        def built() -> torch.nn.Module:
            module = build()
            with torch.no_grad():
                module.first.weight[:, 2] = 0.0
            return module

        return built

    outcome = climb(reference={"build": with_row(Reference)})
    assert failed(outcome) == {"elements that never change": {"first.kernel"}}
    failure = outcome.sections[0].failures[0]
    assert failure.error == WIDTHS[1]
    assert "at [2, 0]" in failure.detail


def test_an_orthogonal_matrix_is_told_from_independent_numbers_of_the_same_distribution() -> None:
    """Of a 24 by 24 orthogonal matrix, every entry by itself is all but normal."""
    rng = np.random.default_rng(0)
    size, draws, limit = 24, 20, 1e-8
    orthogonal = [np.linalg.qr(rng.standard_normal((size, size)))[0] for _ in range(draws)]
    independent = [rng.standard_normal((size, size)) / np.sqrt(size) for _ in range(draws)]
    again = [rng.standard_normal((size, size)) / np.sqrt(size) for _ in range(draws)]

    def compared(a: list[np.ndarray], b: list[np.ndarray]) -> Any:
        rows = tuple(np.concatenate([np.linalg.norm(x, axis=-1) for x in side]) for side in (a, b))
        values = (np.concatenate([x.ravel() for x in side]) for side in (a, b))
        return initialisation._compared("w", *values, rows, false_alarm=limit)[0]

    assert not compared(orthogonal, independent).passed
    assert "norms of rows" in compared(orthogonal, independent).detail
    assert compared(independent, again).passed
    assert compared(orthogonal, [x.T for x in orthogonal]).passed


def test_a_seed_fixed_inside_leaves_one_draw_and_says_what_it_cannot_see() -> None:
    outcome = climb(port={"build": lambda: Port(rngs=nnx.Rngs(3))})
    assert not failed(outcome)
    notes = " ".join(outcome.notes)
    assert "1 of the port" in notes
    assert "let it take a parameter `rngs`" in notes
    assert "a scale off by √2 would not have been seen for certain: first.kernel" in notes
    # Twice as wide, a uniform distribution is seen by its range.
    assert failed(climb(port={"build": lambda: scaled(2.0)(rngs=nnx.Rngs(3))}))["distributions"] >= {"first.kernel"}


def test_a_side_may_bring_its_own_draws(equal: Any) -> None:
    def initial(seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        fan_in = {"first": WIDTHS[0], "second": WIDTHS[1]}
        drawn = {
            f"{layer}.{leaf}": rng.uniform(-(fan**-0.5), fan**-0.5, shape)
            for layer, fan in fan_in.items()
            for leaf, shape in (("kernel", (fan, 7 if layer == "first" else 3)), ("bias", 7 if layer == "first" else 3))
        }
        return drawn | {"norm.scale": np.ones(7), "norm.bias": np.zeros(7)}

    assert not failed(climb(port={"build": lambda: nnx.eval_shape(lambda: Port(rngs=nnx.Rngs(0))), "initial": initial}))
    with pytest.raises(NotComparedError, match="shapes only"):
        climb(port={"build": lambda: nnx.eval_shape(lambda: Port(rngs=nnx.Rngs(0)))})


def by_rngs(seed: Any) -> jax.Array:
    return jax.random.normal(nnx.Rngs(seed).params(), (3,))


def by_key(seed: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (3,))


def by_numpy(seed: Any) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(3).astype(np.float32)


@pytest.mark.parametrize("draw", [by_rngs, by_key, by_numpy])
def test_a_builder_that_takes_a_seed_is_given_it_compiled_or_not(draw: Callable[[Any], Any]) -> None:
    class Drawn(nnx.Module):
        def __init__(self, seed: Any = 0):
            self.weight = nnx.Param(jnp.asarray(draw(seed)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.weight.get_value()

    runner = FlaxRunner(Side(build=Drawn), precision="float32")
    initial = Initial(runner, frozenset({"weight"}))
    for seed in (0, 3, 70):
        assert np.allclose(initial(seed)["weight"], draw(seed), rtol=1e-6)


def test_of_a_builder_of_shapes_that_takes_a_seed_nothing_can_be_drawn() -> None:
    with pytest.raises(NotComparedError, match="shapes only"):
        climb(port={"build": lambda seed=0: nnx.eval_shape(lambda: Port(rngs=nnx.Rngs(seed)))})


def test_torchs_random_numbers_are_left_as_they_were() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (training_torch.initial(Side(build=Reference), seed, {"first.bias"}) for seed in (1, 1, 2))
    assert np.array_equal(first["first.bias"], again["first.bias"])
    assert not np.array_equal(first["first.bias"], other["first.bias"])
    assert torch.equal(torch.rand(3), expected)


def test_what_is_meant_to_begin_otherwise_is_listed_and_not_passed_over() -> None:
    known = KnownDifference(tensors=("*.kernel",), kind="initialisation", reason="always ported", holds="shapes")
    outcome = climb(port={"build": with_initialisers(nnx.initializers.lecun_normal())}, known=(known,))
    assert not failed(outcome)
    assert outcome.known == (known,)
    (section,) = (s for s in outcome.sections if s.title == "meant to begin otherwise")
    assert {c.tensor for c in section.comparisons} == {"first.kernel", "second.kernel"}

    def nan(key: Any, shape: Any, dtype: Any) -> Any:
        return jnp.full(shape, jnp.nan, dtype)

    outcome = climb(port={"build": with_initialisers(nan)}, known=(known,))
    assert failed(outcome) == {"meant to begin otherwise": {"first.kernel", "second.kernel"}}


def test_two_biases_of_which_the_port_has_the_sum_are_left_out_and_named() -> None:
    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = torch.nn.LSTM(3, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0]

    class RecurrentPort(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.rnn = nnx.RNN(nnx.LSTMCell(3, 4, rngs=rngs))

        def __call__(self, x: Any) -> Any:
            return self.rnn(x)

    known = KnownDifference(tensors=("*",), kind="initialisation", reason="always ported", holds="shapes")
    inputs = {"x": np.zeros((2, 5, 3))}
    outcome = initialisation.climb(Runs(Pair(reference=Recurrent, port=RecurrentPort, inputs=inputs, known=(known,))))
    assert not failed(outcome)
    assert not any("bias" in c.tensor for s in outcome.sections for c in s.comparisons)
    assert "only their sum: rnn.bias_ih_l0, rnn.bias_hh_l0" in " ".join(outcome.notes)


def test_every_statistic_keeps_its_rate_of_false_alarms() -> None:
    """At one in a hundred, of 2,000 comparisons of equal distributions each; and none beyond six standard errors."""
    rng = np.random.default_rng(7)
    tests = (
        statistics.mean_test,
        statistics.scale_test,
        statistics.shape_test,
        statistics.distribution_test,
        statistics.range_test,
    )
    for draw in (rng.uniform, rng.standard_normal):
        for test in tests:
            shares = []
            for _ in range(500):
                a, b = (draw(size=500) for _ in range(2))
                shares.append((test(a, b, false_alarm=0.01).share, test(a, b, false_alarm=1e-8).share))
            small = [test(draw(size=9), draw(size=400), false_alarm=0.01).share > 1.0 for _ in range(300)]
            exact = test in (statistics.distribution_test, statistics.range_test)
            assert np.mean(small) <= 0.03 or not exact, "these two hold for any number of values"
            alarms = np.mean([share > 1.0 for share, _ in shares])
            assert alarms <= 0.03, (test, alarms)
            assert all(share < 1.0 for _, share in shares)


def jnp_zeros(key: Any, shape: Any, dtype: Any) -> Any:
    return jnp.zeros(shape, dtype)
