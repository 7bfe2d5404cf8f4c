import math

import jax
import numpy as np
import optax
import pytest

from train.config import OptimizerConfig
from train.schedule import make_schedule, noam_schedule
from train.state import make_optimizer


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("step", [1, 2, 399, 400, 401, 10_000])
def test_noam_at_the_steps_that_tables_get_wrong(step):
    """P9: optax counts from 0, the paper from 1."""
    got = noam_schedule(d_model=512, warmup_steps=400, factor=0.5)(step - 1)
    expected = 0.5 * 512**-0.5 * (step * 400**-1.5 if step <= 400 else step**-0.5)
    assert math.isclose(float(got), expected, rel_tol=1e-14)


def test_first_step_moves_and_the_peak_is_at_warmup():
    schedule = noam_schedule(d_model=30, warmup_steps=7)
    rates = [float(schedule(count)) for count in range(20)]
    assert min(rates) > 0
    assert rates.index(max(rates)) == 6


def update(gradients, config):
    optimizer = make_optimizer(config, d_model=30)
    params = jax.tree.map(np.zeros_like, gradients)
    return optimizer.update(gradients, optimizer.init(params), params)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_clipping_is_exact(scale):
    """P8: scaled to max_norm exactly, without torch's 1e-6; seen in Adam's first moment, (1 - b1) · gradient."""
    gradients = {"a": scale * np.arange(1.0, 4.0), "b": scale * np.ones((2, 2))}
    norm = math.sqrt(18) * scale
    _, state = update(gradients, OptimizerConfig(clip_norm=0.5))
    moments = optax.tree.get(state, "mu")
    for name, gradient in gradients.items():
        expected = 0.1 * gradient * (0.5 / norm if norm > 0.5 else 1.0)
        np.testing.assert_allclose(moments[name], expected, rtol=1e-14)
    _, unclipped = update(gradients, OptimizerConfig(clip_norm=None))
    np.testing.assert_allclose(optax.tree.get(unclipped, "mu")["a"], 0.1 * gradients["a"], rtol=1e-14)


@pytest.mark.usefixtures("x64")
def test_first_update_is_the_rate_against_the_sign():
    """Adam's first step is the learning rate whatever the gradient's size; eps is 1e-9 and beside the root."""
    gradients = {"a": np.array([3.0, -2e-3])}
    updates, _ = update(gradients, OptimizerConfig(clip_norm=None, warmup_steps=10))
    rate = 30**-0.5 * 10**-1.5
    expected = -rate * gradients["a"] / (np.abs(gradients["a"]) + 1e-9)
    np.testing.assert_allclose(updates["a"], expected, rtol=1e-12)


PEAK, WARMUP, END = 3e-4, 5, 25


def table(schedule: str, steps: int = 40) -> list[float]:
    """Rates of the first steps."""
    config = OptimizerConfig(
        schedule=schedule,
        learning_rate=PEAK,
        warmup_steps=WARMUP,
        **({"decay_steps": END, "final_share": 0.1} if schedule == "cosine" else {}),
    )
    rates = make_schedule(config, d_model=30)
    return [float(rates(count)) for count in range(steps)]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("schedule", ["inverse_sqrt", "cosine", "constant"])
def test_every_schedule_warms_up_to_its_peak_and_no_step_is_lost(schedule):
    rates = table(schedule)
    assert rates[:WARMUP] == pytest.approx([PEAK * step / WARMUP for step in range(1, WARMUP + 1)], rel=1e-14)
    assert max(rates) == pytest.approx(PEAK, rel=1e-14)


@pytest.mark.usefixtures("x64")
def test_what_comes_after_the_peak():
    behind = range(WARMUP, 40)  # counts, so steps one further
    expected = {
        "inverse_sqrt": [PEAK * math.sqrt(WARMUP / (count + 1)) for count in behind],
        "constant": [PEAK for _ in behind],
        "cosine": [
            PEAK * (0.1 + 0.9 * (1 + math.cos(math.pi * min(1, (count + 1 - WARMUP) / (END - WARMUP)))) / 2)
            for count in behind
        ],
    }
    for schedule, rates in expected.items():
        assert table(schedule)[WARMUP:] == pytest.approx(rates, rel=1e-13), schedule
    assert table("cosine")[-1] == pytest.approx(0.1 * PEAK)


@pytest.mark.usefixtures("x64")
def test_inverse_sqrt_is_noam_with_its_peak_named():
    noam = noam_schedule(d_model=30, warmup_steps=WARMUP)
    peak = float(noam(WARMUP - 1))
    rates = make_schedule(OptimizerConfig(schedule="inverse_sqrt", learning_rate=peak, warmup_steps=WARMUP), d_model=30)
    for count in (0, 3, 4, 5, 100):
        assert math.isclose(float(rates(count)), float(noam(count)), rel_tol=1e-13)


@pytest.mark.usefixtures("x64")
def test_weight_decay_is_decoupled_and_on_matrices_alone():
    config = OptimizerConfig(
        name="adamw", weight_decay=0.1, schedule="constant", learning_rate=1e-2, warmup_steps=1, clip_norm=None
    )
    optimizer = make_optimizer(config, d_model=30)
    params = {"kernel": np.full((2, 3), 2.0), "bias": np.full(3, 2.0)}
    zero = jax.tree.map(np.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -1e-2 * 0.1 * params["kernel"], rtol=1e-14)
    np.testing.assert_array_equal(updates["bias"], 0.0)


def test_adafactor_keeps_a_row_and_a_column_of_a_matrix():
    config = OptimizerConfig(name="adafactor", schedule="inverse_sqrt", learning_rate=1e-2, warmup_steps=10)
    optimizer = make_optimizer(config, d_model=30)
    params = {"kernel": np.zeros((130, 140), np.float32)}
    state = optimizer.init(params)
    kept = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert kept < 130 + 140 + 10
    updates, _ = optimizer.update({"kernel": np.ones((130, 140), np.float32)}, state, params)
    # All gradients alike: each moves by the rate of the first step, against its sign.
    np.testing.assert_allclose(updates["kernel"], -1e-3, rtol=1e-5)
