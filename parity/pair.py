"""What is compared: a reference in PyTorch, a port in Flax NNX, the mapping between their weights, and inputs.

Nothing here knows any particular model; `parity/twins.py` makes a Pair of our own two.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from parity.weights.mapping import WeightMapping

Precision = Literal["float64", "float32"]
Inputs = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two models that claim to be the same.

    The builders get a precision, for computation and for parameters alike. The functions that run a model return
    (logits, loss); what they compute must be differentiable by the framework's own means.
    """

    name: str
    build_reference: Callable[[Precision], Any]
    """To a torch.nn.Module. Its weights are replaced by `weights`."""
    build_port: Callable[[Precision], Any]
    """To an nnx.Module, or one of shapes only (`nnx.eval_shape`): its parameters are replaced."""
    weights: Mapping[str, np.ndarray]
    """The reference's parameters by name, in float32; a tied one stands once or under each of its names."""
    mapping: WeightMapping
    """From the reference's names and layouts to the port's."""
    run_reference: Callable[[Any, Mapping[str, Any]], tuple[Any, Any]]
    """(module, inputs as tensors) -> (logits, loss)."""
    run_port: Callable[[Any, Mapping[str, Any]], tuple[Any, Any]]
    """(module, inputs as arrays) -> (logits, loss)."""
    batches: tuple[Inputs, ...]
    """What both are given, one after the other."""

    def __post_init__(self) -> None:
        if not self.batches:
            raise ValueError(f"{self.name}: expected at least one batch, got none: nothing compared is no proof")
