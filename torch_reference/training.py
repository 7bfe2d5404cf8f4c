"""Loss, learning rate, one training step, and the loop around it (paper 5.3, 5.4)."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from torch_reference.dropout import NO_DROPOUT, DropoutSeed, DropoutSource
from torch_reference.primitives import wide
from torch_reference.transformer import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineDecay:
    """A learning rate that is given, in the place of the paper's. Raises ValueError as `TrainingOptions` does."""

    peak: float
    decay_steps: int
    """The step at which it has reached its end; it rises for `TrainingOptions.warmup_steps`."""
    final_share: float = 0.0
    """Of the peak, at the end."""

    def __post_init__(self) -> None:
        for name in ("peak", "decay_steps"):
            _expect(getattr(self, name) > 0, name, "more than 0", getattr(self, name))
        _expect(0.0 <= self.final_share <= 1.0, "final_share", "a share in [0, 1]", self.final_share)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How a model is trained. Raises ValueError, naming the field, what was expected and what was given."""

    b1: float = 0.9
    """Adam's β₁, β₂ and ε (5.3)."""
    b2: float = 0.98
    eps: float = 1e-9
    noam_factor: float = 1.0
    """Multiplies the paper's learning rate."""
    warmup_steps: int = 4_000
    cosine: CosineDecay | None = None
    """In the place of Noam."""
    label_smoothing: float = 0.1
    """Mass spread evenly over the whole vocabulary (5.4)."""
    clip_norm: float | None = 1.0
    """Global norm to which gradients are scaled down; None leaves them."""
    accumulation_steps: int = 1
    """Micro-batches whose gradients make one step."""
    compile: bool = False
    """Run the model through `torch.compile`."""
    seed: int = 0
    """Of dropout."""

    def __post_init__(self) -> None:
        for name in ("eps", "noam_factor", "warmup_steps", "accumulation_steps"):
            _expect(getattr(self, name) > 0, name, "more than 0", getattr(self, name))
        for name in ("b1", "b2", "label_smoothing"):
            _expect(0.0 <= getattr(self, name) < 1.0, name, "a rate in [0, 1)", getattr(self, name))
        if self.cosine is not None:
            end = self.cosine.decay_steps
            _expect(end > self.warmup_steps, "cosine.decay_steps", f"more than warmup_steps={self.warmup_steps}", end)
        _expect(self.clip_norm is None or self.clip_norm > 0, "clip_norm", "more than 0, or None", self.clip_norm)
        _expect(0 <= self.seed < 2**31, "seed", "an integer in [0, 2**31)", self.seed)


class Batch(NamedTuple):
    """Some pairs of sentences. At each position the model reads `tgt_in` and is to predict `tgt_out`."""

    src: Int[Tensor, "batch src_len"]
    """Source sentences, each ending with EOS."""
    tgt_in: Int[Tensor, "batch tgt_len"]
    """Target sentences behind BOS, without EOS."""
    tgt_out: Int[Tensor, "batch tgt_len"]
    """Target sentences, each ending with EOS."""


class LossSums(NamedTuple):
    """Sums over the real target tokens of a batch: sums, so that any split of a batch adds up to the whole."""

    loss: Float[Tensor, ""]
    """Cross entropy against the smoothed targets, in nats."""
    num_tokens: Int[Tensor, ""]


def label_smoothed_cross_entropy(
    logits: Float[Tensor, "batch length vocab"], targets: Int[Tensor, "batch length"], *, smoothing: float, pad_id: int
) -> LossSums:
    """-Σ_k q_k log softmax(logits)_k, where q = (1 - smoothing) · onehot(target) + smoothing / K over all K classes.

    This is torch's `label_smoothing`: the mass is spread over every class, the target and padding included (P11).
    Positions whose target is pad_id count for nothing. Computed in float32 or better.
    """
    # Not by log_softmax, whose backward pass sums the K weights of q to 1 with a rounding error: near the optimum the
    # gradient is a small difference of probabilities, and that error costs it two decimal places.
    logits = wide(logits)
    log_normaliser = logits.logsumexp(dim=-1)
    of_target = logits.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
    loss = log_normaliser - (1.0 - smoothing) * of_target - smoothing * logits.mean(dim=-1)
    real = targets.ne(pad_id)
    return LossSums(loss.masked_fill(~real, 0.0).sum(), real.sum())


def noam_lr(step: int, *, d_model: int, warmup_steps: int, factor: float = 1.0) -> float:
    """factor · d_model^-½ · min(step^-½, step · warmup_steps^-1½) (paper 5.3), where the first step is step 1.

    Raises ValueError for a step before the first: a first step of rate 0 would be a step lost (P9).
    """
    if step < 1:
        raise ValueError(f"expected steps to be counted from 1, got {step}")
    return factor / math.sqrt(d_model) * min(1.0 / math.sqrt(step), step / warmup_steps**1.5)


def cosine_lr(step: int, *, warmup_steps: int, decay: CosineDecay) -> float:
    """Linear up to the peak at step `warmup_steps`, then half a cosine down to its end (Loshchilov and Hutter 2017)."""
    if step < warmup_steps:
        return decay.peak * step / warmup_steps
    gone = min(1.0, (step - warmup_steps) / (decay.decay_steps - warmup_steps))
    share = (1.0 + math.cos(math.pi * gone)) / 2.0
    return decay.peak * (decay.final_share + (1.0 - decay.final_share) * share)


def learning_rate(step: int, options: TrainingOptions, *, d_model: int) -> float:
    """What the options say, at steps counted from 1."""
    if options.cosine is not None:
        return cosine_lr(step, warmup_steps=options.warmup_steps, decay=options.cosine)
    return noam_lr(step, d_model=d_model, warmup_steps=options.warmup_steps, factor=options.noam_factor)


def make_schedule(optimizer: torch.optim.Optimizer, options: TrainingOptions, *, d_model: int) -> LambdaLR:
    """`learning_rate` for an optimizer whose own is 1. `LambdaLR` counts from 0, so it is given step + 1."""
    return LambdaLR(optimizer, lambda step: learning_rate(step + 1, options, d_model=d_model))


def adam(parameters: Iterable[nn.Parameter], options: TrainingOptions) -> torch.optim.Adam:
    """Adam as in 5.3, without weight decay; its learning rate of 1 is what `make_schedule` multiplies."""
    return torch.optim.Adam(parameters, lr=1.0, betas=(options.b1, options.b2), eps=options.eps)


@torch.no_grad()
def clip_by_global_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Float[Tensor, ""]:
    """Scales all gradients together by min(1, max_norm / norm) and returns the norm they had; None only measures.

    Not `torch.nn.utils.clip_grad_norm_`, which divides by norm + 1e-6 where optax divides by the norm (P8).
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.stack([wide(gradient).square().sum() for gradient in gradients]).sum().sqrt()
    if max_norm is not None:
        scale = (max_norm / norm).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
    return norm


@dataclasses.dataclass
class TrainState:
    """What a training step changes."""

    model: Transformer
    """Holds the parameters; compiled if the options say so."""
    optimizer: torch.optim.Adam
    schedule: LambdaLR
    scaler: torch.amp.GradScaler
    """Scales the loss where the model computes in float16, so that small gradients do not vanish; else does nothing."""
    step: int = 0
    """Steps taken; those skipped because float16 overflowed do not count."""
    micro_batches: int = 0
    """Micro-batches seen; each has dropout masks of its own."""


class StepMetrics(NamedTuple):
    """What one training step reports; the loss in nats a token."""

    loss: float
    num_tokens: int
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    skipped: bool
    """Whether float16 gradients overflowed, and the step was not taken."""


class Evaluation(NamedTuple):
    """How well a model predicts held-out text."""

    nll: float
    """Negative log likelihood of the targets, in nats a token, without smoothing or dropout."""
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """exp(nll), a piece."""
        return math.exp(self.nll)


class History(NamedTuple):
    """Every step of a training run, and the evaluation after every epoch."""

    steps: list[StepMetrics]
    evaluations: list[Evaluation]


def initial_state(model: Transformer, options: TrainingOptions) -> TrainState:
    """The state before the first step.

    Raises ValueError for float16 parameters: they cannot hold Adam's small steps. Parameters stay float32 whatever
    the compute dtype.
    """
    config = model.config
    if config.param_dtype == "float16":
        raise ValueError("expected param_dtype='float32' to train with dtype='float16', got 'float16'")
    optimizer = adam(model.parameters(), options)
    schedule = make_schedule(optimizer, options, d_model=config.d_model)
    device = next(model.parameters()).device
    scaler = torch.amp.GradScaler(device.type, enabled=config.dtype == "float16")
    compiled = cast(Transformer, torch.compile(model)) if options.compile else model
    return TrainState(model=compiled, optimizer=optimizer, schedule=schedule, scaler=scaler)


def resume(state: TrainState, *, step: int, optimizer: Mapping[str, Any]) -> None:
    """Goes on from after `step` steps, with that state dict of Adam; the schedule stands where it would stand."""
    state.optimizer.load_state_dict(dict(optimizer))
    rates = [
        base * factor(step) for base, factor in zip(state.schedule.base_lrs, state.schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    stands = {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates}
    state.schedule.load_state_dict({**state.schedule.state_dict(), **stands})
    state.step = step


def batch_loss(model: Transformer, batch: Batch, *, smoothing: float, dropout: DropoutSource = NO_DROPOUT) -> LossSums:
    """Sums of the loss of one batch."""
    logits = model(batch.src, batch.tgt_in, dropout=dropout)
    return label_smoothed_cross_entropy(logits, batch.tgt_out, smoothing=smoothing, pad_id=model.config.pad_id)


def accumulate_gradients(
    state: TrainState,
    micro_batches: list[Batch],
    options: TrainingOptions,
    *,
    dropout: Sequence[DropoutSource] | None = None,
) -> LossSums:
    """Adds up the gradient of (sum of losses over all micro-batches) / (sum of their tokens), times the scaler's scale.

    Not a mean of means: that would weigh a token by how few others share its micro-batch (T2). `dropout`: where each
    micro-batch's masks come from, if not from the seed.
    """
    # One seed after another: a seed's masks are unrelated to its neighbour's, and runs keep 2³² apart.
    first = options.seed * 2**32 + state.micro_batches
    sources = dropout or [DropoutSeed(first + i) for i in range(len(micro_batches))]
    num_tokens = torch.stack([batch.tgt_out.ne(state.model.config.pad_id).sum() for batch in micro_batches]).sum()
    total = torch.zeros_like(num_tokens, dtype=torch.float64)
    for batch, source in zip(micro_batches, sources, strict=True):
        sums = batch_loss(state.model, batch, smoothing=options.label_smoothing, dropout=source)
        state.scaler.scale(sums.loss / num_tokens.clamp(min=1)).backward()
        total += sums.loss.detach()
        state.micro_batches += 1
    return LossSums(total, num_tokens)


def train_step(
    state: TrainState,
    micro_batches: list[Batch],
    options: TrainingOptions,
    *,
    dropout: Sequence[DropoutSource] | None = None,
) -> StepMetrics:
    """One step of Adam on the mean loss a token of all the micro-batches together; `dropout` as above.

    Raises FloatingPointError, and leaves the parameters as they are, if the loss or a gradient is not finite; float16
    gradients that overflow only skip the step, and the scaler tries a smaller scale next time.
    """
    state.optimizer.zero_grad(set_to_none=True)
    sums = accumulate_gradients(state, micro_batches, options, dropout=dropout)
    state.scaler.unscale_(state.optimizer)  # clipping is about true gradients
    norm = clip_by_global_norm(state.model.parameters(), options.clip_norm)
    loss = float(sums.loss / sums.num_tokens.clamp(min=1))
    if not math.isfinite(loss) or not (state.scaler.is_enabled() or norm.isfinite()):
        raise FloatingPointError(
            f"expected a finite loss and gradient in step {state.step + 1}, got loss {loss}, gradient norm {norm:g}"
        )
    learning_rate, scale = state.schedule.get_last_lr()[0], state.scaler.get_scale()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    skipped = state.scaler.get_scale() < scale
    if not skipped:
        state.step += 1
        state.schedule.step()
    return StepMetrics(loss, int(sums.num_tokens), float(norm), float(learning_rate), skipped)


@torch.no_grad()
def evaluate(model: Transformer, batches: Iterable[Batch]) -> Evaluation:
    """Mean negative log likelihood over all real tokens of all batches.

    Raises ValueError if there is not a single one.
    """
    nll, num_tokens = 0.0, 0
    for batch in batches:
        sums = batch_loss(model, batch, smoothing=0.0)
        nll += float(sums.loss)
        num_tokens += int(sums.num_tokens)
    if num_tokens == 0:
        raise ValueError("expected batches with at least one token that is not padding, got none")
    return Evaluation(nll / num_tokens, num_tokens)


def train(
    model: Transformer,
    batches: Iterable[Batch],
    options: TrainingOptions,
    *,
    num_epochs: int = 1,
    held_out: Iterable[Batch] = (),
) -> History:
    """Trains `model` in place on `batches`, `num_epochs` times over, evaluating on `held_out` after each epoch.

    The last window of an epoch may hold fewer than `accumulation_steps` batches; it makes a step all the same (T2).
    Raises ValueError for an epoch without batches, such as the second one of an iterator that is used up.
    """
    state = initial_state(model, options)
    history = History([], [])
    held_out = list(held_out)
    for epoch in range(num_epochs):
        before = len(history.steps)
        for window in _windows(batches, options.accumulation_steps):
            history.steps.append(train_step(state, window, options))
        if len(history.steps) == before:
            raise ValueError(f"expected at least one batch in epoch {epoch + 1}, got none")
        if held_out:
            history.evaluations.append(evaluate(state.model, held_out))
    return history


def _windows(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    iterator = iter(batches)
    while window := list(itertools.islice(iterator, size)):
        yield window


def _expect(condition: bool, field: str, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"{field}: expected {expected}, got {got!r}")
