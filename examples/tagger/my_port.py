"""python -m parity check examples/tagger/my_port.py

The least a pair needs: two builders and inputs. torch's LSTM has two biases a gate and Flax's one: a known difference,
which the report names; everything that should hold in spite of it is compared.
"""

from typing import Any

import numpy as np
import tagger_flax
from flax import nnx

import parity


def build_reference() -> Any:
    import tagger_torch

    return tagger_torch.Tagger()


def pair() -> parity.Pair:
    """What `python -m parity check` looks for."""
    return parity.Pair(
        name="recurrent tagger",
        reference=build_reference,
        port=lambda: tagger_flax.Tagger(rngs=nnx.Rngs(0)),
        inputs=lambda seed: {"ids": np.random.default_rng(seed).integers(0, 41, (3, 8))},
    )
