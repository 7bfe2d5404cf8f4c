"""Label-smoothed cross entropy (paper 5.4; Szegedy et al. 2016)."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flax_transformer.primitives import wide


class LossSums(NamedTuple):
    """Sums over the real target tokens of a batch: sums, so that any split of a batch adds up to the whole."""

    loss: Float[Array, ""]
    """Cross entropy against the smoothed targets, in nats: what is minimised."""
    nll: Float[Array, ""]
    """Negative log likelihood of the targets themselves, in nats: what is reported."""
    num_tokens: Int[Array, ""]


class _Residuals(NamedTuple):
    logits: Float[Array, "batch length vocab"]
    log_normaliser: Float[Array, "batch length"]
    targets: Int[Array, "batch length"]


def label_smoothed_cross_entropy(
    logits: Float[Array, "batch length vocab"], targets: Int[Array, "batch length"], *, smoothing: float, pad_id: int
) -> LossSums:
    """-Σ_k q_k log softmax(logits)_k, where q = (1 - smoothing) · onehot(target) + smoothing / K over all K classes.

    This is torch's `label_smoothing`: the mass is spread over every class, the target and padding included (P11).
    Positions whose target is pad_id count for nothing. Computed in float32 or better.
    """
    loss, nll = _summed(smoothing, pad_id, logits, targets)
    return LossSums(loss=loss, nll=nll, num_tokens=(targets != pad_id).sum())


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(
    smoothing: float, pad_id: int, logits: Float[Array, "batch length vocab"], targets: Int[Array, "batch length"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    return _forward(smoothing, pad_id, logits, targets)[0]


def _forward(
    smoothing: float, pad_id: int, logits: Float[Array, "batch length vocab"], targets: Int[Array, "batch length"]
) -> tuple[tuple[Float[Array, ""], Float[Array, ""]], _Residuals]:
    scores = wide(logits)
    log_normaliser = jax.nn.logsumexp(scores, axis=-1)
    # A comparison with every class, which fuses into the passes over the logits that are made anyway; a gather's
    # gradient is a scatter into an array of zeros as large as the logits.
    nll = log_normaliser - jnp.where(_is_target(scores, targets), scores, 0.0).sum(axis=-1)
    uniform = log_normaliser - scores.mean(axis=-1)
    real = targets != pad_id
    loss = jnp.where(real, (1.0 - smoothing) * nll + smoothing * uniform, 0.0).sum()
    return (loss, jnp.where(real, nll, 0.0).sum()), _Residuals(logits, log_normaliser, targets)


def _backward(
    smoothing: float, pad_id: int, residuals: _Residuals, gradients: tuple[Float[Array, ""], Float[Array, ""]]
) -> tuple[Float[Array, "batch length vocab"], None]:
    # By hand, because the derivative of a logsumexp keeps its exponentials: a second array as large as the logits.
    # Here the gradient takes the place of the logits themselves.
    logits, log_normaliser, targets = residuals
    loss, nll = gradients
    scores = wide(logits)
    real = (targets != pad_id)[..., None]
    softmax = jnp.exp(scores - log_normaliser[..., None])
    on_target = _is_target(scores, targets)
    # d loss = softmax - (1 - smoothing) onehot - smoothing / K; d nll = softmax - onehot.
    gradient = (loss + nll) * softmax - loss * (smoothing / scores.shape[-1])
    gradient -= jnp.where(on_target, loss * (1.0 - smoothing) + nll, 0.0)
    return jnp.where(real, gradient, 0.0).astype(logits.dtype), None


def _is_target(
    scores: Float[Array, "batch length vocab"], targets: Int[Array, "batch length"]
) -> Bool[Array, "batch length vocab"]:
    return jax.lax.broadcasted_iota(targets.dtype, scores.shape, 2) == targets[..., None]


_summed.defvjp(_forward, _backward)
