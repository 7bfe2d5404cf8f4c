"""python -m parity check examples/decoder_only/my_port.py

PyTorch is imported only where the reference is built, so that the port can be checked against a golden file on a
machine without it.
"""

from collections.abc import Mapping
from typing import Any

import decoder_flax
import jax.numpy as jnp
import numpy as np
import optax

import parity

VOCAB, PAD = 53, 0


def inputs(seed: int) -> dict[str, np.ndarray]:
    """Three sentences of random ids, two of them padded at the end."""
    ids = np.random.default_rng(seed).integers(1, VOCAB, (3, 10))
    for row, length in enumerate((10, 7, 4)):
        ids[row, length:] = PAD
    return {"ids": ids}


def build_reference() -> Any:
    import decoder_torch

    return decoder_torch.LanguageModel()


def reference_loss(logits: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Sum over the real tokens, and their number."""
    import torch

    targets = inputs["ids"][:, 1:]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, ignore_index=PAD, reduction="sum")
    return loss, (targets != PAD).sum()


def port_loss(logits: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    targets = inputs["ids"][:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], targets)
    real = targets != PAD
    return jnp.where(real, losses, 0.0).sum(), real.sum()


def reference_optimizer(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def pair() -> parity.Pair:
    """What `python -m parity check` looks for."""
    return parity.Pair(
        name="decoder-only language model",
        reference=parity.Side(build=build_reference, loss=reference_loss, optimizer=reference_optimizer),
        port=parity.Side(
            build=decoder_flax.LanguageModel,
            loss=port_loss,
            optimizer=optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1),
        ),
        inputs=inputs,
        mapping=[
            parity.Rule("blocks.{i}.attn.c_attn", "layers.{i}.attention.{q,k,v}"),
        ],
        modules=[
            ("wte", "embedding"),
            ("blocks.{i}", "layers.{i}"),
            ("blocks.{i}.ln_{n}", "layers.{i}.norm{n}"),
            ("blocks.{i}.attn", "layers.{i}.attention"),
            ("blocks.{i}.attn.c_proj", "layers.{i}.attention.out"),
            ("blocks.{i}.mlp", "layers.{i}.feed_forward"),
            ("blocks.{i}.mlp.{part}", "layers.{i}.feed_forward.{part}"),
            ("blocks.{i}.drop", "layers.{i}.drop"),
            ("ln_f", "final_norm"),
            ("lm_head", "head"),
        ],
    )
