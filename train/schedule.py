"""Learning rates as optax schedules: the paper's (5.3), and what else translation models are trained with."""

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from train.config import OptimizerConfig

Count = Int[Array, ""] | int


def make_schedule(config: OptimizerConfig, *, d_model: int) -> optax.Schedule:
    """The schedule that `config` names. Its argument counts updates from 0, as optax does; the first step is step 1."""
    if config.schedule == "noam":
        return noam_schedule(d_model=d_model, warmup_steps=config.warmup_steps, factor=config.noam_factor)
    assert config.learning_rate is not None, "OptimizerConfig asks for one"
    if config.schedule == "cosine":
        assert config.decay_steps is not None, "OptimizerConfig asks for them"
        return cosine_schedule(
            peak=config.learning_rate,
            warmup_steps=config.warmup_steps,
            decay_steps=config.decay_steps,
            final_share=config.final_share,
        )
    make = {"inverse_sqrt": inverse_sqrt_schedule, "constant": constant_schedule}[config.schedule]
    return make(peak=config.learning_rate, warmup_steps=config.warmup_steps)


def noam_schedule(*, d_model: int, warmup_steps: int, factor: float = 1.0) -> optax.Schedule:
    """factor · d_model^-½ · min(step^-½, step · warmup_steps^-1½), where the first step is step 1.

    optax counts updates from 0, so the schedule adds one: a first step of rate 0 would be a step lost (P9).

    >>> schedule = noam_schedule(d_model=512, warmup_steps=4000)
    >>> f"{schedule(0):.3e}, {schedule(3999):.3e}"
    '1.747e-07, 6.988e-04'
    """

    def schedule(count: Count) -> Float[Array, ""]:
        step = _step(count)
        return factor * d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5)

    return schedule


def inverse_sqrt_schedule(*, peak: float, warmup_steps: int) -> optax.Schedule:
    """peak · min(step / warmup_steps, √(warmup_steps / step)): Noam's shape, its peak given.

    >>> schedule = inverse_sqrt_schedule(peak=5e-4, warmup_steps=4000)
    >>> f"{schedule(0):.3e}, {schedule(3999):.3e}, {schedule(15_999):.3e}"
    '1.250e-07, 5.000e-04, 2.500e-04'
    """

    def schedule(count: Count) -> Float[Array, ""]:
        step = _step(count)
        return peak * jnp.minimum(step / warmup_steps, (warmup_steps / step) ** 0.5)

    return schedule


def cosine_schedule(*, peak: float, warmup_steps: int, decay_steps: int, final_share: float = 0.0) -> optax.Schedule:
    """Linear up to `peak` at step `warmup_steps`, then half a cosine down to `final_share` of it at step `decay_steps`
    (Loshchilov and Hutter 2017, without restarts); from there on constant.

    >>> schedule = cosine_schedule(peak=1e-3, warmup_steps=10, decay_steps=110, final_share=0.1)
    >>> f"{schedule(0):.1e}, {schedule(9):.1e}, {schedule(59):.2e}, {schedule(1000):.1e}"
    '1.0e-04, 1.0e-03, 5.50e-04, 1.0e-04'
    """

    def schedule(count: Count) -> Float[Array, ""]:
        step = _step(count)
        gone = jnp.clip((step - warmup_steps) / (decay_steps - warmup_steps), 0.0, 1.0)
        decayed = final_share + (1.0 - final_share) * 0.5 * (1.0 + jnp.cos(jnp.pi * gone))
        return peak * jnp.where(step < warmup_steps, step / warmup_steps, decayed)

    return schedule


def constant_schedule(*, peak: float, warmup_steps: int) -> optax.Schedule:
    """Linear up to `peak` at step `warmup_steps`, and constant from there on.

    >>> schedule = constant_schedule(peak=1e-3, warmup_steps=4)
    >>> f"{schedule(0):.2e}, {schedule(3):.2e}, {schedule(10**6):.2e}"
    '2.50e-04, 1.00e-03, 1.00e-03'
    """

    def schedule(count: Count) -> Float[Array, ""]:
        return peak * jnp.minimum(_step(count) / warmup_steps, 1.0)

    return schedule


def _step(count: Count) -> Float[Array, ""]:
    return jnp.asarray(count, jnp.result_type(float)) + 1.0
