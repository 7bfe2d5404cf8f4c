"""The pairs that faults are planted in."""

import functools
from typing import Any

from parity.pair import Pair
from transformer_config import TransformerConfig

LAYERS = {"num_encoder_layers": 2, "num_decoder_layers": 2}
"""So few that a check takes seconds; with them six attentions, ten norms, four feed-forward networks."""

CONFIGS: dict[str, dict[str, Any]] = {
    "twins": {"attention_dropout": 0.1, "activation_dropout": 0.1},
    "pre-norm": {"norm_order": "pre", "positions": "learned", "tie_embeddings": "none", "activation": "relu"},
    "blockwise": {
        "attention": "blockwise",
        "window": 3,
        "tie_embeddings": "all",
        "tgt_vocab_size": 71,
        "positions": "concatenated",
    },
}


@functools.cache
def base_pair(name: str, seed: int = 0) -> Pair:
    """Our own twins with one of CONFIGS, or a generic pair."""
    if name in CONFIGS:
        from parity import twins

        return twins.preset_pair(TransformerConfig.tiny(**LAYERS, **CONFIGS[name]), seed=seed, name=name)
    from parity.mutations.generic import generic_pair

    return generic_pair(name, seed=seed)
