"""One training step and one evaluation step, as pure functions that know nothing of devices.

A step's batch is a stack of micro-batches. The loss is the sum over all their tokens divided by the number of all
their tokens, so the gradients are the same however the rows are cut, spread or filled up (T1, T2, P7).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from flax_transformer import NO_DROPOUT, DropoutKey, DropoutSource, Packing
from flax_transformer.parameters import abstract_model, with_parameters
from train.config import OptimizerConfig, TrainConfig
from train.loss import LossSums, projected_cross_entropy
from train.schedule import make_schedule
from train.state import TrainState, dropout_key, make_optimizer
from transformer_config import TransformerConfig

T = TypeVar("T")


class Arrays(NamedTuple):
    """A batch on its way into a compiled function: rows of `batching.Batch`, cut into micro-batches."""

    src: Int[Array, "micro batch src_len"]
    tgt_in: Int[Array, "micro batch tgt_len"]
    tgt_out: Int[Array, "micro batch tgt_len"]
    rows: Int[Array, "micro batch"]
    """The number of each row in the whole batch, which its dropout masks are drawn by (T12)."""
    packing: Packing | None = None
    """With the micro-batches on a leading axis too."""

    @classmethod
    def whole(cls, src: Array, tgt_in: Array, tgt_out: Array) -> "Arrays":
        """One micro-batch of all rows."""
        return cls(src[None], tgt_in[None], tgt_out[None], jnp.arange(src.shape[0], dtype=jnp.int32)[None])


class StepMetrics(NamedTuple):
    """What one training step reports; losses in nats a token."""

    step: Int[Array, ""]
    """Counted from 1."""
    loss: Float[Array, ""]
    nll: Float[Array, ""]
    num_tokens: Int[Array, ""]
    grad_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]
    applied: Bool[Array, ""]
    """False if the loss or a gradient was not finite: then parameters and optimizer state are those of before (T13)."""
    loss_scale: Float[Array, ""] | None = None
    """Of this step, where there is one (float16)."""


@dataclasses.dataclass(frozen=True)
class Across:
    """How a step spans devices: not at all, unless `parallel` says otherwise."""

    sum: Callable[[Any], Any] = lambda tree: tree
    """Adds up over the devices what each of them has computed for its own rows."""
    gathered: Callable[[Any], Any] = lambda params: params
    """Whole parameters out of those that are spread."""
    tokens_at_once: int = 512
    """Target tokens, over all devices, whose logits are computed together."""


ONE_PROGRAM = Across()
Update = Callable[[TrainState, Arrays, DropoutSource], tuple[TrainState, StepMetrics]]
TrainStep = Callable[[TrainState, Arrays], tuple[TrainState, StepMetrics]]
EvaluationStep = Callable[[dict[str, Array], Arrays], LossSums]


def make_loss(
    config: TransformerConfig, *, smoothing: float, tokens_at_once: int = ONE_PROGRAM.tokens_at_once
) -> Callable[..., LossSums]:
    """The function (params, micro-batch, dropout) -> sums of losses. The module graph is split once, here (T7)."""
    model = abstract_model(config)

    def loss(params: dict[str, Array], batch: Arrays, dropout: DropoutSource = NO_DROPOUT) -> LossSums:
        module = with_parameters(model, params)
        return projected_cross_entropy(
            module.logits,
            module.hidden(batch.src, batch.tgt_in, dropout=dropout, packing=batch.packing),
            batch.tgt_out,
            smoothing=smoothing,
            pad_id=config.pad_id,
            tokens_at_once=tokens_at_once,
        )

    return loss


def make_update(
    model: TransformerConfig, optimizer: OptimizerConfig, *, smoothing: float, across: Across = ONE_PROGRAM
) -> Update:
    """The function (state, batch, dropout) -> (state, metrics): one step, with dropout masks from whatever source.

    A step whose loss or gradient is not finite changes nothing but the number of steps, and the loss scale.
    """
    loss = make_loss(model, smoothing=smoothing, tokens_at_once=across.tokens_at_once)
    transformation = make_optimizer(optimizer, d_model=model.d_model)
    schedule = make_schedule(optimizer, d_model=model.d_model)

    def update(state: TrainState, batch: Arrays, dropout: DropoutSource) -> tuple[TrainState, StepMetrics]:
        num_tokens = jnp.maximum(across.sum((batch.tgt_out != model.pad_id).sum()), 1)
        scale = 1.0 if state.loss_scale is None else state.loss_scale.scale

        def share(params: dict[str, Array], micro: Arrays) -> tuple[Array, LossSums]:
            sums = loss(across.gathered(state.with_fixed(params)), micro, dropout.for_rows(micro.rows))
            return scale * (sums.loss / num_tokens), sums

        gradients, sums = across.sum(_added_up(share, state.params, batch))
        if state.loss_scale is not None:
            gradients = jax.tree.map(lambda gradient: gradient / scale, gradients)
        mean, grad_norm = sums.loss / num_tokens, optax.tree.norm(gradients)
        applied = jnp.isfinite(mean) & jnp.isfinite(grad_norm)
        updates, opt_state = transformation.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        changed = _averaged(state._replace(params=params, opt_state=opt_state), optimizer)
        kept = jax.tree.map(lambda new, old: jnp.where(applied, new, old), changed, state)
        metrics = StepMetrics(
            step=state.step + 1,
            loss=mean,
            nll=sums.nll / num_tokens,
            num_tokens=sums.num_tokens,
            grad_norm=grad_norm,
            learning_rate=schedule(state.updates),
            applied=applied,
            loss_scale=None if state.loss_scale is None else state.loss_scale.scale,
        )
        loss_scale = None if state.loss_scale is None else state.loss_scale.after(applied=applied)
        return kept._replace(step=state.step + 1, loss_scale=loss_scale), metrics

    return update


def _added_up(share: Callable[..., tuple[Array, T]], params: dict[str, Array], batch: Arrays) -> tuple[Any, T]:
    """Gradient of the sum of `share` over the micro-batches, and the sum of what it returns besides."""
    gradient = jax.grad(share, has_aux=True)
    first = jax.tree.map(lambda array: array[0], batch)
    if batch.rows.shape[0] == 1:
        return gradient(params, first)

    def add(total: Any, micro: Arrays) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(params, micro)), None

    shapes = jax.eval_shape(gradient, params, first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(add, zeros, batch)[0]


def _averaged(state: TrainState, config: OptimizerConfig) -> TrainState:
    """With the moving average moved. Early on it follows closely, so as not to keep what was drawn at the start:
    the decay of step t is at most (1 + t) / (10 + t)."""
    if state.ema is None or config.ema_decay is None:
        return state
    taken = state.updates + 1
    decay = jnp.minimum(config.ema_decay, (1.0 + taken) / (10.0 + taken))
    ema = jax.tree.map(lambda old, new: (decay * old + (1.0 - decay) * new).astype(old.dtype), state.ema, state.params)
    return state._replace(ema=ema)


def make_train_step(config: TrainConfig, *, across: Across = ONE_PROGRAM) -> TrainStep:
    """The function (state, batch) -> (state, metrics). Dropout depends on seed, step and number of the row alone."""
    update = make_update(config.model, config.optimizer, smoothing=config.label_smoothing, across=across)

    def train_step(state: TrainState, batch: Arrays) -> tuple[TrainState, StepMetrics]:
        return update(state, batch, DropoutKey(jax.random.fold_in(dropout_key(config.seed), state.step)))

    return train_step


def make_evaluation_step(
    config: TransformerConfig, *, tokens_at_once: int = ONE_PROGRAM.tokens_at_once
) -> EvaluationStep:
    """The function (params, batch) -> sums of losses without smoothing or dropout; for batches of one micro-batch."""
    loss = make_loss(config, smoothing=0.0, tokens_at_once=tokens_at_once)

    def evaluation_step(params: dict[str, Array], batch: Arrays) -> LossSums:
        return loss(params, jax.tree.map(lambda array: array[0], batch))

    return evaluation_step
