"""Modules of both frameworks by name, the mapping derived between them, and weights for it."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from parity import facts_flax, facts_torch
from parity.facts import from_json, to_json
from parity.weights.derive import Derived, derive


class Reference(torch.nn.Module):
    def __init__(self, **modules: torch.nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


class Port(nnx.Module):
    def __init__(self, **modules: nnx.Module) -> None:
        for name, module in modules.items():
            setattr(self, name, module)


def derived(reference: torch.nn.Module, port: nnx.Module, *, mapping: Any = (), modules: Any = ()) -> Derived:
    # Through JSON, as from a golden file.
    facts = from_json(to_json(facts_torch.describe(reference)))
    return derive(facts, facts_flax.describe(port), mapping=mapping, modules=modules)


def weights_of(reference: torch.nn.Module) -> dict[str, np.ndarray]:
    """Random, no two alike; variances are positive."""
    generator = torch.Generator().manual_seed(0)
    named = [*reference.named_parameters(), *((n, b) for n, b in reference.named_buffers() if b.is_floating_point())]
    weights = {}
    for name, tensor in named:
        values = torch.randn(tensor.shape, generator=generator)
        weights[name] = (values.abs() + 0.5 if name.endswith("var") else values).numpy()
    return weights


def load(reference: torch.nn.Module, port: nnx.Module, found: Derived) -> None:
    """The same weights into both, in float64."""
    weights = found.adjust(weights_of(reference))
    own = dict(reference.named_parameters()) | dict(reference.named_buffers())
    with torch.no_grad():
        for name, array in weights.items():
            own[name].copy_(torch.from_numpy(array))
    reference.double().eval()
    port.eval()
    ported = found.mapping.apply({n: a for n, a in weights.items() if found.travels(n)})
    variables = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(port))}
    assert {n for n, v in variables.items() if isinstance(v, (nnx.Param, nnx.BatchStat))} == ported.keys()
    for name, array in ported.items():
        assert variables[name].get_value().shape == array.shape, name
        variables[name].set_value(jnp.asarray(array, jnp.float64))
    back = found.mapping.inverse().apply(ported)
    assert all(np.array_equal(back[name], weights[name]) for name in back)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape)


RNGS = nnx.Rngs(0)
