import pytest
import torch

from torch_reference import AttentionMask
from torch_reference.masks import causal_mask, padding_mask, segment_positions, window_mask

CAUSAL = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
WINDOW_1 = [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
ALL_THREE = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0]]


def test_true_means_may_attend():
    positions = torch.arange(4)
    assert causal_mask(positions, positions).int().tolist() == CAUSAL
    assert window_mask(positions, positions, window=1).int().tolist() == WINDOW_1
    assert window_mask(positions, positions, window=0).int().tolist() == torch.eye(4).int().tolist()
    assert padding_mask(torch.tensor([[7, 0, 8, 0]]), pad_id=0).int().tolist() == [[1, 0, 1, 0]]
    assert padding_mask(torch.tensor([[7, 0, 8, 0]]), pad_id=8).int().tolist() == [[1, 1, 0, 1]]


def test_parts_combine_to_the_docstrings_example():
    keys = torch.tensor([[True, True, True, False], [True, True, True, True]])
    positions = torch.arange(4)
    allowed = AttentionMask(keys=keys, causal=True, window=1).allowed(positions, positions)
    assert allowed.shape == (2, 1, 4, 4)
    assert allowed[0, 0].int().tolist() == ALL_THREE
    assert AttentionMask().allowed(positions[:3], positions).int().tolist() == [[[[1] * 4] * 3]]


def test_padding_masks_key_columns_not_query_rows():
    """P16: a row of padding attends like any other."""
    allowed = AttentionMask(keys=torch.tensor([[True, True, False]])).allowed(torch.arange(3), torch.arange(3))
    assert allowed[0, 0].int().tolist() == [[1, 1, 0]] * 3


def test_groups_and_positions_outside_the_keys():
    keys = torch.tensor([[True, False, True, True]])
    queries, key_positions = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[-1, 0], [3, 4]])
    allowed = AttentionMask(keys=keys, causal=True).allowed(queries, key_positions)
    assert allowed.shape == (1, 1, 2, 2, 2)
    assert allowed[0, 0].int().tolist() == [[[0, 1], [0, 1]], [[0, 0], [1, 0]]]


def test_segments_see_themselves_alone():
    segments, positions = torch.tensor([[1, 1, 2, 0]]), torch.arange(4)
    mask = AttentionMask(query_segments=segments, key_segments=segments)
    assert mask.allowed(positions, positions)[0, 0].int().tolist() == [
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
    ]
    mask = AttentionMask(keys=segments != 0, causal=True, query_segments=segments, key_segments=segments)
    packed = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert mask.allowed(positions, positions)[0, 0].int().tolist() == packed
    tiles = mask.allowed(positions.reshape(2, 2), torch.tensor([[-2, -1], [2, 4]]))
    assert tiles[0, 0].int().tolist() == [[[0, 0], [0, 0]], [[1, 0], [0, 0]]]
    across = AttentionMask(query_segments=torch.tensor([[2, 1, 1]]), key_segments=segments)
    assert across.allowed(torch.arange(3), positions)[0, 0].int().tolist() == [[0, 0, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0]]


def test_segments_of_one_side_alone_are_refused():
    with pytest.raises(ValueError, match="segments of queries and of keys, or of neither"):
        AttentionMask(key_segments=torch.tensor([[1]])).allowed(torch.arange(1), torch.arange(1))


def test_positions_start_anew_with_every_segment():
    segments = torch.tensor([[1, 1, 1, 2, 3, 3, 0, 0], [0, 1, 1, 2, 2, 2, 2, 3]])
    assert segment_positions(segments).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], [0, 0, 1, 0, 1, 2, 3, 0]]
