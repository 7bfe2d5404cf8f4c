"""Label-smoothed cross entropy (paper 5.4; Szegedy et al. 2016), of logits, or of what they are projected from.

The logits of a batch, tokens x vocabulary, are by far the largest array of a training step. `projected_cross_entropy`
never has more than a share of them at a time: it projects some positions of every row, takes their loss and at once
their gradient, and goes on to the next.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flax_transformer.primitives import wide

FEWEST_PARTS = 4
"""Into which the positions are cut, so that all that is alive of the logits, their gradient included, is less than the
whole of them."""


class LossSums(NamedTuple):
    """Sums over the real target tokens of a batch: sums, so that any split of a batch adds up to the whole."""

    loss: Float[Array, ""]
    """Cross entropy against the smoothed targets, in nats: what is minimised."""
    nll: Float[Array, ""]
    """Negative log likelihood of the targets themselves, in nats: what is reported."""
    num_tokens: Int[Array, ""]


def label_smoothed_cross_entropy(
    logits: Float[Array, "batch length vocab"], targets: Int[Array, "batch length"], *, smoothing: float, pad_id: int
) -> LossSums:
    """-Σ_k q_k log softmax(logits)_k, where q = (1 - smoothing) · onehot(target) + smoothing / K over all K classes.

    This is torch's `label_smoothing`: the mass is spread over every class, the target and padding included (P11).
    Positions whose target is pad_id count for nothing. Computed in float32 or better.
    """
    scores = wide(logits)
    log_normaliser = jax.nn.logsumexp(scores, axis=-1)
    # A comparison with every class, which fuses into the passes over the logits that are made anyway; a gather's
    # gradient is a scatter into an array of zeros as large as the logits.
    nll = log_normaliser - jnp.where(_is_target(scores, targets), scores, 0.0).sum(axis=-1)
    uniform = log_normaliser - scores.mean(axis=-1)
    real = targets != pad_id
    return LossSums(
        loss=jnp.where(real, (1.0 - smoothing) * nll + smoothing * uniform, 0.0).sum(),
        nll=jnp.where(real, nll, 0.0).sum(),
        num_tokens=real.sum(),
    )


def projected_cross_entropy(
    project: Callable[[Float[Array, "batch part d_model"]], Float[Array, "batch part vocab"]],
    hidden: Float[Array, "batch length d_model"],
    targets: Int[Array, "batch length"],
    *,
    smoothing: float,
    pad_id: int,
    tokens_at_once: int,
) -> LossSums:
    """`label_smoothed_cross_entropy` of `project(hidden)`, some positions of all rows at a time.

    `project` may close over parameters: they get their gradients. `nll` has none. About `tokens_at_once` tokens are
    projected together, but never more than a quarter of the batch. The parts are cut across the rows, not between
    them, so that rows may lie on different devices.
    """
    batch, length = targets.shape
    most = max(1, min(tokens_at_once // batch, math.ceil(length / FEWEST_PARTS)))
    # As many as may be, but for what would have to be filled up.
    positions = min(range(most, most // 2, -1), key=lambda positions: -length % positions)
    parts = -(-length // positions)
    padding = parts * positions - length
    cut_hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0))).reshape(batch, parts, positions, -1)
    cut_targets = jnp.pad(targets, ((0, 0), (0, padding)), constant_values=pad_id).reshape(batch, parts, positions)
    cut_hidden, cut_targets = jnp.swapaxes(cut_hidden, 0, 1), jnp.swapaxes(cut_targets, 0, 1)
    converted, closed_over = jax.closure_convert(project, cut_hidden[0])
    loss, nll = _summed(converted, smoothing, pad_id, closed_over, cut_hidden, cut_targets)
    return LossSums(loss=loss, nll=nll, num_tokens=(targets != pad_id).sum())


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _summed(
    project: Callable[..., Array],
    smoothing: float,
    pad_id: int,
    closed_over: Any,
    hidden: Float[Array, "parts batch part d_model"],
    targets: Int[Array, "parts batch part"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    def add(total: Any, part: tuple[Array, Array]) -> tuple[Any, None]:
        sums = label_smoothed_cross_entropy(project(part[0], *closed_over), part[1], smoothing=smoothing, pad_id=pad_id)
        return (total[0] + sums.loss, total[1] + sums.nll), None

    zero = jnp.zeros((), wide(hidden[0, 0, 0, 0]).dtype)
    return jax.lax.scan(add, (zero, zero), (hidden, targets))[0]


def _forward(
    project: Callable[..., Array],
    smoothing: float,
    pad_id: int,
    closed_over: Any,
    hidden: Float[Array, "parts batch part d_model"],
    targets: Int[Array, "parts batch part"],
) -> tuple[tuple[Float[Array, ""], Float[Array, ""]], tuple[Any, Array]]:
    """The sums, and already the gradient of the loss."""

    def add(total: Any, part: tuple[Array, Array]) -> tuple[Any, Array]:
        logits, pull = jax.vjp(project, part[0], *closed_over)
        sums, gradient = _with_gradient(logits, part[1], smoothing=smoothing, pad_id=pad_id)
        of_hidden, *of_closed_over = pull(gradient)
        return jax.tree.map(jnp.add, total, ((sums.loss, sums.nll), of_closed_over)), of_hidden

    zero = jnp.zeros((), wide(hidden[0, 0, 0, 0]).dtype)
    start = ((zero, zero), [jnp.zeros_like(array) for array in closed_over])
    (sums, of_closed_over), of_hidden = jax.lax.scan(add, start, (hidden, targets))
    return sums, (of_closed_over, of_hidden)


def _backward(
    project: Callable[..., Array],
    smoothing: float,
    pad_id: int,
    gradients: tuple[Any, Array],
    outer: tuple[Float[Array, ""], Float[Array, ""]],
) -> tuple[Any, Array, None]:
    of_closed_over, of_hidden = gradients
    scaled = [(gradient * outer[0]).astype(gradient.dtype) for gradient in of_closed_over]
    return scaled, (of_hidden * outer[0]).astype(of_hidden.dtype), None


_summed.defvjp(_forward, _backward)


def _with_gradient(
    logits: Float[Array, "batch length vocab"], targets: Int[Array, "batch length"], *, smoothing: float, pad_id: int
) -> tuple[LossSums, Float[Array, "batch length vocab"]]:
    """The sums, and the gradient of the loss: softmax - (1 - smoothing) · onehot(target) - smoothing / K.

    By hand, because the derivative of a logsumexp keeps its exponentials, which are computed here in passing. And the
    target's logit can be looked up here, because no gradient has to go back through the look-up.
    """
    scores = wide(logits)
    log_normaliser = jax.nn.logsumexp(scores, axis=-1)
    nll = log_normaliser - jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    loss = (1.0 - smoothing) * nll
    if smoothing:
        loss += smoothing * (log_normaliser - scores.mean(axis=-1))
    real = targets != pad_id
    gradient = jnp.exp(scores - log_normaliser[..., None]) - smoothing / scores.shape[-1]
    gradient -= jnp.where(_is_target(scores, targets), 1.0 - smoothing, 0.0)
    sums = LossSums(jnp.where(real, loss, 0.0).sum(), jnp.where(real, nll, 0.0).sum(), real.sum())
    return sums, jnp.where(real[..., None], gradient, 0.0).astype(logits.dtype)


def _is_target(
    scores: Float[Array, "batch length vocab"], targets: Int[Array, "batch length"]
) -> Bool[Array, "batch length vocab"]:
    return jax.lax.broadcasted_iota(targets.dtype, scores.shape, 2) == targets[..., None]
