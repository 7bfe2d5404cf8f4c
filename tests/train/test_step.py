import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.batching import Batch
from train.config import OptimizerConfig, TrainConfig
from train.loss import label_smoothed_cross_entropy
from train.parallel import compile_evaluation_step, compile_train_step, to_device, to_host
from train.state import initial_state
from train.step import Arrays, make_loss
from transformer_config import TransformerConfig

VOCAB = 14
"""The copy task's."""


def config(tmp_path, *, dropout=0.0, **fields) -> TrainConfig:
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    model = TransformerConfig.tiny(dropout=dropout, **layers, **fields)
    return TrainConfig(run_dir=tmp_path, model=model, optimizer=OptimizerConfig(warmup_steps=30))


def batch(seed=0, *, rows=8, length=6) -> Batch:
    """A copy task over ids 4 .. 13: the target is the source."""
    rng = np.random.default_rng(seed)
    out = rng.integers(4, 14, (rows, length), dtype=np.int32)
    for row in range(rows):
        real = length - row % 3
        out[row, real - 1] = 2
        out[row, real:] = 0
    tgt_in = np.where(out == 0, 0, np.concatenate([np.ones((rows, 1), np.int32), out[:, :-1]], axis=1)).astype(np.int32)
    return Batch(src=out.copy(), tgt_in=tgt_in, tgt_out=out)


def digest(params) -> str:
    return hashlib.sha256(b"".join(np.asarray(params[name]).tobytes() for name in sorted(params))).hexdigest()


def test_a_step_changes_every_parameter_and_says_what_it_did(tmp_path):
    """P25."""
    run = config(tmp_path, dropout=0.1)
    state = to_host(initial_state(run, jax.random.key(0)))
    step = compile_train_step(run)
    after, metrics = step(jax.device_put(state), to_device(batch(), vocab_size=VOCAB), jax.random.key(1))
    assert digest(after.params) != digest(state.params)
    for name, value in state.params.items():
        if name.endswith("k_proj.bias"):
            continue  # its true gradient is zero
        assert (np.asarray(after.params[name]) != value).any(), name
    assert int(after.step) == int(metrics.step) == 1
    assert int(metrics.num_tokens) == batch().num_tokens
    assert float(metrics.grad_norm) > 0
    np.testing.assert_allclose(metrics.learning_rate, 30**-0.5 * 30**-1.5, rtol=1e-6)
    assert 0 < float(metrics.nll) != float(metrics.loss)


def test_loss_falls_on_a_copy_task_and_compiles_once(tmp_path):
    run = config(tmp_path, dropout=0.1)
    state, step, evaluate = (
        initial_state(run, jax.random.key(0)),
        compile_train_step(run),
        compile_evaluation_step(run.model),
    )
    before = evaluate(state.params, to_device(batch(99), vocab_size=VOCAB))
    for i in range(60):
        state, metrics = step(state, to_device(batch(i % 20), vocab_size=VOCAB), jax.random.key(1))
    after = evaluate(state.params, to_device(batch(99), vocab_size=VOCAB))
    assert int(metrics.step) == 60
    assert float(after.nll) < 0.6 * float(before.nll)
    assert int(after.num_tokens) == batch(99).num_tokens
    assert (step.compilations, evaluate.compilations) == (1, 1)  # T6
    evaluate(state.params, to_device(batch(rows=3), vocab_size=VOCAB))
    assert evaluate.compilations == 2


def test_seeds(tmp_path):
    """One seed gives one result; other keys for initialisation or dropout give others; so does the step's number."""
    run = config(tmp_path, dropout=0.3)
    step = compile_train_step(run)
    states = [to_host(initial_state(run, jax.random.key(seed))) for seed in (0, 1)]

    def one(init, dropout, number=0):
        state = jax.device_put(states[init]._replace(step=np.asarray(number, np.int32)))
        return float(step(state, to_device(batch(), vocab_size=VOCAB), jax.random.key(dropout))[1].loss)

    losses = [one(0, 0), one(1, 0), one(0, 1), one(0, 0, 1)]
    assert one(0, 0) == losses[0]
    assert len(set(losses)) == 4


@pytest.mark.usefixtures("x64")
def test_gradients_do_not_depend_on_padding(tmp_path):
    """T1: more columns of padding, and rows of nothing else."""
    model = config(tmp_path, dtype="float64", param_dtype="float64", attention="blockwise").model
    params = initial_state(config(tmp_path, dtype="float64", param_dtype="float64"), jax.random.key(0)).params
    loss = make_loss(model, smoothing=0.1)

    @jax.jit
    def gradients(params, arrays):
        def mean(params):
            sums = loss(params, arrays)
            return sums.loss / sums.num_tokens

        return jax.grad(mean)(params)

    plain = batch()
    wider = Arrays(
        *(
            jnp.pad(x, ((0, 3), (0, extra)))
            for x, extra in zip(to_device(plain, vocab_size=VOCAB), (5, 2, 2), strict=True)
        )
    )
    first, second = gradients(params, to_device(plain, vocab_size=VOCAB)), gradients(params, wider)
    assert max(float(jnp.abs(value).max()) for value in first.values()) > 0.01
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, rtol=0, atol=1e-14, err_msg=name)


def test_a_batch_of_nothing_is_finite(tmp_path):
    run = config(tmp_path)
    empty = Arrays(*(jnp.zeros((2, 3), jnp.int32) for _ in range(3)))
    state, metrics = compile_train_step(run)(initial_state(run, jax.random.key(0)), empty, jax.random.key(0))
    assert float(metrics.loss) == 0
    assert all(np.isfinite(value).all() for value in state.params.values())


def test_evaluation_is_without_smoothing_and_dropout(tmp_path):
    run = config(tmp_path, dropout=0.5)
    params = initial_state(run, jax.random.key(0)).params
    arrays = to_device(batch(), vocab_size=VOCAB)
    sums = compile_evaluation_step(run.model)(params, arrays)
    assert float(sums.loss) == float(sums.nll)
    from flax_transformer.parameters import abstract_model, with_parameters

    logits = jax.jit(lambda p: with_parameters(abstract_model(run.model), p)(arrays.src, arrays.tgt_in))(params)
    by_hand = label_smoothed_cross_entropy(logits, arrays.tgt_out, smoothing=0.0, pad_id=0)
    np.testing.assert_allclose(sums.nll, by_hand.nll, rtol=1e-6)


def test_ids_outside_the_vocabulary_are_refused_on_the_host():
    """A compiled gather would clamp them."""
    with pytest.raises(ValueError, match=r"src: expected ids in \[0, 8\), got 13"):
        to_device(batch(), vocab_size=8)
