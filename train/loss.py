"""Label-smoothed cross entropy (paper 5.4; Szegedy et al. 2016)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)
    # A comparison with every class, which fuses into the passes over the logits that are made anyway; a gather's
    # gradient is a scatter into an array of zeros as large as the logits.
    nll = log_normaliser - jnp.where(is_target, logits, 0.0).sum(axis=-1)
    uniform = log_normaliser - logits.mean(axis=-1)
    real = targets != pad_id
    return LossSums(
        loss=jnp.where(real, (1.0 - smoothing) * nll + smoothing * uniform, 0.0).sum(),
        nll=jnp.where(real, nll, 0.0).sum(),
        num_tokens=real.sum(),
    )
