"""The torch reference's side of our own pair; imported only where torch is installed."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

import torch_reference
from parity.pair import Precision, Side, Training
from parity.twins import decoded_beam, has_reference, in_precision
from parity.twins_sites import RecordedSites, Sites
from torch_reference import training as reference_training
from torch_reference.beam import beam_search as torch_beam_search
from torch_reference.decoding import greedy as torch_greedy
from train.config import OptimizerConfig
from transformer_config import BeamConfig, TransformerConfig


def side(config: TransformerConfig, optimizer: OptimizerConfig, *, smoothing: float) -> Side:
    """What the torch reference brings to a pair."""
    options = training_options(optimizer, smoothing=smoothing)
    sites = Sites(config, _reference_sites)

    def build(precision: Precision, seed: int = 0) -> torch_reference.Transformer:
        return torch_reference.Transformer(
            in_precision(config, precision), generator=torch.Generator().manual_seed(seed)
        )

    def loss(logits: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        sums = reference_training.label_smoothed_cross_entropy(
            logits, inputs["tgt_out"], smoothing=smoothing, pad_id=config.pad_id
        )
        return sums.loss, sums.num_tokens

    def clip(gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parameters = {name: torch.nn.Parameter(torch.zeros_like(gradient)) for name, gradient in gradients.items()}
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].clone()
        reference_training.clip_by_global_norm(parameters.values(), optimizer.clip_norm)
        return {name: cast(torch.Tensor, parameter.grad) for name, parameter in parameters.items()}

    def step(state: Any, inputs: Mapping[str, Any], masks: Mapping[str, Any]) -> tuple[Any, float]:
        batch = reference_training.Batch(inputs["src"], inputs["tgt_in"], inputs["tgt_out"])
        dropout = [torch_reference.DropoutMasks(masks)]
        return state, reference_training.train_step(state, [batch], options, dropout=dropout).loss

    return Side(
        build=build,
        call=lambda module, inputs: module(inputs["src"], inputs["tgt_in"]),
        loss=loss,
        draw_dropout=lambda module, inputs, seed: sites.draw(inputs, torch_reference.DropoutSeed(seed)),
        dropout_rates=lambda module, inputs: sites.rates(inputs),
        call_with_dropout=lambda module, inputs, masks: module(
            inputs["src"], inputs["tgt_in"], dropout=torch_reference.DropoutMasks(masks)
        ),
        clip=clip,
        optimizer=lambda parameters: reference_training.adam(parameters, options),
        schedule=lambda step: reference_training.learning_rate(step, options, d_model=config.d_model),
        training=Training(
            start=lambda module: reference_training.initial_state(module, options),
            step=step,
            parameters=lambda state: dict(state.model.named_parameters()),
        ),
        decode=lambda module, inputs: _decoded(module, inputs["src"], beam=decoded_beam(config)),
    )


def _decoded(module: torch_reference.Transformer, src: torch.Tensor, *, beam: BeamConfig) -> dict[str, torch.Tensor]:
    found = torch_beam_search(module, src, config=beam)
    return {
        "ids": torch_greedy(module, src, max_len=beam.max_len),
        "beam_ids": found.ids,
        "beam_scores": found.scores.masked_fill(found.lengths == 0, 0.0),
    }


def initial_weights(config: TransformerConfig, *, seed: int) -> dict[str, np.ndarray]:
    """Initial weights of the torch reference in float32, with noise on biases, norms and what is not trained.

    At their initial 0 and 1 two biases that were exchanged would look alike.
    """
    generator = torch.Generator().manual_seed(seed)
    config = config.replace(dtype="float32", param_dtype="float32")
    module = torch_reference.Transformer(config, generator=generator)
    fixed = dict(module.named_buffers())
    weights = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        values = tensor.detach()
        if values.ndim == 1 or name in fixed:
            values = values + 0.1 * torch.randn(values.shape, generator=generator)
        weights[name] = values.numpy()
    return weights


def _reference_sites(config: TransformerConfig, shapes: tuple[tuple[int, ...], ...], recorder: RecordedSites) -> None:
    module = torch_reference.Transformer(config, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        module(*(torch.full(shape, config.eos_id, dtype=torch.int32) for shape in shapes), dropout=recorder)


def training_options(optimizer: OptimizerConfig, *, smoothing: float) -> reference_training.TrainingOptions:
    """The trainer's options in the reference's words.

    Raises ValueError for an optimizer or schedule that the reference, which is the paper's, does not have.
    """
    if not has_reference(optimizer):
        raise ValueError(
            "expected optimizer.name='adam' and optimizer.schedule='noam' or 'cosine', which the torch reference has, "
            f"got {optimizer.name!r} and {optimizer.schedule!r}"
        )
    cosine = None
    if optimizer.schedule == "cosine":
        assert optimizer.learning_rate is not None, "OptimizerConfig asks for it"
        assert optimizer.decay_steps is not None, "OptimizerConfig asks for them"
        cosine = reference_training.CosineDecay(
            peak=optimizer.learning_rate, decay_steps=optimizer.decay_steps, final_share=optimizer.final_share
        )
    return reference_training.TrainingOptions(
        b1=optimizer.b1,
        b2=optimizer.b2,
        eps=optimizer.eps,
        noam_factor=optimizer.noam_factor,
        warmup_steps=optimizer.warmup_steps,
        cosine=cosine,
        clip_norm=optimizer.clip_norm,
        label_smoothing=smoothing,
    )
