"""python -m parity check examples/tagger/my_port.py

The least a pair needs: two builders and inputs; and a word on initialisation, which the port leaves to Flax.

torch's LSTM has two biases a gate and Flax's one: a known difference, which the report names; everything that should
hold in spite of it is compared.
"""

from typing import Any

import numpy as np
import tagger_flax

import parity


def build_reference() -> Any:
    import tagger_torch

    return tagger_torch.Tagger()


def pair() -> parity.Pair:
    """What `python -m parity check` looks for."""
    return parity.Pair(
        name="recurrent tagger",
        reference=build_reference,
        port=tagger_flax.Tagger,
        inputs=lambda seed: {"ids": np.random.default_rng(seed).integers(0, 41, (3, 8))},
        known=(
            parity.KnownDifference(
                tensors=("*",),
                kind="initialisation",
                reason="the port keeps Flax's initialisers: it is only ever given trained weights",
                holds="everything but where the weights begin",
            ),
        ),
    )
