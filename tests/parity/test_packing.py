"""The twins agree on packed rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import flax_transformer
import torch_reference
from flax_transformer.parameters import abstract_model, with_parameters
from parity import twins
from parity.compare import relative_error
from parity.weights.twins import twin_mapping
from transformer_config import TransformerConfig

SRC_SEGMENTS = [[1, 1, 1, 2, 2, 2, 2, 0, 0], [1, 2, 2, 2, 3, 3, 3, 3, 3], [1, 1, 1, 1, 1, 1, 0, 0, 0]]
TGT_SEGMENTS = [[1, 1, 2, 2, 2, 3, 0], [1, 1, 1, 2, 3, 3, 3], [1, 1, 1, 1, 0, 0, 0]]
"""Of the first row, the third pair has no source at all: its queries find no key (P17)."""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_order": "pre", "window": 2, "positions": "learned"},
        {"attention": "blockwise", "attention_block_size": 4, "window": 3},
        {"attention": "blockwise", "attention_block_size": 2, "positions": "concatenated"},
    ],
    ids=str,
)
def test_the_twins_agree_on_packed_rows(changes: dict[str, Any]) -> None:
    config = TransformerConfig.tiny(
        num_encoder_layers=1, num_decoder_layers=1, dtype="float64", param_dtype="float64", **changes
    )
    weights = twins.random_weights(config, seed=5)
    segments = [np.array(x) for x in (SRC_SEGMENTS, TGT_SEGMENTS)]
    rng = np.random.default_rng(6)
    src, tgt = (np.where(x != 0, rng.integers(4, 60, x.shape), config.pad_id) for x in segments)

    reference = torch_reference.Transformer(config, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name].astype(np.float64)))
        packing = torch_reference.Packing(*map(torch.from_numpy, segments))
        expected = reference(torch.from_numpy(src), torch.from_numpy(tgt), packing=packing).numpy()
        unpacked = reference(torch.from_numpy(src), torch.from_numpy(tgt)).numpy()

    with jax.enable_x64(True):
        params = {n: jnp.asarray(w, jnp.float64) for n, w in twin_mapping(tied=False).apply(weights).items()}
        port = with_parameters(abstract_model(config), params)
        packing = flax_transformer.Packing(*map(jnp.asarray, segments))
        got = jax.jit(lambda s, t, p: port(s, t, packing=p))(jnp.asarray(src), jnp.asarray(tgt), packing)
    assert relative_error(np.asarray(got), expected) < 1e-13
    assert relative_error(unpacked, expected) > 1e-2, "packing changed nothing"
