"""Several pairs in one row give what each gives in a row of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_transformer import Packing
from flax_transformer.parameters import abstract_model, parameters, with_parameters

# Of every row, its pairs: how long their sources and targets are. 9 and 8 tokens a row, the rest is padding.
PAIRS = [[(3, 2), (4, 3)], [(5, 4)], [(2, 1), (1, 3), (3, 4)]]
SRC_LEN, TGT_LEN = 9, 8

VARIANTS = [
    {},
    {"norm_order": "pre", "window": 1},
    {"attention": "blockwise", "attention_block_size": 2},
    {"attention": "blockwise", "attention_block_size": 3, "window": 2, "norm_order": "pre"},
    {"positions": "learned", "position_offset": 2},
    {"positions": "learned", "norm_order": "pre", "attention": "blockwise", "attention_block_size": 4},
    {"bos_id": 0},
    {"attention": "library"},
]


def pairs_and_rows():
    """The ids of every pair in a row of its own; those of packed rows, and their segments."""
    rng = np.random.default_rng(2)
    alone = [np.zeros((sum(map(len, PAIRS)), length), np.int32) for length in (5, 4)]
    rows = [np.zeros((len(PAIRS), length), np.int32) for length in (SRC_LEN, TGT_LEN)]
    segments = [np.zeros_like(ids) for ids in rows]
    pair = 0
    for row, lengths in enumerate(PAIRS):
        starts = [0, 0]
        for number, sizes in enumerate(lengths, start=1):
            for side, size in enumerate(sizes):
                place = slice(starts[side], starts[side] + size)
                ids = rng.integers(4, 60, size)
                ids[0] = 1 if side == 1 else ids[0]
                alone[side][pair, :size] = rows[side][row, place] = ids
                segments[side][row, place] = number
                starts[side] += size
            pair += 1
    return alone, rows, Packing(*map(jnp.asarray, segments))


@functools.cache
def compiled(config):
    """Logits, and the gradient of the sum of the squares of those of real positions."""
    model = abstract_model(config)

    def loss(params, src, tgt, real, packing):
        logits = with_parameters(model, params)(src, tgt, packing=packing)
        return jnp.where(real[..., None], jnp.square(logits), 0.0).sum(), logits

    return jax.jit(jax.grad(loss, has_aux=True))


def run(model, ids, real, packing=None):
    gradients, logits = compiled(model.config)(parameters(model), *map(jnp.asarray, ids), real, packing)
    return np.asarray(logits)[np.asarray(real)], gradients


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_packed_pairs_equal_pairs_alone(build, changes):
    """Logits of real positions, which come in the same order, and gradients. The library's softmax is float32."""
    model = build(**changes)
    alone, rows, packing = pairs_and_rows()
    bos_id = model.config.bos_id
    alone, rows = ([src, np.where(tgt == 1, bos_id, tgt)] for src, tgt in (alone, rows))
    lengths = np.array([size for lengths in PAIRS for _, size in lengths])
    if bos_id == model.config.pad_id:  # no mask by ids would do; alone, each pair is a packed row of its own
        sources = np.array([size for lengths in PAIRS for size, _ in lengths])
        single = Packing(*(jnp.asarray((np.arange(n) < m[:, None]) * 1) for n, m in ((5, sources), (4, lengths))))
    else:
        single = None
    expected, expected_gradients = run(model, alone, np.arange(4) < lengths[:, None], single)
    logits, gradients = run(model, rows, packing.tgt_segments != 0, packing)
    tolerance = 2e-5 if model.config.attention == "library" else 1e-13
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)
    for name, gradient in gradients.items():
        scale = max(np.abs(expected_gradients[name]).max(), 1.0)
        np.testing.assert_allclose(gradient / scale, expected_gradients[name] / scale, rtol=0, atol=tolerance)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("changes", VARIANTS[:4], ids=str)
def test_neighbours_in_a_row_change_nothing(build, changes):
    """To the last bit. The neighbours' own logits do change."""
    model = build(**changes)
    _, (src, tgt), packing = pairs_and_rows()
    first = [np.asarray(segments) == 1 for segments in packing]
    changed = [np.where(mine | (ids == 0), ids, 60 + ids % 7) for ids, mine in zip((src, tgt), first, strict=True)]
    real = np.ones_like(tgt, bool)
    before, after = (run(model, ids, real, packing)[0].reshape(*tgt.shape, -1) for ids in ((src, tgt), changed))
    np.testing.assert_array_equal(before[first[1]], after[first[1]])
    others = np.asarray(packing.tgt_segments) > 1
    assert (before[others] != after[others]).any(axis=-1).all()


@pytest.mark.usefixtures("x64")
def test_encoding_and_decoding_apart(build):
    model = build()
    _, (src, tgt), packing = pairs_and_rows()
    real = np.asarray(packing.tgt_segments) != 0
    expected, _ = run(model, (src, tgt), real, packing)

    @jax.jit
    def apart(params):
        m = with_parameters(model, params)
        memory = m.encode(jnp.asarray(src), packing=packing)
        return m.decode(jnp.asarray(tgt), memory, src_mask=packing.src_segments != 0, packing=packing)

    np.testing.assert_allclose(np.asarray(apart(parameters(model)))[real], expected, rtol=0, atol=1e-13)
