"""What a training step changes: step count, parameters, optimizer state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Key

from flax_transformer.parameters import initial_parameters
from train.config import OptimizerConfig, TrainConfig
from train.schedule import make_schedule


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


def make_steps(config: OptimizerConfig, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """The optimizer that `config` names, without clipping."""
    if config.name == "adam":
        return make_adam(config, learning_rate)
    if config.name == "adamw":
        return optax.adamw(
            learning_rate,
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda array: array.ndim > 1, params),
        )
    # Steps in proportion to a parameter's own size would make the learning rate another than the one that is named.
    return optax.adafactor(learning_rate, multiply_by_parameter_scale=False)


def make_optimizer(config: OptimizerConfig, *, d_model: int) -> optax.GradientTransformation:
    """Clipping, if any, then steps at the schedule's rate."""
    steps = make_steps(config, make_schedule(config, d_model=d_model))
    return steps if config.clip_norm is None else optax.chain(make_clipping(config), steps)


def initial_state(config: TrainConfig, key: Key[Array, ""]) -> TrainState:
    """The state before the first step."""
    params = initial_parameters(config.model, key)
    optimizer = make_optimizer(config.optimizer, d_model=config.model.d_model)
    return TrainState(jnp.zeros((), jnp.int32), params, jax.jit(optimizer.init)(params))
