import jax.numpy as jnp
import numpy as np
import pytest

from flax_transformer import AttentionMask
from flax_transformer.masks import causal_mask, padding_mask, segment_positions, window_mask

CAUSAL = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
WINDOW_1 = [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
ALL_THREE = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0]]


def ints(mask):
    assert mask.dtype == bool
    return np.asarray(mask).astype(int).tolist()


def test_true_means_may_attend():
    """P15."""
    positions = jnp.arange(4)
    assert ints(causal_mask(positions, positions)) == CAUSAL
    assert ints(window_mask(positions, positions, window=1)) == WINDOW_1
    assert ints(window_mask(positions, positions, window=0)) == np.eye(4, dtype=int).tolist()
    assert ints(padding_mask(jnp.array([[7, 0, 8, 0]]), pad_id=0)) == [[1, 0, 1, 0]]
    assert ints(padding_mask(jnp.array([[7, 0, 8, 0]]), pad_id=8)) == [[1, 1, 0, 1]]


def test_parts_combine_to_the_docstrings_example():
    keys = jnp.array([[True, True, True, False], [True, True, True, True]])
    positions = jnp.arange(4)
    allowed = AttentionMask(keys=keys, causal=True, window=1).allowed(positions, positions)
    assert allowed.shape == (2, 1, 4, 4)
    assert ints(allowed[0, 0]) == ALL_THREE
    assert ints(AttentionMask().allowed(positions[:3], positions)) == [[[[1] * 4] * 3]]


def test_padding_masks_key_columns_not_query_rows():
    """P16: a row of padding attends like any other."""
    allowed = AttentionMask(keys=jnp.array([[True, True, False]])).allowed(jnp.arange(3), jnp.arange(3))
    assert ints(allowed[0, 0]) == [[1, 1, 0]] * 3


def test_groups_and_positions_outside_the_keys():
    keys = jnp.array([[True, False, True, True]])
    queries, key_positions = jnp.array([[0, 1], [2, 3]]), jnp.array([[-1, 0], [3, 4]])
    allowed = AttentionMask(keys=keys, causal=True).allowed(queries, key_positions)
    assert allowed.shape == (1, 1, 2, 2, 2)
    assert ints(allowed[0, 0]) == [[[0, 1], [0, 1]], [[0, 0], [1, 0]]]


def test_segments_see_themselves_alone():
    segments, positions = jnp.array([[1, 1, 2, 0]]), jnp.arange(4)
    mask = AttentionMask(query_segments=segments, key_segments=segments)
    assert ints(mask.allowed(positions, positions)[0, 0]) == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    mask = AttentionMask(keys=segments != 0, causal=True, query_segments=segments, key_segments=segments)
    packed = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert ints(mask.allowed(positions, positions)[0, 0]) == packed
    tiles = mask.allowed(positions.reshape(2, 2), jnp.array([[-2, -1], [2, 4]]))
    assert ints(tiles[0, 0]) == [[[0, 0], [0, 0]], [[1, 0], [0, 0]]]
    across = AttentionMask(query_segments=jnp.array([[2, 1, 1]]), key_segments=segments)
    assert ints(across.allowed(jnp.arange(3), positions)[0, 0]) == [[0, 0, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0]]


def test_segments_of_one_side_alone_are_refused():
    with pytest.raises(ValueError, match="segments of queries and of keys, or of neither"):
        AttentionMask(key_segments=jnp.array([[1]])).allowed(jnp.arange(1), jnp.arange(1))


def test_positions_start_anew_with_every_segment():
    segments = jnp.array([[1, 1, 1, 2, 3, 3, 0, 0], [0, 1, 1, 2, 2, 2, 2, 3]])
    assert segment_positions(segments).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], [0, 0, 1, 0, 1, 2, 3, 0]]
