import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_transformer import AttentionMask, DropoutKey, DropoutMasks
from flax_transformer.attention import attention_weights, library_attention, plain_attention
from flax_transformer.blockwise import blockwise_attention


def inputs(queries, keys, *, dtype=np.float64, heads=3, batch=2):
    rng = np.random.default_rng(0)
    shapes = [(batch, heads, queries, 5), (batch, heads, keys, 5), (batch, heads, keys, 5)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def keys_mask(keys):
    real = np.ones((2, keys), bool)
    real[0, keys - keys // 3 :] = False  # padding on the right, and on the left, where causal rows lose every key
    real[1, : keys // 3] = False
    return jnp.asarray(real)


def dense(mask, queries, keys):
    return mask.allowed(jnp.arange(queries), jnp.arange(keys))


def by_hand(query, key, value, allowed):
    """Softmax by the formula, one row at a time, over the keys that are allowed; zeros where there is none."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, heads, queries, head_dim = query.shape
    allowed = np.broadcast_to(allowed, (batch, 1, queries, key.shape[2]))
    output = np.zeros((*query.shape[:3], value.shape[3]))
    for b, h, q in np.ndindex(batch, heads, queries):
        chosen = np.flatnonzero(allowed[b, 0, q])
        exponentials = [math.exp(query[b, h, q] @ key[b, h, k] / math.sqrt(head_dim)) for k in chosen]
        for weight, k in zip(exponentials, chosen, strict=True):
            output[b, h, q] += weight / sum(exponentials) * value[b, h, k]
    return output


MASKS = [
    AttentionMask(),
    AttentionMask(keys=keys_mask(7)),
    AttentionMask(keys=keys_mask(7), causal=True),
    AttentionMask(keys=keys_mask(7), window=1),
    AttentionMask(keys=jnp.asarray([[False] * 7, [True] * 7]), causal=True, window=2),
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mask", MASKS)
def test_equals_the_formula_written_as_a_loop(mask):
    tensors = inputs(7, 7)
    allowed = dense(mask, 7, 7)
    expected = by_hand(*tensors, allowed)
    np.testing.assert_allclose(jax.jit(plain_attention)(*tensors, allowed).output, expected, rtol=0, atol=1e-13)
    blockwise = jax.jit(partial(blockwise_attention, block_size=3))(*tensors, mask)
    np.testing.assert_allclose(blockwise, expected, rtol=0, atol=1e-13)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("implementation", ["plain", "blockwise"])
@pytest.mark.parametrize("case", ["right", "left and causal", "all"])
def test_rows_without_any_key_give_zeros_and_no_gradient(implementation, case):
    """P17, P16, P15."""
    keys = np.ones((2, 6), bool)
    keys[0] = {"right": [1, 1, 1, 1, 0, 0], "left and causal": [0, 0, 0, 1, 1, 1], "all": [0] * 6}[case]
    mask = AttentionMask(keys=jnp.asarray(keys), causal=case == "left and causal")
    allowed = dense(mask, 6, 6)

    def attend(query, key, value):
        if implementation == "blockwise":
            return blockwise_attention(query, key, value, mask, block_size=4)
        return plain_attention(query, key, value, allowed).output

    tensors = inputs(6, 6)
    output = jax.jit(attend)(*tensors)
    gradients = jax.jit(jax.grad(lambda *x: (attend(*x) ** 2).sum() + attend(*x).sum(), argnums=(0, 1, 2)))(*tensors)
    assert all(np.isfinite(x).all() for x in (output, *gradients))
    without = ~np.asarray(allowed).any(axis=-1)[0, 0]
    assert without.sum() == {"right": 0, "left and causal": 3, "all": 6}[case]
    assert (np.asarray(output)[0, :, without] == 0).all()
    assert (np.asarray(output)[0, :, ~without] != 0).all()
    assert (np.asarray(gradients[0])[0, :, without] == 0).all()  # the queries of such rows
    for gradient in gradients[1:]:
        assert (np.asarray(gradient)[0, :, ~keys[0]] == 0).all()  # keys and values of padding
        assert (np.asarray(gradient)[0, :, keys[0]] != 0).all()


CASES = [
    # queries, keys, block size, causal, window: ragged, exact, one block, a block longer than the sequence
    (7, 10, 4, False, None),
    (8, 8, 4, False, None),
    (9, 9, 4, True, None),
    (9, 9, 16, True, None),
    (11, 11, 1, True, 3),
    (11, 11, 4, False, 0),
    (11, 11, 4, False, 2),
    (11, 11, 4, True, 4),
    (11, 11, 4, True, 5),
    (11, 11, 3, False, 100),
    (5, 11, 4, False, 3),
    (1, 9, 4, False, None),
    (1, 1, 4, True, 1),
]


def attention_both_ways(tensors, mask, cotangent, source, rate, block_size):
    """Output and gradients of both, from one compilation."""

    def plain(query, key, value):
        allowed = dense(mask, query.shape[2], key.shape[2])
        return plain_attention(query, key, value, allowed, source=source, rate=rate).output

    def blockwise(query, key, value):
        return blockwise_attention(query, key, value, mask, block_size=block_size, source=source, rate=rate)

    results = []
    for attend in (plain, blockwise):
        output, vjp = jax.vjp(attend, *tensors)
        results.append((output, *vjp(cotangent)))
    return results


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("queries", "keys", "block_size", "causal", "window"), CASES)
def test_blockwise_equals_plain(queries, keys, block_size, causal, window):
    """Values and gradients; with and without padding, with and without the same dropout masks handed in."""
    rng = np.random.default_rng(1)
    cotangent = jnp.asarray(rng.normal(size=(2, 3, queries, 5)))
    source = DropoutMasks({"": jnp.asarray(rng.random((2, 3, queries, keys)) > 0.3)})
    for rate in (0.0, 0.3):
        both = jax.jit(partial(attention_both_ways, source=source, rate=rate, block_size=block_size))
        for real in (jnp.ones((2, keys), bool), keys_mask(keys)):
            mask = AttentionMask(keys=real, causal=causal, window=window)
            for plain, other in zip(*both(inputs(queries, keys), mask, cotangent), strict=True):
                np.testing.assert_allclose(other, plain, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_blockwise_gradients_with_drawn_masks_are_those_of_its_values():
    """Forward and backward draw the same tiles: against finite differences along a random direction."""
    tensors, mask = inputs(7, 7), AttentionMask(keys=keys_mask(7), causal=True, window=2)
    key = jax.random.key(3)

    def loss(tensors):
        output = blockwise_attention(*tensors, mask, block_size=3, source=DropoutKey(key), rate=0.4)
        return jnp.sin(output).sum()

    rng = np.random.default_rng(2)
    direction = [jnp.asarray(rng.normal(size=x.shape)) for x in tensors]
    value_and_grad, step = jax.jit(jax.value_and_grad(loss)), 1e-5
    ahead, behind = ([x + sign * step * d for x, d in zip(tensors, direction, strict=True)] for sign in (1, -1))
    numeric = (value_and_grad(ahead)[0] - value_and_grad(behind)[0]) / (2 * step)
    analytic = sum(jnp.vdot(g, d) for g, d in zip(value_and_grad(tensors)[1], direction, strict=True))
    np.testing.assert_allclose(analytic, numeric, rtol=1e-8)


@pytest.mark.usefixtures("x64")
def test_large_scores_do_not_overflow():
    tensors = [x * 1000 for x in inputs(9, 9)]
    mask = AttentionMask(causal=True)
    expected = plain_attention(*tensors, dense(mask, 9, 9)).output
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(blockwise_attention(*tensors, mask, block_size=2), expected, rtol=1e-12)


@pytest.mark.parametrize("implementation", ["plain", "blockwise"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_narrower_dtypes(implementation, dtype):
    """Results in the dtype of the inputs, and as good as it allows: the softmax itself is float32."""
    mask = AttentionMask(causal=True)
    tensors = inputs(9, 9, dtype=dtype)

    def attend(query, key, value):
        if implementation == "blockwise":
            return blockwise_attention(query, key, value, mask, block_size=4)
        return plain_attention(query, key, value, dense(mask, 9, 9)).output

    output, gradients = jax.jit(lambda x: (attend(*x), jax.grad(lambda x: attend(*x).sum())(x)))(tensors)
    assert {x.dtype for x in (output, *gradients)} == {jnp.dtype(dtype)}
    exact = by_hand(*tensors, dense(mask, 9, 9))
    np.testing.assert_allclose(np.asarray(output, np.float64), exact, rtol=0, atol=8 * float(jnp.finfo(dtype).eps))


def test_library_attention_equals_plain_up_to_rounding_on_rows_with_keys():
    tensors, allowed = inputs(7, 7, dtype=np.float32), dense(AttentionMask(keys=keys_mask(7), causal=True), 7, 7)
    plain = jax.jit(plain_attention)(*tensors, allowed).output
    library = jax.jit(library_attention)(*tensors, allowed)
    has_key = np.broadcast_to(np.asarray(allowed).any(axis=-1)[..., None], plain.shape)
    assert not has_key.all()
    np.testing.assert_allclose(np.where(has_key, library, 0), np.where(has_key, plain, 0), rtol=0, atol=2e-6)


def test_weights_sum_to_one_over_the_allowed_keys():
    query, key, _ = inputs(7, 7, dtype=np.float32)
    allowed = dense(AttentionMask(keys=keys_mask(7), causal=True), 7, 7)
    weights = np.asarray(jax.jit(attention_weights)(query, key, allowed))
    assert (weights[np.broadcast_to(~allowed, weights.shape)] == 0).all()
    has_key = np.broadcast_to(np.asarray(allowed).any(axis=-1), weights.shape[:3])
    np.testing.assert_allclose(weights.sum(axis=-1), has_key, atol=1e-6)


def equations(jaxpr):
    """Every equation of a jaxpr and of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, (tuple, list)) else [parameter]:
                if hasattr(inner, "jaxpr"):
                    yield from equations(inner.jaxpr)
                elif hasattr(inner, "eqns"):
                    yield from equations(inner)


def largest_and_steps(length, *, window, rate):
    """Elements of the largest array in forward and backward pass, and trip counts of the loops, as jax traced them."""
    mask = AttentionMask(keys=jnp.ones((1, length), bool), causal=True, window=window)

    def loss(query, key, value):
        return blockwise_attention(
            query, key, value, mask, block_size=8, source=DropoutKey(jax.random.key(0)), rate=rate
        ).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(
        *inputs(length, length, dtype=np.float32, heads=1, batch=1)
    )
    found = list(equations(jaxpr.jaxpr))
    largest = max(math.prod(variable.aval.shape) for equation in found for variable in equation.outvars)
    return largest, [equation.params["length"] for equation in found if equation.primitive.name == "scan"]


@pytest.mark.parametrize(("window", "rate"), [(None, 0.0), (None, 0.3), (6, 0.0), (6, 0.3)])
def test_blockwise_memory_and_steps(window, rate):
    """Memory is linear in length; inside a window, the number of steps does not depend on the length at all."""
    (small, few), (large, many) = (largest_and_steps(length, window=window, rate=rate) for length in (256, 512))
    assert small < 256 * 256 / 8
    assert large <= 2 * small
    assert len(few) == len(many) == 2  # forward and backward
    assert many == (few if window is not None else [2 * steps for steps in few])
    assert few == ([2, 2] if window is not None else [32, 32])  # blocks of the future are not visited either


def test_the_walk_over_the_jaxpr_would_see_a_full_matrix():
    """The check above can fail (P23)."""
    allowed = jnp.ones((1, 1, 64, 64), bool)

    def loss(*tensors):
        return jax.jit(lambda *x: plain_attention(*x, allowed).output)(*tensors).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(*inputs(64, 64, dtype=np.float32, heads=1, batch=1))
    assert max(math.prod(v.aval.shape) for e in equations(jaxpr.jaxpr) for v in e.outvars) >= 64 * 64
