import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.loss import label_smoothed_cross_entropy


def loss(logits, targets, *, smoothing, pad_id=0):
    return label_smoothed_cross_entropy(jnp.asarray(logits), jnp.asarray(targets), smoothing=smoothing, pad_id=pad_id)


def by_hand(logits, targets, *, smoothing, pad_id=0):
    total = nll = count = 0
    for row, target in zip(logits.reshape(-1, logits.shape[-1]), targets.ravel(), strict=True):
        if target == pad_id:
            continue
        log_softmax = [x - math.log(sum(math.exp(y) for y in row)) for x in row]
        shares = [(1 - smoothing) * (k == target) + smoothing / len(row) for k in range(len(row))]
        total -= sum(q * p for q, p in zip(shares, log_softmax, strict=True))
        nll -= log_softmax[target]
        count += 1
    return total, nll, count


@pytest.mark.usefixtures("x64")
def test_closed_form_with_three_classes():
    """P11: mass over all K classes. Logits (0, ln 2, ln 5): probabilities 1/8, 2/8, 5/8; target 2; smoothing 0.3."""
    sums = loss(np.log([[[1.0, 2.0, 5.0]]]), [[2]], smoothing=0.3)
    expected = -(0.8 * math.log(5 / 8) + 0.1 * math.log(1 / 8) + 0.1 * math.log(2 / 8))
    assert math.isclose(float(sums.loss), expected, rel_tol=1e-14)
    assert math.isclose(float(sums.nll), -math.log(5 / 8), rel_tol=1e-14)
    assert int(sums.num_tokens) == 1


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("pad_id", [0, 3])
def test_equals_a_loop_and_sums(smoothing, pad_id):
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(3, 5, 11)), rng.integers(1, 11, (3, 5))
    targets[0, 3:] = pad_id
    targets[2] = pad_id
    sums = loss(logits, targets, smoothing=smoothing, pad_id=pad_id)
    np.testing.assert_allclose(sums, by_hand(logits, targets, smoothing=smoothing, pad_id=pad_id), rtol=1e-13)
    if smoothing == 0:
        assert sums.loss == sums.nll
    # Sums, not means: the parts of a batch add up to the whole.
    parts = [loss(logits[i : i + 1], targets[i : i + 1], smoothing=smoothing, pad_id=pad_id) for i in range(3)]
    np.testing.assert_allclose(np.sum(parts, axis=0), sums, rtol=1e-13)


@pytest.mark.usefixtures("x64")
def test_padding_is_ignored_whatever_its_logits():
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(1, 4, 7)), np.array([[3, 5, 0, 0]])
    gradient = jax.grad(lambda x: loss(x, targets, smoothing=0.1).loss)
    assert (np.asarray(gradient(jnp.asarray(logits)))[:, 2:] == 0).all()
    assert (np.asarray(gradient(jnp.asarray(logits)))[:, :2] != 0).all()
    logits[:, 2:] = 1e6
    assert loss(logits, targets, smoothing=0.1).loss == loss(logits[:, :2], targets[:, :2], smoothing=0.1).loss


def test_a_batch_of_padding_is_zero():
    sums = loss(np.ones((2, 3, 5), np.float32), np.zeros((2, 3), np.int32), smoothing=0.1)
    assert [float(x) for x in sums] == [0, 0, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_logits_are_summed_in_float32(dtype):
    """T15."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(2, 3, 999)) * 5, dtype)
    targets = rng.integers(1, 999, (2, 3))
    sums = loss(logits, targets, smoothing=0.1)
    assert sums.loss.dtype == sums.nll.dtype == jnp.float32
    np.testing.assert_allclose(sums, by_hand(np.asarray(logits, np.float64), targets, smoothing=0.1), rtol=1e-6)
