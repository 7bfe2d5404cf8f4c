import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.loss import label_smoothed_cross_entropy, projected_cross_entropy


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


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("output", ["loss", "nll", "both"])
def test_gradient_equals_that_of_the_plain_formula(smoothing, output):
    """The gradient is written by hand; here it is derived from what it should be the gradient of."""
    rng = np.random.default_rng(3)
    logits, targets = jnp.asarray(rng.normal(size=(3, 5, 11)) * 4), rng.integers(1, 11, (3, 5))
    targets[0, 3:] = 0
    targets[2] = 0
    weights = {"loss": (1.7, 0.0), "nll": (0.0, 0.6), "both": (1.7, 0.6)}[output]

    def plain(logits):
        log_softmax = jax.nn.log_softmax(logits)
        nll = -jnp.take_along_axis(log_softmax, jnp.asarray(targets)[..., None], axis=-1)[..., 0]
        smoothed = (1 - smoothing) * nll - smoothing * log_softmax.mean(axis=-1)
        real = jnp.asarray(targets) != 0
        return weights[0] * (smoothed * real).sum() + weights[1] * (nll * real).sum()

    def ours(logits):
        sums = loss(logits, targets, smoothing=smoothing)
        return weights[0] * sums.loss + weights[1] * sums.nll

    (value, gradient), (expected_value, expected) = (jax.jit(jax.value_and_grad(f))(logits) for f in (ours, plain))
    np.testing.assert_allclose(value, expected_value, rtol=1e-14)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-14)
    assert (np.asarray(gradient)[2] == 0).all()
    assert np.abs(np.asarray(gradient)[1]).max() > 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradient_has_the_width_of_the_logits(dtype):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 9)), dtype)
    gradient = jax.grad(lambda x: loss(x, np.full((2, 3), 4), smoothing=0.1).loss)(logits)
    assert gradient.dtype == logits.dtype
    assert (np.asarray(gradient, np.float32)[..., 4] < 0).all()


def projected(hidden, table, bias, targets, *, tokens_at_once, smoothing=0.1):
    return projected_cross_entropy(
        lambda part: part @ table.T + bias,
        hidden,
        targets,
        smoothing=smoothing,
        pad_id=0,
        tokens_at_once=tokens_at_once,
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("length", "tokens_at_once"), [(1, 512), (7, 1), (7, 6), (8, 512), (13, 9)])
def test_by_parts_it_is_the_loss_of_the_whole(length, tokens_at_once, smoothing):
    """Values and the gradients of all that goes in, whatever the parts, and whether they divide the length."""
    rng = np.random.default_rng(0)
    hidden, table, bias = (jnp.asarray(rng.normal(size=size)) for size in ((3, length, 5), (11, 5), (11,)))
    targets = jnp.asarray(rng.integers(1, 11, (3, length))).at[0, length // 2 :].set(0)

    def whole(hidden, table, bias):
        sums = loss(hidden @ table.T + bias, targets, smoothing=smoothing)
        return 0.7 * sums.loss, sums

    def by_parts(hidden, table, bias):
        sums = projected(hidden, table, bias, targets, tokens_at_once=tokens_at_once, smoothing=smoothing)
        return 0.7 * sums.loss, sums

    (got, expected) = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))(hidden, table, bias) for f in (by_parts, whole)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13), got, expected)
    assert all(np.abs(gradient).max() > 0.01 for gradient in got[1])
    # And without a gradient, as in validation.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13), by_parts(hidden, table, bias), expected[0])


MEMORY = """
import jax, jax.numpy as jnp
from train.loss import label_smoothed_cross_entropy, projected_cross_entropy

BATCH, LENGTH, WIDTH = 8, 64, 16


def temporaries(vocab, loss):
    hidden = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    table = jax.ShapeDtypeStruct((vocab, WIDTH), jnp.float32)
    targets = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    return gradient.lower(hidden, table, targets).compile().memory_analysis().temp_size_in_bytes


def ours(hidden, table, targets):
    project = lambda part: part @ table.T
    return projected_cross_entropy(project, hidden, targets, smoothing=0.1, pad_id=0, tokens_at_once=4096).loss


def plain(hidden, table, targets):
    return label_smoothed_cross_entropy(hidden @ table.T, targets, smoothing=0.1, pad_id=0).loss


for loss in (ours, plain):
    small, large = (temporaries(vocab, loss) for vocab in (4_000, 12_000))
    print((large - small) / (BATCH * LENGTH * 8_000 * 4))
"""


def test_never_as_much_memory_as_the_logits_need():
    """What grows with the vocabulary, forward and backward, in arrays of (tokens, vocabulary): less than one."""
    # As users compile it: the suite's flags could take away what is measured here.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], check=False, capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ours, plain = map(float, done.stdout.split())
    assert ours < 1.0
    assert plain > 2.0, "the test wants a formula that needs more"
