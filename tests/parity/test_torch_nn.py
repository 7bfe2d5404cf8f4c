"""An independent witness: the torch twin, ported to `torch.nn.Transformer`, gives the same outputs."""

from typing import Any

import numpy as np
import pytest
import torch

import torch_reference
from parity import twins
from parity.weights.mapping import Rule, WeightMapping
from parity.weights.rules import Fuse
from torch_reference.masks import AttentionMask
from transformer_config import TransformerConfig

TO_TORCH_NN = WeightMapping(
    [
        Rule("{path*}.self_attn.{q,k,v}_proj.{leaf}", "{path*}.self_attn.in_proj_{leaf}", (Fuse(3),)),
        Rule("{path*}.cross_attn.{q,k,v}_proj.{leaf}", "{path*}.multihead_attn.in_proj_{leaf}", (Fuse(3),)),
        Rule("{path*}.self_attn.out_proj.{leaf}", "{path*}.self_attn.out_proj.{leaf}"),
        Rule("{path*}.cross_attn.out_proj.{leaf}", "{path*}.multihead_attn.out_proj.{leaf}"),
        Rule("{path*}.feed_forward.linear{n}.{leaf}", "{path*}.linear{n}.{leaf}"),
        Rule("{path*}.norm{n}.{leaf}", "{path*}.norm{n}.{leaf}"),
        Rule("{stack}.final_norm.{leaf}", "{stack}.norm.{leaf}"),
    ]
)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # torch's constructor leaves no way to say no
@pytest.mark.parametrize("norm_order", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_torch_nn_transformer_agrees(norm_order: Any, activation: Any) -> None:
    config = TransformerConfig.tiny(
        norm_order=norm_order, activation=activation, dtype="float64", param_dtype="float64"
    )
    twin = torch_reference.Transformer(config, generator=torch.Generator().manual_seed(0))
    weights = {name: array.astype(np.float64) for name, array in twins.random_weights(config, seed=5).items()}
    twin.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})

    witness = torch.nn.Transformer(
        d_model=config.d_model,
        nhead=config.num_heads,
        num_encoder_layers=config.num_encoder_layers,
        num_decoder_layers=config.num_decoder_layers,
        dim_feedforward=config.d_ff,
        dropout=0.0,
        activation=activation,
        layer_norm_eps=config.norm_eps,
        batch_first=True,
        norm_first=norm_order == "pre",
        dtype=torch.float64,
    )
    if norm_order == "post":
        # torch adds a norm after post-norm stacks; the paper has none (P13).
        witness.encoder.norm = witness.decoder.norm = None
    stacks = {name: array for name, array in weights.items() if name.split(".")[0] in ("encoder", "decoder")}
    expected = {name: parameter.detach().numpy() for name, parameter in witness.named_parameters()}
    ported = TO_TORCH_NN.apply(stacks, expected=expected)
    witness.load_state_dict({name: torch.from_numpy(array) for name, array in ported.items()})

    batch = twins.random_batch(config, seed=5)
    src, tgt = torch.from_numpy(batch["src"]), torch.from_numpy(batch["tgt_in"])
    src_real, tgt_real = src != config.pad_id, tgt != config.pad_id
    x = twin.src_embedding(src) + twin.src_positions(src.shape[1])
    y = twin.tgt_embedding(tgt) + twin.tgt_positions(tgt.shape[1])
    memory = twin.encoder(x, mask=AttentionMask(keys=src_real)).hidden
    hidden = twin.decoder(
        y, memory, mask=AttentionMask(keys=tgt_real, causal=True), memory_mask=AttentionMask(keys=src_real)
    ).hidden

    # torch's masks are True where attention is forbidden. It stays in training mode, with a dropout of 0: its fast
    # path for evaluation changes what stands at padded positions (P18).
    future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
    their_memory = witness.encoder(x, src_key_padding_mask=~src_real)
    their_hidden = witness.decoder(
        y, their_memory, tgt_mask=future, tgt_key_padding_mask=~tgt_real, memory_key_padding_mask=~src_real
    )
    torch.testing.assert_close(memory, their_memory, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(hidden, their_hidden, rtol=0.0, atol=1e-12)
