"""One training step and one evaluation step, as pure functions that know nothing of devices."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from flax_transformer import NO_DROPOUT, DropoutKey, DropoutSource
from flax_transformer.parameters import abstract_model, with_parameters
from train.config import OptimizerConfig, TrainConfig
from train.loss import LossSums, label_smoothed_cross_entropy
from train.schedule import make_schedule
from train.state import TrainState, make_optimizer
from transformer_config import TransformerConfig


class Arrays(NamedTuple):
    """A batch on its way into a compiled function; the fields are those of `batching.Batch`."""

    src: Int[Array, "batch src_len"]
    tgt_in: Int[Array, "batch tgt_len"]
    tgt_out: Int[Array, "batch tgt_len"]


class StepMetrics(NamedTuple):
    """What one training step reports; losses in nats a token."""

    step: Int[Array, ""]
    """Counted from 1."""
    loss: Float[Array, ""]
    nll: Float[Array, ""]
    num_tokens: Int[Array, ""]
    grad_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]


Update = Callable[[TrainState, Arrays, DropoutSource], tuple[TrainState, StepMetrics]]
TrainStep = Callable[[TrainState, Arrays, Array], tuple[TrainState, StepMetrics]]
EvaluationStep = Callable[[dict[str, Array], Arrays], LossSums]


def make_loss(config: TransformerConfig, *, smoothing: float) -> Callable[..., LossSums]:
    """The function (params, batch, dropout) -> sums of losses. The module graph is split once, here."""
    model = abstract_model(config)

    def loss(params: dict[str, Array], batch: Arrays, dropout: DropoutSource = NO_DROPOUT) -> LossSums:
        logits = with_parameters(model, params)(batch.src, batch.tgt_in, dropout=dropout)
        return label_smoothed_cross_entropy(logits, batch.tgt_out, smoothing=smoothing, pad_id=config.pad_id)

    return loss


def make_update(model: TransformerConfig, optimizer: OptimizerConfig, *, smoothing: float) -> Update:
    """The function (state, batch, dropout) -> (state, metrics): one step, with dropout masks from whatever source.

    The gradient is that of the sum of losses divided by the number of tokens, whatever the padding (T1).
    """
    loss = make_loss(model, smoothing=smoothing)
    transformation = make_optimizer(optimizer, d_model=model.d_model)
    schedule = make_schedule(optimizer, d_model=model.d_model)

    def mean_loss(params: dict[str, Array], batch: Arrays, dropout: DropoutSource) -> tuple[Array, LossSums]:
        sums = loss(params, batch, dropout)
        return sums.loss / jnp.maximum(sums.num_tokens, 1), sums

    def update(state: TrainState, batch: Arrays, dropout: DropoutSource) -> tuple[TrainState, StepMetrics]:
        (mean, sums), gradients = jax.value_and_grad(mean_loss, has_aux=True)(state.params, batch, dropout)
        updates, opt_state = transformation.update(gradients, state.opt_state, state.params)
        metrics = StepMetrics(
            step=state.step + 1,
            loss=mean,
            nll=sums.nll / jnp.maximum(sums.num_tokens, 1),
            num_tokens=sums.num_tokens,
            grad_norm=optax.tree.norm(gradients),
            learning_rate=schedule(state.step),
        )
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state), metrics

    return update


def make_train_step(config: TrainConfig) -> TrainStep:
    """The function (state, batch, key) -> (state, metrics); the key is folded with the step: one key serves a run."""
    update = make_update(config.model, config.optimizer, smoothing=config.label_smoothing)

    def train_step(state: TrainState, batch: Arrays, key: Key[Array, ""]) -> tuple[TrainState, StepMetrics]:
        return update(state, batch, DropoutKey(jax.random.fold_in(key, state.step)))

    return train_step


def make_evaluation_step(config: TransformerConfig) -> EvaluationStep:
    """The function (params, batch) -> sums of losses without smoothing or dropout."""
    loss = make_loss(config, smoothing=0.0)

    def evaluation_step(params: dict[str, Array], batch: Arrays) -> LossSums:
        return loss(params, batch)

    return evaluation_step
