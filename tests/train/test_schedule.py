import math

import jax
import numpy as np
import optax
import pytest

from train.config import OptimizerConfig
from train.schedule import noam_schedule
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
