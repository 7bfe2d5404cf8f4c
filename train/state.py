"""What a training step changes: step count, parameters, optimizer state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Key

from flax_transformer.parameters import initial_parameters
from train.config import OptimizerConfig, TrainConfig
from train.schedule import noam_schedule


class TrainState(NamedTuple):
    """Parameters by name, beside the optimizer's moments and the number of steps taken."""

    step: Int[Array, ""]
    params: dict[str, Array]
    opt_state: optax.OptState


def make_clipping(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping by global norm, without torch's 1e-6 beside the norm (P8)."""
    return optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)


def make_adam(config: OptimizerConfig, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Adam (paper 5.3), without weight decay."""
    return optax.adam(learning_rate, b1=config.b1, b2=config.b2, eps=config.eps)


def make_optimizer(config: OptimizerConfig, *, d_model: int) -> optax.GradientTransformation:
    """Clipping, if any, then Adam with the Noam rate."""
    schedule = noam_schedule(d_model=d_model, warmup_steps=config.warmup_steps, factor=config.noam_factor)
    adam = make_adam(config, schedule)
    return adam if config.clip_norm is None else optax.chain(make_clipping(config), adam)


def initial_state(config: TrainConfig, key: Key[Array, ""]) -> TrainState:
    """The state before the first step."""
    params = initial_parameters(config.model, key)
    optimizer = make_optimizer(config.optimizer, d_model=config.model.d_model)
    return TrainState(jnp.zeros((), jnp.int32), params, jax.jit(optimizer.init)(params))
