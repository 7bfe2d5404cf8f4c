"""What is read off modules: one vocabulary for both frameworks, plain data, shared tensors under their first name."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from flax import nnx
from torch.nn import functional

from parity import facts_flax, facts_torch
from parity.facts import from_json, plain_settings, tensor_names, to_json

RNGS = nnx.Rngs(0)


@dataclasses.dataclass(frozen=True)
class Config:
    epsilon: float = 1e-5
    dtype: str = "float32"
    layers: tuple[int, ...] = (2, 3)


class Reference(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.p, self.mode, self._hidden = Config(), 0.1, "pre", 3
        self.act_fn = functional.gelu
        self.inner = torch.nn.Linear(3, 5)
        self.again = self.inner
        self.tied = self.inner.weight
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)


class Port(nnx.Module):
    activation = staticmethod(nnx.gelu)

    def __init__(self) -> None:
        self.config, self.rate, self.mode, self._hidden = Config(), 0.1, "pre", 3
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(3, 5, rngs=rngs)
        self.again = self.inner
        self.tied = self.inner.kernel
        self.statistic = nnx.BatchStat(jnp.zeros(2))
        self.table = jnp.ones(4)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def test_torch() -> None:
    facts = facts_torch.describe(Reference())
    whole = facts[""]
    assert (whole.type, whole.layer) == ("Reference", "")
    assert whole.settings == {
        "config.eps": 1e-5,
        "config.layers": (2, 3),
        "dropout rate": 0.1,
        "mode": "pre",
        "activation": "gelu (erf)",
    }
    assert facts["inner"].layer == "Linear"
    assert facts["again"].same_as == "inner"
    tensors = tensor_names(facts)
    assert {name for name in ("tied", "frozen", "counter") if tensors[name].trained} == {"tied"}
    assert (tensors["counter"].dtype, tensors["counter"].shape) == ("int64", ())
    # Named first by the model's own attributes, as torch's named_parameters does.
    assert tensors["inner.weight"].same_as == "tied"
    assert tensors["again.bias"].same_as == "inner.bias"


def test_flax() -> None:
    port = Port()
    facts = facts_flax.describe(port)
    assert facts[""].settings == {
        "config.eps": 1e-5,
        "config.layers": (2, 3),
        "dropout rate": 0.1,
        "mode": "pre",
        "activation": "gelu (tanh)",
    }
    tensors = tensor_names(facts)
    own = {name for name, tensor in tensors.items() if not tensor.same_as}
    # Under the names that nnx.state gives them; random streams are no tensors of the model.
    assert own == {"again.bias", "again.kernel", "statistic", "table"}
    assert tensors["tied"].same_as == tensors["inner.kernel"].same_as == "again.kernel"
    assert facts["inner"].same_as == "again"
    assert {name for name in own if tensors[name].settable} == own - {"table"}
    assert not tensors["statistic"].trained
    shapes = facts_flax.describe(nnx.eval_shape(Port))
    assert tensor_names(shapes) == {name: tensor for name, tensor in tensors.items() if tensor.settable}


def test_first_names_are_those_of_the_runs() -> None:
    """What is called twice has one name in a run: that under which facts have it."""
    from parity.capture_flax import FlaxRunner
    from parity.capture_torch import TorchRunner
    from parity.pair import Side

    torch_names = {name for name, t in tensor_names(facts_torch.describe(Reference())).items() if not t.same_as}
    assert TorchRunner(Side(build=Reference)).weights().keys() == torch_names - {"counter"}
    flax_names = {n for n, t in tensor_names(facts_flax.describe(Port())).items() if t.settable and not t.same_as}
    assert FlaxRunner(Side(build=Port), precision="float32").specs().keys() == flax_names


def test_facts_survive_json() -> None:
    for facts in (facts_torch.describe(Reference()), facts_flax.describe(Port())):
        assert from_json(json.loads(json.dumps(to_json(facts)))) == facts


ACTIVATIONS: list[tuple[Any, Any, str]] = [
    (functional.gelu, functools.partial(nnx.gelu, approximate=False), "gelu (erf)"),
    (torch.nn.GELU("tanh"), nnx.gelu, "gelu (tanh)"),
    (functools.partial(functional.gelu, approximate="tanh"), jax.nn.gelu, "gelu (tanh)"),
    (torch.nn.ReLU(), nnx.relu, "relu"),
    (functional.silu, nnx.swish, "silu"),
    (torch.tanh, jnp.tanh, "tanh"),
    (torch.nn.LeakyReLU(0.2), functools.partial(jax.nn.leaky_relu, negative_slope=0.2), "leaky_relu (0.2)"),
    (torch.nn.ELU(), nnx.elu, "elu (1)"),
    (torch.nn.Hardswish(), nnx.hard_swish, "hard_silu"),
    (torch.sigmoid, jax.nn.sigmoid, "sigmoid"),
]


@pytest.mark.parametrize(("theirs", "ours", "name"), ACTIVATIONS)
def test_activations(theirs: Any, ours: Any, name: str) -> None:
    assert facts_torch.activation_name(theirs) == name
    assert facts_flax.activation_name(ours) == name


@pytest.mark.parametrize("value", [lambda x: x, "relu", None, torch.nn.Linear(2, 3), [1]])
def test_what_is_no_known_activation(value: Any) -> None:
    assert facts_torch.activation_name(value) is None
    assert facts_flax.activation_name(value) is None


PADDINGS = [
    ({"padding": "same", "dilation": 2}, {"kernel_dilation": 2}),
    ({"padding": 2}, {"padding": 2}),
    ({"padding": 0, "stride": 2}, {"padding": "VALID", "strides": 2}),
    ({"padding": 1, "padding_mode": "circular"}, {"padding": "CIRCULAR"}),
]


@pytest.mark.parametrize(("theirs", "ours"), PADDINGS)
def test_paddings(theirs: Any, ours: Any) -> None:
    expected = facts_torch.settings_of(torch.nn.Conv1d(2, 4, 3, **theirs))
    found = facts_flax.settings_of(nnx.Conv(2, 4, (3,), rngs=RNGS, **ours))
    shared = expected.keys() & found.keys()
    assert {"padding", "padding mode", "strides", "dilation", "kernel size", "groups"} <= shared
    assert {name: expected[name] for name in shared} == {name: found[name] for name in shared}


def test_a_padding_that_depends_on_the_input_is_no_setting() -> None:
    assert "padding" not in facts_flax.settings_of(nnx.Conv(2, 4, (3,), strides=2, rngs=RNGS))
    assert facts_flax.settings_of(nnx.Conv(2, 4, (1,), strides=2, rngs=RNGS))["padding"] == ((0, 0),)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(("size", "stride"), [(3, 2), (2, 3), (4, 1)])
def test_paddings_of_transposed_convolutions_are_what_jax_makes_of_them(padding: str, size: int, stride: int) -> None:
    pads = facts_flax.settings_of(nnx.ConvTranspose(1, 1, size, strides=(stride,), padding=padding, rngs=RNGS))[
        "padding"
    ]
    kernel = jnp.arange(1.0, size + 1)[:, None, None]
    x = jnp.arange(1.0, 6.0)[None, :, None]
    by_word, by_number = (jax.lax.conv_transpose(x, kernel, (stride,), p) for p in (padding, pads))
    assert (by_word == by_number).all()


def test_two_attributes_with_one_shared_name_keep_their_own() -> None:
    assert plain_settings({"rate": 0.1, "p": 0.2, "device": "cpu"}) == {"rate": 0.1, "p": 0.2}
