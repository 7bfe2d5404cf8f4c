"""The second rung: what fails without running anything, and that the detail names it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity.facts import ModuleFacts
from parity.pair import Pair
from parity.rungs import Outcome, inventory
from parity.rungs.inventory import compare_settings
from parity.runs import Runs


class Reference(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.bn = torch.nn.BatchNorm1d(6)
        self.conv = torch.nn.Conv1d(6, 8, 3, padding=1)
        self.attn = torch.nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True)
        self.act = torch.nn.GELU()
        self.dropout = torch.nn.Dropout(0.2)
        self.gate = torch.nn.Parameter(torch.ones(6))


class Port(nnx.Module):
    def __init__(self, **changes: Any) -> None:
        rngs = nnx.Rngs(0)
        own = {
            "embed": lambda: nnx.Embed(11, 6, rngs=rngs),
            "norm": lambda: nnx.LayerNorm(6, epsilon=1e-5, rngs=rngs),
            "bn": lambda: nnx.BatchNorm(6, momentum=0.9, rngs=rngs),
            "conv": lambda: nnx.Conv(6, 8, (3,), rngs=rngs),
            "attn": lambda: nnx.MultiHeadAttention(
                2, 6, dropout_rate=0.1, broadcast_dropout=False, decode=False, rngs=rngs
            ),
            "act": lambda: functools.partial(nnx.gelu, approximate=False),
            "dropout": lambda: nnx.Dropout(0.2, rngs=rngs),
            "gate": lambda: nnx.Param(jnp.ones(6)),
        }
        for name, build in (own | changes).items():
            if build is not None:
                setattr(self, name, build())


def climb(port: Callable[[], nnx.Module], reference: Callable[[], torch.nn.Module] = Reference, **more: Any) -> Outcome:
    pair = Pair(reference=reference, port=port, inputs={"ids": np.zeros((2, 3), np.int32)}, **more)
    return inventory.climb(Runs(pair))


def failures(outcome: Outcome) -> dict[str, str]:
    return {failure.tensor: failure.detail for section in outcome.sections for failure in section.failures}


def test_equal_inventories() -> None:
    outcome = climb(Port)
    assert failures(outcome) == {}
    assert [section.title for section in outcome.sections] == ["tensors", "what is trained", "settings"]
    settings = {c.tensor for c in outcome.sections[2].comparisons}
    assert {
        *("norm: eps", "bn: eps", "bn: momentum", "conv: padding", "conv: strides", "conv: groups", "conv: dilation"),
        *("attn: num_heads", "attn: dropout rate", "dropout: dropout rate", "the model itself: activation"),
    } <= settings
    assert outcome.sections[1].comparisons[-1].detail == "416 in the reference, 416 in the port"
    assert [known.kind for known in outcome.known] == ["running variance"]


RNGS = nnx.Rngs(0)
FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "eps": ({"norm": lambda: nnx.LayerNorm(6, rngs=RNGS)}, "norm: eps", "reference 1e-05, port 1e-06"),
    "activation": ({"act": lambda: nnx.gelu}, "the model itself: activation", "gelu (erf), port gelu (tanh)"),
    "dropout rate": ({"dropout": lambda: nnx.Dropout(0.1)}, "dropout: dropout rate", "reference 0.2, port 0.1"),
    "momentum": ({"bn": lambda: nnx.BatchNorm(6, rngs=RNGS)}, "bn: momentum", "reference 0.1, port 0.01"),
    "strides": (
        {"conv": lambda: nnx.Conv(6, 8, (3,), strides=2, padding=1, rngs=RNGS)},
        "conv: strides",
        "reference (1,), port (2,)",
    ),
    "padding": (
        {"conv": lambda: nnx.Conv(6, 8, (3,), padding="VALID", rngs=RNGS)},
        "conv: padding",
        "reference ((1, 1),), port ((0, 0),)",
    ),
    "dilation": (
        {"conv": lambda: nnx.Conv(6, 8, (3,), padding=1, kernel_dilation=2, rngs=RNGS)},
        "conv: dilation",
        "2",
    ),
    "shared dropout mask": (
        {"attn": lambda: nnx.MultiHeadAttention(2, 6, dropout_rate=0.1, decode=False, rngs=RNGS)},
        "attn: dropout mask shared over the batch",
        "reference False, port True",
    ),
    "no module": ({"norm": None}, "norm", "only the reference has it: LayerNorm with weight, bias"),
    "one module more": (
        {"final_norm": lambda: nnx.LayerNorm(6, rngs=RNGS)},
        "final_norm",
        "only the port has it: LayerNorm with bias, scale",
    ),
    "no bias": ({"norm": lambda: nnx.LayerNorm(6, use_bias=False, rngs=RNGS)}, "norm.bias", "unused 'norm.bias' (6,)"),
    "shape": ({"embed": lambda: nnx.Embed(12, 6, rngs=RNGS)}, "embed.embedding", "expected (12, 6), got (11, 6)"),
    "a parameter is a buffer": (
        {"gate": lambda: nnx.Variable(jnp.ones(6))},
        "gate",
        "'gate' is trained in the reference, not trained in the port",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    changes, tensor, detail = FAULTS[fault]
    found = failures(climb(lambda: Port(**changes)))
    assert detail in found[tensor], found


def test_a_buffer_that_the_port_trains() -> None:
    class WithBuffer(Reference):
        def __init__(self) -> None:
            super().__init__()
            del self.gate
            self.register_buffer("gate", torch.ones(6))

    found = failures(climb(Port, WithBuffer))
    assert found["gate"] == "'gate' is not trained in the reference, trained in the port"
    assert found["number of trained parameters"] == "410 in the reference, 416 in the port"


def test_a_frozen_parameter() -> None:
    def frozen() -> torch.nn.Module:
        reference = Reference()
        reference.gate.requires_grad_(False)
        return reference

    assert "gate" in failures(climb(Port, frozen))


def test_num_heads_of_own_modules_without_any_change_of_shape() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.rate, self.backend = 3, 0.1, "here"
            self.out = torch.nn.Linear(6, 6)

    class PortOfAttention(nnx.Module):
        def __init__(self) -> None:
            self.num_heads, self.dropout_rate, self.backend = 2, 0.2, "there"
            self.out = nnx.Linear(6, 6, rngs=RNGS)

    found = failures(climb(PortOfAttention, Attention))
    assert found == {
        "the model itself: num_heads": "reference 3, port 2",
        "the model itself: dropout rate": "reference 0.1, port 0.2",
    }


def test_activations_in_a_sequence() -> None:
    def reference() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LeakyReLU(0.2), torch.nn.Linear(5, 2))

    def port(activation: Any) -> nnx.Module:
        return nnx.Sequential(nnx.Linear(3, 5, rngs=RNGS), activation, nnx.Linear(5, 2, rngs=RNGS))

    assert failures(climb(lambda: port(functools.partial(jax.nn.leaky_relu, negative_slope=0.2)), reference)) == {}
    found = failures(climb(lambda: port(nnx.leaky_relu), reference))
    assert found == {"the model itself: 1": "reference leaky_relu (0.2), port leaky_relu (0.01)"}


def test_a_row_for_padding_is_noted() -> None:
    class WithPadding(Reference):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(11, 6, padding_idx=0)

    outcome = climb(Port, WithPadding)
    assert failures(outcome) == {}
    assert any("embed has padding_idx=0, which the port's Embed does not know" in note for note in outcome.notes)


def test_settings_of_two_meanings_are_not_compared() -> None:
    reference = ModuleFacts(type="Own", settings={"scale": 2.0, "mode": "a", "activation": "gelu", "flag": True})
    port = ModuleFacts(type="Own", settings={"scale": True, "mode": "a", "activation": "gelu (tanh)", "flag": 1})
    compared = {c.tensor: c.error for c in compare_settings("own", reference, port)}
    assert compared == {"own: mode": 0.0, "own: activation": 0.0}
    known = ModuleFacts(type="BatchNorm", layer="BatchNorm", settings={"momentum": 0.1})
    average = ModuleFacts(type="BatchNorm1d", layer="BatchNorm1d", settings={"momentum": "a cumulative average"})
    assert [c.passed for c in compare_settings("bn", average, known)] == [False]
