"""Faults of the loss, of clipping, the optimizer, the learning rate and the training step."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from parity.mutations.planting import Kind, in_side, with_side
from parity.pair import Pair

B1, B2, EPS = 0.9, 0.98, 1e-9
"""Adam's, as in the paper."""
SMOOTHING = 0.1


def _of_token(logits: Any, targets: Any, *, smoothing: float, others: str = "all", pad_id: int = 0) -> Any:
    """The smoothed cross entropy of every position: -Σ q log p, its mass spread over `others`."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), axis=-1)
    of_target = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    spread, classes = log_p.sum(axis=-1), log_p.shape[-1]
    if others != "all":
        spread, classes = spread - of_target, classes - 1
    if others == "no target, no padding":
        spread, classes = spread - log_p[..., pad_id], classes - 1
    return -(1.0 - smoothing) * of_target - smoothing * spread / classes


def _loss(**options: Any) -> Callable[[Any], Any]:
    """Another loss of the real tokens, as (sum, number)."""

    def change(original: Any) -> Any:
        def loss(logits: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
            targets = inputs["tgt_out"]
            real = targets != 0
            return jnp.where(real, _of_token(logits, targets, **options), 0.0).sum(), real.sum()

        return loss

    return change


def _with_padding(original: Any) -> Any:
    def loss(logits: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        every = _of_token(logits, inputs["tgt_out"], smoothing=SMOOTHING)
        return every.sum(), jnp.asarray(every.size)

    return loss


def _over_all_positions(original: Any) -> Any:
    """Padding's loss is 0, and its positions are counted."""
    return lambda logits, inputs: (original(logits, inputs)[0], jnp.asarray(inputs["tgt_out"].size))


def _sum(original: Any) -> Any:
    return lambda logits, inputs: (original(logits, inputs)[0], jnp.ones((), jnp.int32))


def _mean_of_sentences(original: Any) -> Any:
    def loss(logits: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        targets = inputs["tgt_out"]
        real = targets != 0
        losses = jnp.where(real, _of_token(logits, targets, smoothing=SMOOTHING), 0.0).sum(axis=-1)
        return (losses / jnp.maximum(real.sum(axis=-1), 1)).sum(), jnp.asarray(len(targets))

    return loss


def _mean_of_devices(original: Any) -> Any:
    """The mean of a device, given as if it were the sum of one token: over several devices a mean of means."""

    def loss(logits: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        total, weight = original(logits, inputs)
        return total / weight, jnp.ones((), jnp.int32)

    return loss


def _targets_shifted(original: Any) -> Any:
    def loss(logits: Any, inputs: Mapping[str, Any]) -> Any:
        return original(logits, {**inputs, "tgt_out": jnp.roll(inputs["tgt_out"], 1, axis=1)})

    return loss


def _half_width(original: Any) -> Any:
    return lambda logits, inputs: original(logits.astype(jnp.bfloat16).astype(logits.dtype), inputs)


def _norm(gradients: Mapping[str, Any]) -> Any:
    return jnp.sqrt(sum(jnp.square(g).sum() for g in gradients.values()))


def _clip_with_eps(original: Any) -> Any:
    """torch's max_norm / (norm + 1e-6)."""

    def clip(gradients: Mapping[str, Any]) -> Mapping[str, Any]:
        norm = _norm(gradients)
        clipped = original(gradients)
        scaled = _norm(clipped) < norm * (1 - 1e-12)
        return {name: jnp.where(scaled, g * (norm / (norm + 1e-6)), g) for name, g in clipped.items()}

    return clip


def _clip_each(original: Any) -> Any:
    return lambda gradients: {name: original({name: g})[name] for name, g in gradients.items()}


def _clip_values(original: Any) -> Any:
    return lambda gradients: {name: jnp.clip(g, -0.5, 0.5) for name, g in gradients.items()}


def _clip_always(original: Any) -> Any:
    """Scaled up to the norm too."""
    return lambda gradients: original({name: g * 1e9 for name, g in gradients.items()})


def _adam(**options: Any) -> Callable[[Any], Any]:
    return lambda original: optax.adam(1.0, **({"b1": B1, "b2": B2, "eps": EPS} | options))


def _then(*more: optax.GradientTransformation) -> Callable[[Any], Any]:
    return lambda original: optax.chain(original, *more)


def _first(*more: optax.GradientTransformation) -> Callable[[Any], Any]:
    return lambda original: optax.chain(*more, original)


def _no_bias_correction(original: Any) -> Any:
    def init(params: Any) -> Any:
        return optax.EmptyState(), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        _, mean, square = state
        mean = jax.tree.map(lambda m, g: B1 * m + (1 - B1) * g, mean, gradients)
        square = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g * g, square, gradients)
        return jax.tree.map(lambda m, v: -m / (jnp.sqrt(v) + EPS), mean, square), (state[0], mean, square)

    return optax.GradientTransformation(init, update)


def _forgets(original: Any) -> Any:
    """The state of a step is lost, as where jit drops what a module changes in itself."""

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        return original.update(gradients, state, params)[0], state

    return optax.GradientTransformation(original.init, update)


def _trained_names(pair: Pair) -> list[str]:
    from parity.mutations.planting import explicit_rules

    if pair.port.optimizer is None:
        return []
    return [rule.targets[0].text for rule in explicit_rules(pair)[0]]


def _left_out(pair: Pair, place: str) -> Pair:
    original = pair.port.optimizer

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        updates, state = original.update(gradients, state, params)
        return {**updates, place: jnp.zeros_like(updates[place])}, state

    return with_side(pair, optimizer=optax.GradientTransformation(original.init, update))


def _schedule(change: Callable[[Any, int], Any]) -> Callable[[Any], Any]:
    return lambda original: lambda step: change(original, step)


def _optimizer(name: str, description: str, change: Callable[[Any], Any], **fields: Any) -> Kind:
    return in_side(name, description, "optimizer", change, **fields)


def _rate(name: str, description: str, change: Callable[[Any, int], Any], **fields: Any) -> Kind:
    return in_side(name, description, "schedule", _schedule(change), cases=("P9",), **fields)


def _of_loss(name: str, description: str, change: Callable[[Any], Any], **fields: Any) -> Kind:
    return in_side(name, description, "loss", change, **fields)


KINDS: tuple[Kind, ...] = (
    _of_loss(
        "smoothing over K - 1", "none for the target", _loss(smoothing=SMOOTHING, others="no target"), cases=("P11",)
    ),
    _of_loss(
        "smoothing over K - 2",
        "none for the target, none for padding",
        _loss(smoothing=SMOOTHING, others="no target, no padding"),
        cases=("P11",),
    ),
    _of_loss("smoothing left out", "plain cross entropy", _loss(smoothing=0.0), cases=("P11",)),
    _of_loss("padding in the loss", "its targets count", _with_padding, cases=("P7",)),
    _of_loss("mean over padding too", "a mean of all positions", _over_all_positions, cases=("P7",)),
    _of_loss("loss summed", "not divided", _sum, cases=("P7",)),
    _of_loss("mean of sentences' means", "short ones weigh more", _mean_of_sentences, cases=("P7",)),
    _of_loss(
        "mean of devices' means",
        "a device with fewer tokens weighs more",
        _mean_of_devices,
        cases=("P7",),
        rungs=("modes",),  # on one device it is no fault
    ),
    _of_loss("targets shifted", "by one position", _targets_shifted),
    _of_loss("loss in bfloat16", "logits rounded first", _half_width, cases=("P6",)),
    in_side("clipping with 1e-6", "max_norm / (norm + 1e-6)", "clip", _clip_with_eps, cases=("P8",)),
    in_side("clipping tensor by tensor", "no global norm", "clip", _clip_each, cases=("P8",)),
    in_side("clipping values", "each entry for itself", "clip", _clip_values, cases=("P8",)),
    in_side("clipping left out", "gradients as they are", "clip", lambda original: dict, cases=("P8",)),
    in_side("clipping scales up", "small gradients too", "clip", _clip_always, cases=("P8",)),
    _optimizer("Adam's eps", "1e-8 for 1e-9", _adam(eps=1e-8)),
    _optimizer("Adam's eps inside the root", "√(v + eps)", _adam(eps=0.0, eps_root=EPS)),
    _optimizer("Adam's beta 2", "0.999 for 0.98", _adam(b2=0.999)),
    _optimizer("Adam's beta 1", "0.95 for 0.9", _adam(b1=0.95)),
    _optimizer("Adam without bias correction", "small first steps", _no_bias_correction),
    _optimizer("Nesterov's momentum", "in Adam", _adam(nesterov=True)),
    _optimizer("weight decay as L2", "inside the gradient", _first(optax.add_decayed_weights(0.01)), cases=("P10",)),
    _optimizer("weight decay decoupled", "AdamW for Adam", _then(optax.add_decayed_weights(-0.01)), cases=("P10",)),
    _optimizer("Adam's state lost", "every step is a first one", _forgets, cases=("P25",)),
    _optimizer("update scaled", "by 1.001", _then(optax.scale(1.001))),
    Kind(
        name="parameter never updated",
        description="left out of the optimizer",
        places=_trained_names,
        plant=_left_out,
        cases=("P25",),
    ),
    _rate("first step of rate 0", "steps counted from 0", lambda rate, step: rate(step - 1) if step > 1 else 0.0),
    _rate("first step repeated", "one step late", lambda rate, step: rate(max(1, step - 1))),
    _rate("rate one step early", "counted one too far", lambda rate, step: rate(step + 1)),
    _rate("no warm-up", "the root from the start", lambda rate, step: rate(1_000_000) * (1_000_000 / step) ** 0.5),
    _rate("rate doubled", "a factor of 2", lambda rate, step: 2 * rate(step)),
)
