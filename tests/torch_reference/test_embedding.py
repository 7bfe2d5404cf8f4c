import math

import numpy as np
import pytest
import torch

from torch_reference import TransformerConfig
from torch_reference.embedding import Embedding, Positions, position_numbers, sinusoids

SCHEMES = ["interleaved", "concatenated", "concatenated_half_minus_1"]


def element(scheme: str, position: float, column: int, d_model: int) -> float:
    """The paper's formula and its two relatives, one number at a time (P12)."""
    half = d_model // 2
    pair, is_cosine = divmod(column, 2) if scheme == "interleaved" else (column % half, column // half)
    divisor = half - 1 if scheme == "concatenated_half_minus_1" else half
    angle = position / 10_000 ** (pair / divisor)
    return math.cos(angle) if is_cosine else math.sin(angle)


def positions(**changes: object) -> Positions:
    config = TransformerConfig.tiny(**changes)
    return Positions(config, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("offset", [0, 2])
def test_sinusoids_element_by_element(scheme, offset):
    table = positions(positions=scheme, dtype="float64", position_offset=offset)(50)  # beyond max_len=33
    assert table.shape == (50, 30)
    expected = [[element(scheme, row + offset, column, 30) for column in range(30)] for row in range(50)]
    np.testing.assert_allclose(table.numpy(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_interpolated_sinusoids(scheme):
    table = positions(positions=scheme, dtype="float64", interpolated_len=97)(97)
    expected = [[element(scheme, row * 32 / 96, column, 30) for column in range(30)] for row in range(97)]
    np.testing.assert_allclose(table.numpy(), expected, rtol=0, atol=1e-14)


def test_a_short_sequence_sees_the_beginning_of_a_longer_ones_positions():
    for changes in ({}, {"interpolated_len": 97}, {"positions": "learned", "interpolated_len": 97}):
        module = positions(dtype="float64", param_dtype="float64", **changes)
        assert torch.equal(module(7), module(33)[:7])


def test_sinusoids_are_cast_last_and_are_no_state():
    module = positions(dtype="float64").float().half().double()
    exact = sinusoids(position_numbers(33, module.config), module.config)
    np.testing.assert_array_equal(module(33).numpy(), exact)
    assert dict(module.state_dict()) == {}
    assert list(module.parameters()) == []
    for name in ("float32", "bfloat16"):
        rounded = positions(dtype=name)(33)
        assert torch.equal(rounded, torch.from_numpy(exact).to(getattr(torch, name)))


def test_learned_positions():
    module = positions(positions="learned", position_offset=2)
    assert module.table.shape == (35, 30)
    assert torch.equal(module(5), module.table[2:7])
    with pytest.raises(ValueError, match="at most 33 positions, the table's, got a sequence of 34"):
        module(34)


def test_learned_positions_are_interpolated_between_rows():
    module = positions(
        positions="learned", position_offset=2, interpolated_len=65, dtype="float64", param_dtype="float64"
    )
    table, result = module.table.detach().numpy(), module(65).detach().numpy()
    for row in range(65):
        place = 2 + row / 2
        below, above = table[math.floor(place)], table[math.ceil(place)]
        np.testing.assert_allclose(result[row], (below + above) / 2, rtol=0, atol=1e-15)
    np.testing.assert_array_equal(result[-1], table[-1])
    with pytest.raises(ValueError, match="at most 65"):
        module(66)


def test_embedding_is_scaled_on_the_way_in_and_not_on_the_way_out():
    """P14, P20."""
    config = TransformerConfig.tiny(dtype="float64", param_dtype="float64")
    embedding = Embedding(67, config, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[5, 0, 66]])
    vectors = embedding(ids)
    np.testing.assert_array_equal(vectors.detach(), embedding.weight.detach()[ids] * math.sqrt(30))
    vectors.sum().backward()
    assert embedding.weight.grad[0].tolist() == [math.sqrt(30)] * 30  # padding's row is trained like any other
    x = torch.ones(1, 2, 30, dtype=torch.float64)
    np.testing.assert_allclose(
        embedding.logits(x)[0, 0].detach(), embedding.weight.detach().sum(dim=1), rtol=0, atol=1e-13
    )
