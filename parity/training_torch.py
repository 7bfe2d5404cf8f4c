"""The reference's clipping, optimizer and training step, on numpy arrays by name, in float64."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from parity.capture_torch import load_reference, tensors_of, to_numpy
from parity.pair import Inputs, Masks, Side, Training
from parity.weights.variation import Noise

MOMENTS: Mapping[str, str] = {
    "exp_avg": "first_moment",
    "momentum_buffer": "first_moment",
    "exp_avg_sq": "second_moment",
    "max_exp_avg_sq": "second_moment",
    "square_avg": "second_moment",
}
"""What torch's optimizers keep of each parameter, and how it moves with the layout."""


def clipped(side: Side, gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the reference's clipping makes of these gradients."""
    assert side.clip is not None
    tensors = {name: torch.tensor(array) for name, array in gradients.items()}
    return {name: to_numpy(tensor) for name, tensor in side.clip(tensors).items()}


class TorchOptimizer:
    """The reference's optimizer on parameters of its own.

    Raises TypeError if the builder returns something else.
    """

    def __init__(self, build: Callable[[list[torch.nn.Parameter]], Any], weights: Mapping[str, np.ndarray]):
        self.parameters = {
            name: torch.nn.Parameter(torch.tensor(array, dtype=torch.float64)) for name, array in weights.items()
        }
        self.optimizer = build(list(self.parameters.values()))
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(f"expected a torch.optim.Optimizer from the reference's side, got {type(self.optimizer)}")
        self._own_rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, gradients: Mapping[str, np.ndarray], *, rate: float = 1.0) -> None:
        """One step, with `rate` times the optimizer's own learning rate."""
        for name, parameter in self.parameters.items():
            parameter.grad = torch.tensor(gradients[name], dtype=torch.float64) if name in gradients else None
        for group, own in zip(self.optimizer.param_groups, self._own_rates, strict=True):
            group["lr"] = own * rate
        self.optimizer.step()

    @property
    def own_rate(self) -> float:
        """The largest learning rate of its groups, without a schedule."""
        return max(self._own_rates)

    def weights(self) -> dict[str, np.ndarray]:
        """As they are now; copies."""
        return {name: to_numpy(parameter).copy() for name, parameter in self.parameters.items()}

    def moments(self) -> dict[str, dict[str, np.ndarray]]:
        """{what it is called: {parameter: array}}, of those in MOMENTS that it keeps."""
        found: dict[str, dict[str, np.ndarray]] = {}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if key in MOMENTS and isinstance(value, torch.Tensor):
                    found.setdefault(key, {})[name] = to_numpy(value).copy()
        return found


class TorchTraining:
    """The reference, trained by its own training step; parameters in `held` keep their values.

    `noise` makes what is added to each gradient.
    """

    def __init__(
        self,
        side: Side,
        training: Training,
        weights: Mapping[str, np.ndarray],
        *,
        held: frozenset[str] = frozenset(),
        noise: Noise | None = None,
    ):
        self.training = training
        module = side.module("float64")
        module = (module if side.takes_precision else module.to(torch.float64)).train()
        load_reference(module, weights, precision="float64")
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name not in held)
            if noise is not None and parameter.requires_grad:
                parameter.register_hook(lambda g: g + torch.from_numpy(noise(tuple(g.shape))).to(g))
        self.state = training.start(module)

    def step(self, inputs: Inputs, masks: Masks) -> float:
        """Takes a step; the loss before it."""
        tensors = {site: torch.from_numpy(np.ascontiguousarray(mask)) for site, mask in masks.items()}
        self.state, loss = self.training.step(self.state, tensors_of(inputs, "float64"), tensors)
        return float(loss)

    def parameters(self) -> dict[str, np.ndarray]:
        """As they are until the next step, in float64."""
        parameters = self.training.parameters(self.state)
        return {name: to_numpy(p).astype(np.float64, copy=False) for name, p in parameters.items()}


def initial(side: Side, seed: int, names: frozenset[str]) -> dict[str, np.ndarray]:
    """Freshly drawn parameters of the reference in float32: by the side's `initial`, or by building it once more.

    torch's global random numbers are seeded meanwhile, and afterwards as before.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if side.initial is not None:
            drawn = dict(side.initial(seed))
        else:
            drawn = dict(side.module("float32", seed=seed).named_parameters())
    arrays = {name: array for name, array in drawn.items() if name in names}
    return {
        name: to_numpy(array.to(torch.float32)).copy() if isinstance(array, torch.Tensor) else np.asarray(array)
        for name, array in arrays.items()
    }
