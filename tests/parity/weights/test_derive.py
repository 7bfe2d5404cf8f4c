"""Mappings derived from module types: each conversion computes what the reference does; what does not fit is said."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity import facts_flax, facts_torch
from parity.weights.mapping import MappingError
from tests.parity.weights.derivation import RNGS, Port, Reference, derived, load, random, weights_of

CONV = {"kernel_size": (3, 2), "padding": "VALID", "rngs": RNGS}


def channels_last(x: np.ndarray) -> np.ndarray:
    return np.moveaxis(x, 1, -1)


CASES: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], nnx.Module], np.ndarray, bool]] = {
    "linear": (lambda: torch.nn.Linear(5, 7), lambda: nnx.Linear(5, 7, rngs=RNGS), random(3, 5), False),
    "linear_general": (
        lambda: torch.nn.Linear(5, 6),
        lambda: nnx.LinearGeneral(5, 6, rngs=RNGS),
        random(3, 5),
        False,
    ),
    "layer_norm": (
        lambda: torch.nn.LayerNorm(5, eps=1e-6),
        lambda: nnx.LayerNorm(5, rngs=RNGS),
        random(3, 5),
        False,
    ),
    "rms_norm": (lambda: torch.nn.RMSNorm(5, eps=1e-6), lambda: nnx.RMSNorm(5, rngs=RNGS), random(3, 5), False),
    "group_norm": (
        lambda: torch.nn.GroupNorm(2, 6, eps=1e-6),
        lambda: nnx.GroupNorm(6, num_groups=2, rngs=RNGS),
        random(2, 6, 5, 3),
        True,
    ),
    "batch_norm": (
        lambda: torch.nn.BatchNorm2d(6),
        lambda: nnx.BatchNorm(6, momentum=0.9, rngs=RNGS),
        random(2, 6, 5, 3),
        True,
    ),
    "conv1d": (
        lambda: torch.nn.Conv1d(4, 6, 3, stride=2, padding=1),
        lambda: nnx.Conv(4, 6, (3,), strides=2, padding=1, rngs=RNGS),
        random(2, 4, 9),
        True,
    ),
    "conv2d_grouped": (
        lambda: torch.nn.Conv2d(4, 6, (3, 2), groups=2, dilation=(1, 2)),
        lambda: nnx.Conv(4, 6, feature_group_count=2, kernel_dilation=(1, 2), **CONV),
        random(2, 4, 8, 7),
        True,
    ),
    "conv3d": (
        lambda: torch.nn.Conv3d(2, 3, (1, 5, 3), padding="same"),
        lambda: nnx.Conv(2, 3, (1, 5, 3), rngs=RNGS),
        random(2, 2, 4, 5, 6),
        True,
    ),
    "conv_transpose1d": (
        lambda: torch.nn.ConvTranspose1d(4, 5, 3, stride=2, padding=1, output_padding=1),
        lambda: nnx.ConvTranspose(4, 5, 3, strides=(2,), padding=((1, 2),), rngs=RNGS),
        random(2, 4, 7),
        True,
    ),
    "conv_transpose2d": (
        lambda: torch.nn.ConvTranspose2d(4, 5, (3, 2), stride=(2, 1), bias=False),
        lambda: nnx.ConvTranspose(4, 5, strides=(2, 1), use_bias=False, **CONV),
        random(2, 4, 6, 5),
        True,
    ),
    "conv_transpose2d_with_transposed_kernel": (
        lambda: torch.nn.ConvTranspose2d(4, 5, (3, 2)),
        lambda: nnx.ConvTranspose(4, 5, transpose_kernel=True, **CONV),
        random(2, 4, 6, 5),
        True,
    ),
    "conv_transpose3d": (
        lambda: torch.nn.ConvTranspose3d(2, 3, (1, 2, 3)),
        lambda: nnx.ConvTranspose(2, 3, (1, 2, 3), padding="VALID", rngs=RNGS),
        random(2, 2, 3, 4, 5),
        True,
    ),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", CASES)
def test_converted_by_type(case: str) -> None:
    build_reference, build_port, x, spatial = CASES[case]
    reference, port = Reference(layer=build_reference()), Port(layer=build_port())
    found = derived(reference, port)
    load(reference, port, found)
    # Settings are in one vocabulary: none of these differs.
    theirs = facts_torch.settings_of(reference.layer)
    ours = facts_flax.settings_of(port.layer)
    shared = theirs.keys() & ours.keys()
    assert {name: theirs[name] for name in shared} == {name: ours[name] for name in shared}
    assert len(shared) >= 2
    expected = reference.layer(torch.from_numpy(x)).detach().numpy()
    got = np.asarray(port.layer(jnp.asarray(channels_last(x) if spatial else x)))
    np.testing.assert_allclose(got, channels_last(expected) if spatial else expected, rtol=1e-12, atol=1e-12)


def attention_case(**sizes: int) -> tuple[torch.nn.Module, nnx.Module]:
    reference = torch.nn.MultiheadAttention(6, 2, batch_first=True, **sizes)
    return reference, nnx.MultiHeadAttention(2, 6, in_kv_features=sizes.get("kdim"), decode=False, rngs=RNGS)


class OwnAttention(nnx.Module):
    """Four Linears under the usual names."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nnx.Linear(6, 6, rngs=rngs) for _ in range(4))

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (
            layer(x).reshape(*x.shape[:-1], 2, 3) for layer, x in ((self.q_proj, q), (self.k_proj, k), (self.v_proj, v))
        )
        return self.out_proj(nnx.dot_product_attention(q, k, v).reshape(*q.shape[:-2], 6))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["fused", "separate widths", "own"])
def test_attention(kind: str) -> None:
    widths = {"kdim": 5, "vdim": 5} if kind == "separate widths" else {}
    torch_layer, flax_layer = attention_case(**widths)
    if kind == "own":
        flax_layer = OwnAttention(RNGS)
    reference, port = Reference(attention=torch_layer), Port(attention=flax_layer)
    found = derived(reference, port)
    load(reference, port, found)
    q, k = random(2, 4, 6), random(2, 3, widths.get("kdim", 6))
    v = np.flip(k, axis=-1).copy()
    expected, _ = reference.attention(*map(torch.from_numpy, (q, k, v)))
    got = port.attention(*map(jnp.asarray, (q, k, v)))
    # Flax's attention takes its softmax in float32.
    np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    assert found.inside == {"attention.out_proj"}


CELLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "lstm": (torch.nn.LSTM, nnx.LSTMCell),
    "optimized": (torch.nn.LSTM, nnx.OptimizedLSTMCell),
    "gru": (torch.nn.GRU, nnx.GRUCell),
    "rnn": (torch.nn.RNN, nnx.SimpleCell),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", CELLS)
@pytest.mark.parametrize("directions", [1, 2])
def test_recurrent(case: str, directions: int) -> None:
    build_reference, cell = CELLS[case]
    reference = Reference(layer=build_reference(4, 5, batch_first=True, bidirectional=directions == 2))
    forward, backward = (nnx.RNN(cell(4, 5, dtype=jnp.float64, param_dtype=jnp.float64, rngs=RNGS)) for _ in range(2))
    port = Port(layer=forward if directions == 1 else nnx.Bidirectional(forward, backward))
    found = derived(reference, port)
    load(reference, port, found)
    assert [known.kind for known in found.known] == ["GRU hidden bias" if case == "gru" else "two biases for one"]
    assert found.held == {f"layer.bias_hh_l0{suffix}" for suffix in ("", "_reverse")[:directions]}
    x = random(2, 3, 4)
    expected, _ = reference.layer(torch.from_numpy(x))
    np.testing.assert_allclose(port.layer(jnp.asarray(x)), expected.detach().numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", ["lstm", "gru"])
def test_recurrent_cells(case: str) -> None:
    build_reference = {"lstm": torch.nn.LSTMCell, "gru": torch.nn.GRUCell}[case]
    reference, port = Reference(layer=build_reference(4, 5)), Port(layer=CELLS[case][1](4, 5, rngs=RNGS))
    load(reference, port, derived(reference, port))
    x, h, c = random(2, 4), random(2, 5), random(2, 5) + 1
    state = (torch.from_numpy(h), torch.from_numpy(c)) if case == "lstm" else torch.from_numpy(h)
    expected = reference.layer(torch.from_numpy(x), state)
    carry = (jnp.asarray(c), jnp.asarray(h)) if case == "lstm" else jnp.asarray(h)
    _, got = port.layer(carry, jnp.asarray(x))
    expected = expected[0] if case == "lstm" else expected
    np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-12, atol=1e-12)


def test_two_biases_keep_their_sum_and_a_hidden_bias_is_lost() -> None:
    reference = Reference(layer=torch.nn.GRUCell(4, 5))
    found = derived(reference, Port(layer=nnx.GRUCell(4, 5, rngs=RNGS)))
    weights = weights_of(reference)
    adjusted = found.adjust(weights)
    first, second = weights["layer.bias_ih"], weights["layer.bias_hh"]
    assert np.array_equal(adjusted["layer.bias_ih"][:10], first[:10] + second[:10])
    assert np.array_equal(adjusted["layer.bias_ih"][10:], first[10:])
    assert not adjusted["layer.bias_hh"].any()
    assert found.known[0].tensors == ("layer.bias_hh",)
    with pytest.raises(MappingError, match="expected 0 in gate"):
        found.mapping.apply(weights)
