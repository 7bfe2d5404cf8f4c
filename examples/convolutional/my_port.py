"""python -m parity check examples/convolutional/my_port.py

All modules bear the same names, so there is no table. Only the axes differ: the port takes channels last.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import optax
import resnet_flax

import parity


def inputs(seed: int) -> dict[str, np.ndarray]:
    """Five images in torch's order of axes, and their classes."""
    rng = np.random.default_rng(seed)
    return {"images": rng.standard_normal((5, 3, 9, 7)), "classes": rng.integers(0, 10, 5)}


def build_reference() -> Any:
    import resnet_torch

    return resnet_torch.ResNet()


def reference_loss(scores: Any, inputs: Mapping[str, Any]) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(scores, inputs["classes"])


def port_loss(scores: Any, inputs: Mapping[str, Any]) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(scores, inputs["classes"]).mean()


def pair() -> parity.Pair:
    """What `python -m parity check` looks for."""
    return parity.Pair(
        name="convolutional network",
        reference=parity.Side(
            build=build_reference, call=lambda model, inputs: model(inputs["images"]), loss=reference_loss
        ),
        port=parity.Side(
            build=resnet_flax.ResNet,
            call=lambda model, inputs: model(inputs["images"].transpose(0, 2, 3, 1)),
            loss=port_loss,
        ),
        inputs=inputs,
        # A module of ours that passes feature maps on: convolutions and norms are known.
        layouts={"blocks.{i}": (0, 2, 3, 1)},
    )
