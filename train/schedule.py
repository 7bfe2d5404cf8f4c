"""The Noam learning rate (paper 5.3) as an optax schedule."""

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int


def noam_schedule(*, d_model: int, warmup_steps: int, factor: float = 1.0) -> optax.Schedule:
    """factor · d_model^-½ · min(step^-½, step · warmup_steps^-1½), where the first step is step 1.

    optax counts updates from 0, so the schedule adds one: a first step of rate 0 would be a step lost (P9).

    >>> schedule = noam_schedule(d_model=512, warmup_steps=4000)
    >>> f"{schedule(0):.3e}, {schedule(3999):.3e}"
    '1.747e-07, 6.988e-04'
    """

    def schedule(count: Int[Array, ""] | int) -> Float[Array, ""]:
        step = jnp.asarray(count, jnp.result_type(float)) + 1.0
        return factor * d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5)

    return schedule
