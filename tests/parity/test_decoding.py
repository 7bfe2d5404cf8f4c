"""The twins say the same: greedy decoding with the same weights, in float64, chooses the same ids."""

from typing import Any

import jax
import numpy as np
import pytest
import torch

import flax_transformer.decoding
import torch_reference.decoding
from flax_transformer.parameters import abstract_model, with_parameters
from parity.twins import random_weights
from parity.weights.twins import twin_mapping
from transformer_config import LengthConfig, TransformerConfig

MAX_LEN = 9
ONE_LAYER = {"num_encoder_layers": 1, "num_decoder_layers": 1}
SHARED = {"tie_embeddings": "all", "tgt_vocab_size": 71}

# eos_id is a piece that the random model does say, sooner or later.
VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": {"eos_id": 48},
    "one matrix, pre-norm": {"eos_id": 59, "norm_order": "pre", **SHARED, **ONE_LAYER},
    "window, learned": {"eos_id": 41, "window": 2, "positions": "learned", "position_offset": 2, **ONE_LAYER},
    "blockwise, untied": {"eos_id": 26, "attention": "blockwise", "tie_embeddings": "none", **ONE_LAYER},
    "bos is eos, as in fairseq": {"eos_id": 13, "bos_id": 13, "pad_id": 1, **ONE_LAYER},
    "bos is pad, as in Marian": {"eos_id": 21, "bos_id": 66, "pad_id": 66, **ONE_LAYER},
}

pytestmark = pytest.mark.usefixtures("x64")


def config_of(**changes: Any) -> TransformerConfig:
    return TransformerConfig.tiny(dtype="float64", param_dtype="float64", dropout=0.0, **changes)


def lively_weights(config: TransformerConfig) -> dict[str, np.ndarray]:
    """By the names of the torch reference. Large matrices, because an untrained model mostly repeats one piece."""
    return {
        name: values.astype(np.float64) * (4 if values.ndim > 1 and "embedding" not in name else 1)
        for name, values in random_weights(config, seed=0).items()
    }


def sources(config: TransformerConfig) -> np.ndarray:
    """Twelve sentences, padded on the right, one on the left too; the last one is all padding."""
    src = np.random.default_rng(0).integers(4, 60, (12, 7), dtype=np.int32)
    for row in range(12):
        src[row, 2 + row % 6 :] = config.pad_id
    src[5, :2] = config.pad_id
    src[-1] = config.pad_id
    return src


def torch_greedy(config: TransformerConfig, src: np.ndarray, *, max_len: int) -> np.ndarray:
    module = torch_reference.Transformer(config, generator=torch.Generator().manual_seed(1))
    weights, own = lively_weights(config), dict(module.named_parameters())
    assert own.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(torch.from_numpy(weights[name]))
    return torch_reference.decoding.greedy(module, torch.from_numpy(src), max_len=max_len).numpy()


def flax_greedy(config: TransformerConfig, src: np.ndarray, *, max_len: int) -> np.ndarray:
    params = twin_mapping(tied=config.tie_embeddings == "all").apply(lively_weights(config))
    module = abstract_model(config)

    @jax.jit
    def run(params, src):
        length = LengthConfig(max_len=max_len)
        return flax_transformer.decoding.greedy(with_parameters(module, params), src, config=length).ids[:, 0]

    return np.asarray(run(params, src))


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_of_both_twins(variant):
    config = config_of(**VARIANTS[variant])
    src = sources(config)
    expected, got = (greedy(config, src, max_len=MAX_LEN) for greedy in (torch_greedy, flax_greedy))
    assert got.tolist() == expected.tolist()
    assert (got.dtype, expected.dtype) == (src.dtype, src.dtype)

    assert (got[-1] == config.pad_id).all()  # all padding: over at once
    lengths, ended = set(), 0
    for row in got[:-1]:
        real = row[row != config.pad_id]
        assert (row[len(real) :] == config.pad_id).all()
        assert config.eos_id not in real[:-1]
        assert config.bos_id not in real or config.bos_id == config.eos_id
        assert len(real) == MAX_LEN or real[-1] == config.eos_id
        lengths.add(len(real))
        ended += real[-1] == config.eos_id
    assert len(lengths) > 2, "the test wants sentences that end at different steps"
    assert 0 < ended < 11, "the test wants sentences that end and sentences that do not"


@pytest.mark.parametrize("greedy", [torch_greedy, flax_greedy])
@pytest.mark.parametrize(
    ("changes", "max_len"), [({}, 0), ({}, -1), ({"positions": "learned"}, 34)], ids=["zero", "negative", "beyond"]
)
def test_lengths_that_cannot_be(greedy, changes, max_len):
    """Of 33 rows of a learned table, the 34th does not exist."""
    config = config_of(**ONE_LAYER, **changes)
    with pytest.raises(ValueError, match=rf"expected .*, got .*{max_len}"):
        greedy(config, sources(config), max_len=max_len)
