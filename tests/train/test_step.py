import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_transformer.parameters import abstract_model, with_parameters
from train.batching import Batch, Bucket
from train.config import OptimizerConfig, ParallelConfig, TrainConfig
from train.loss import label_smoothed_cross_entropy
from train.parallel import Devices
from train.state import FIRST_LOSS_SCALE, initial_state
from train.step import Arrays, make_loss, make_train_step
from transformer_config import TransformerConfig

VOCAB = 14
"""The copy task's."""


DEVICES = Devices(ParallelConfig(num_devices=1))


def config(tmp_path, *, dropout=0.0, seed=0, optimizer=None, **fields) -> TrainConfig:
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    model = TransformerConfig.tiny(dropout=dropout, **layers, **fields)
    return TrainConfig(
        run_dir=tmp_path, model=model, optimizer=optimizer or OptimizerConfig(warmup_steps=30), seed=seed
    )


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


def arrays(batch: Batch, *, vocab_size: int = VOCAB) -> Arrays:
    """The batch as one micro-batch on one device."""

    def rows(start: int, stop: int) -> Batch:
        return Batch(src=batch.src[start:stop], tgt_in=batch.tgt_in[start:stop], tgt_out=batch.tgt_out[start:stop])

    return DEVICES.place_batch(batch.shape, rows, vocab_sizes=(vocab_size, vocab_size))


def on_host(state):
    """Numbers that stay when the state is given up to a step."""
    return jax.tree.map(np.array, state)


def digest(params) -> str:
    return hashlib.sha256(b"".join(np.asarray(params[name]).tobytes() for name in sorted(params))).hexdigest()


def test_a_step_changes_every_parameter_and_says_what_it_did(tmp_path):
    """P25."""
    run = config(tmp_path, dropout=0.1)
    state = on_host(initial_state(run))
    step = DEVICES.compile_train_step(run)
    after, metrics = step(DEVICES.place_state(state), arrays(batch()))
    assert digest(after.params) != digest(state.params)
    for name, value in state.params.items():
        if name.endswith("k_proj.bias"):
            continue  # its true gradient is zero
        assert (np.asarray(after.params[name]) != value).any(), name
    assert int(after.step) == int(metrics.step) == 1
    assert int(metrics.num_tokens) == batch().num_tokens
    assert float(metrics.grad_norm) > 0
    assert bool(metrics.applied)
    assert metrics.loss_scale is after.loss_scale is after.ema is None
    np.testing.assert_allclose(metrics.learning_rate, 30**-0.5 * 30**-1.5, rtol=1e-6)
    assert 0 < float(metrics.nll) != float(metrics.loss)


def test_loss_falls_on_a_copy_task_and_compiles_once(tmp_path):
    run = config(tmp_path, dropout=0.1)
    state, step, evaluate = (
        DEVICES.place_state(initial_state(run)),
        DEVICES.compile_train_step(run),
        DEVICES.compile_evaluation_step(run.model),
    )
    before = evaluate(state.params, arrays(batch(99)))
    for i in range(60):
        state, metrics = step(state, arrays(batch(i % 20)))
    after = evaluate(state.params, arrays(batch(99)))
    assert int(metrics.step) == 60
    assert float(after.nll) < 0.6 * float(before.nll)
    assert int(after.num_tokens) == batch(99).num_tokens
    assert (step.compilations, evaluate.compilations) == (1, 1)  # T6
    evaluate(state.params, arrays(batch(rows=3)))
    assert evaluate.compilations == 2


def test_seeds(tmp_path):
    """One seed gives one result; other seeds of initialisation or dropout give others; so does the step's number."""
    runs = [config(tmp_path, dropout=0.3, seed=seed) for seed in (0, 1)]
    steps = [DEVICES.compile_train_step(run) for run in runs]
    states = [on_host(initial_state(run)) for run in runs]

    def one(init, dropout, number=0):
        state = DEVICES.place_state(states[init]._replace(step=np.asarray(number, np.int32)))
        return float(steps[dropout](state, arrays(batch()))[1].loss)

    losses = [one(0, 0), one(1, 0), one(0, 1), one(0, 0, 1)]
    assert one(0, 0) == losses[0]
    assert len(set(losses)) == 4


@pytest.mark.usefixtures("x64")
def test_gradients_do_not_depend_on_padding(tmp_path):
    """T1: more columns of padding, and rows of nothing else."""
    model = config(tmp_path, dtype="float64", param_dtype="float64", attention="blockwise").model
    params = initial_state(config(tmp_path, dtype="float64", param_dtype="float64")).params
    loss = make_loss(model, smoothing=0.1)

    @jax.jit
    def gradients(params, micro):
        def mean(params):
            sums = loss(params, micro)
            return sums.loss / sums.num_tokens

        return jax.grad(mean)(params)

    plain = jax.tree.map(lambda x: x[0], arrays(batch()))
    wider = Arrays(
        *(jnp.pad(x, ((0, 3), (0, extra))) for x, extra in zip(plain[:3], (5, 2, 2), strict=True)),
        jnp.arange(11, dtype=jnp.int32),
    )
    first, second = gradients(params, plain), gradients(params, wider)
    assert max(float(jnp.abs(value).max()) for value in first.values()) > 0.01
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, rtol=0, atol=1e-14, err_msg=name)


def test_a_batch_of_nothing_is_finite(tmp_path):
    run = config(tmp_path)
    empty = Arrays.whole(*(jnp.zeros((2, 3), jnp.int32) for _ in range(3)))
    state, metrics = jax.jit(make_train_step(run))(initial_state(run), empty)
    assert float(metrics.loss) == 0
    assert all(np.isfinite(value).all() for value in state.params.values())


def test_evaluation_is_without_smoothing_and_dropout(tmp_path):
    run = config(tmp_path, dropout=0.5)
    params = DEVICES.place_params(initial_state(run).params)
    placed = arrays(batch())
    sums = DEVICES.compile_evaluation_step(run.model)(params, placed)
    assert float(sums.loss) == float(sums.nll)
    logits = jax.jit(lambda p: with_parameters(abstract_model(run.model), p)(placed.src[0], placed.tgt_in[0]))(params)
    by_hand = label_smoothed_cross_entropy(logits, placed.tgt_out[0], smoothing=0.0, pad_id=0)
    np.testing.assert_allclose(sums.nll, by_hand.nll, rtol=1e-6)


def test_ids_outside_the_vocabulary_are_refused_on_the_host():
    """A compiled gather would clamp them."""
    with pytest.raises(ValueError, match=r"src: expected ids in \[0, 8\), got 13"):
        arrays(batch(), vocab_size=8)
    assert arrays(batch()).src.shape == (1, 8, 6)
    assert batch().shape == Bucket(src_len=6, tgt_len=6, batch_size=8)


# Steps that are not applied (T13), and float16 (T15).


def test_a_step_without_a_finite_gradient_changes_nothing_but_its_number(tmp_path):
    run = config(tmp_path, optimizer=OptimizerConfig(warmup_steps=30, ema_decay=0.9))
    step = DEVICES.compile_train_step(run)
    state, _ = step(DEVICES.place_state(initial_state(run)), arrays(batch()))
    name = "tgt_embedding.weight"
    broken = on_host(state)
    broken.params[name][5, 0] = np.nan
    after, metrics = step(DEVICES.place_state(broken), arrays(batch(1)))
    assert not bool(metrics.applied)
    assert not np.isfinite(metrics.loss)
    assert int(after.step) == int(metrics.step) == 2
    for (path, new), old in zip(
        jax.tree.leaves_with_path(after._replace(step=0)), jax.tree.leaves(broken._replace(step=0)), strict=True
    ):
        np.testing.assert_array_equal(new, old, err_msg=str(path))
    # From sound parameters the next step is taken.
    assert bool(step(DEVICES.place_state(on_host(state)), arrays(batch(1)))[1].applied)


def test_the_loss_scale_halves_on_overflow_and_doubles_after_enough_good_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("train.state.GROWTH_INTERVAL", 3)
    run = config(tmp_path, dtype="float16")
    step = DEVICES.compile_train_step(run)
    state = initial_state(run)
    assert float(state.loss_scale.scale) == FIRST_LOSS_SCALE
    state = DEVICES.place_state(state._replace(loss_scale=state.loss_scale._replace(scale=jnp.float32(2.0**30))))
    scales, applied = [], []
    for i in range(40):
        before = on_host(state)
        state, metrics = step(state, arrays(batch(i % 20)))
        scales.append(float(metrics.loss_scale))
        applied.append(bool(metrics.applied))
        assert scales[-1] == before.loss_scale.scale
        assert np.isfinite(metrics.loss)
        same = digest(state.params) == digest(before.params)
        assert same == (not applied[-1])
        if not applied[-1]:  # moments and the schedule's count too
            assert all(map(np.array_equal, jax.tree.leaves(state.opt_state), jax.tree.leaves(before.opt_state)))
            assert int(state.updates) == int(before.step) - int(before.loss_scale.skipped)
    expected, good = [2.0**30], 0
    for ok in applied[:-1]:
        good = good + 1 if ok else 0
        factor = 0.5 if not ok else 2.0 if good == 3 else 1.0
        good = 0 if good == 3 else good
        expected.append(expected[-1] * factor)
    assert scales == expected
    assert not applied[0]
    assert 3 < sum(applied) < 40
    assert max(np.diff(scales)) > 0, "the test wants a scale that grows"
    assert int(state.step) == 40
    assert int(state.updates) == sum(applied)


def test_float16_learns_with_the_schedule_of_the_steps_that_were_applied(tmp_path):
    run = config(tmp_path, dtype="float16")
    step, evaluate = DEVICES.compile_train_step(run), DEVICES.compile_evaluation_step(run.model)
    state = initial_state(run)
    assert {str(x.dtype) for x in state.params.values()} == {"float32"}
    # So high a scale that the first steps overflow.
    state = DEVICES.place_state(state._replace(loss_scale=state.loss_scale._replace(scale=jnp.float32(2.0**28))))
    before = evaluate(state.params, arrays(batch(99)))
    rates, applied = [], []
    for i in range(60):
        state, metrics = step(state, arrays(batch(i % 20)))
        rates.append(float(metrics.learning_rate))
        applied.append(bool(metrics.applied))
    assert not applied[0]
    assert rates[: applied.index(True) + 1] == [rates[0]] * (applied.index(True) + 1)
    after = evaluate(state.params, arrays(batch(99)))
    assert float(after.nll) < 0.7 * float(before.nll)
