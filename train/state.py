"""What a training step changes: step count, parameters, optimizer state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from flax_transformer.parameters import fixed_shapes, initial_parameters
from train.config import OptimizerConfig, TrainConfig
from train.schedule import make_schedule

FIRST_LOSS_SCALE = 2.0**15
GROWTH_INTERVAL = 2_000
"""Steps without an overflow after which the loss scale is doubled."""


class LossScale(NamedTuple):
    """Keeps small gradients of float16 above zero: the loss is multiplied by a scale, the gradients divided by it.

    The scale is halved when a gradient overflows, and doubled after `GROWTH_INTERVAL` steps without (Micikevicius et
    al. 2018; T15).
    """

    scale: Float[Array, ""]
    steps_since: Int[Array, ""]
    """Steps since the scale was changed."""
    skipped: Int[Array, ""]
    """Steps, of all so far, that were not applied."""

    def after(self, *, applied: Bool[Array, ""]) -> "LossScale":
        """The scale for the next step."""
        grow = applied & (self.steps_since + 1 >= GROWTH_INTERVAL)
        factor = jnp.where(applied, jnp.where(grow, 2.0, 1.0), 0.5).astype(self.scale.dtype)
        return LossScale(
            scale=self.scale * factor,
            steps_since=jnp.where(grow | ~applied, 0, self.steps_since + 1),
            skipped=self.skipped + ~applied,
        )


class TrainState(NamedTuple):
    """Parameters by name, beside the optimizer's moments and the number of steps taken."""

    step: Int[Array, ""]
    """Steps, those that were not applied too: the number of the next batch."""
    params: dict[str, Array]
    opt_state: optax.OptState
    ema: dict[str, Array] | None = None
    """Moving average of the parameters, where there is one: for inference, never trained on."""
    loss_scale: LossScale | None = None
    """For float16 alone."""
    fixed: dict[str, Array] | None = None
    """What a model has beside its parameters that is not trained, if anything."""

    @property
    def updates(self) -> Int[Array, ""]:
        """Steps that were applied: where the schedule stands."""
        return self.step if self.loss_scale is None else self.step - self.loss_scale.skipped

    @property
    def inference_params(self) -> dict[str, Array]:
        """What is evaluated: the moving average if there is one; and what is not trained."""
        return self.with_fixed(self.params if self.ema is None else self.ema)

    def with_fixed(self, params: dict[str, Any]) -> dict[str, Any]:
        """All that the model is made of: parameters, and what is not trained."""
        return params if self.fixed is None else params | self.fixed


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


def initial_state(config: TrainConfig) -> TrainState:
    """The state before the first step, which depends on config and seed alone."""
    params = initial_parameters(config.model, _keys(config.seed)[0])
    optimizer = make_optimizer(config.optimizer, d_model=config.model.d_model)
    loss_scale = None
    if config.model.dtype == "float16":
        loss_scale = LossScale(jnp.float32(FIRST_LOSS_SCALE), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=jax.jit(optimizer.init)(params),
        ema=None if config.optimizer.ema_decay is None else jax.tree.map(jnp.copy, params),
        loss_scale=loss_scale,
        fixed={name: jnp.zeros(of.shape, of.dtype) for name, of in fixed_shapes(config.model).items()} or None,
    )


def dropout_key(seed: int) -> Key[Array, ""]:
    """What the keys of all steps are folded from."""
    return _keys(seed)[1]


def _keys(seed: int) -> Key[Array, " 2"]:
    return jax.random.split(jax.random.key(seed))
