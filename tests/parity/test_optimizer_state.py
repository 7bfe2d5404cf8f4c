"""Stop in one framework, go on in the other: as if it had never been stopped."""

import jax
import numpy as np
import pytest
import torch

import torch_reference
from flax_transformer import NO_DROPOUT
from parity import twins
from parity.twins_reference import training_options
from parity.weights.optimizer_state import AdamState, from_optax, from_torch, to_optax, to_torch
from parity.weights.twins import twin_mapping
from torch_reference import training as reference
from train.config import OptimizerConfig
from train.state import TrainState, make_optimizer
from train.step import Arrays, make_update
from transformer_config import TransformerConfig

BEFORE, AFTER = 4, 5
OPTIMIZER = OptimizerConfig(warmup_steps=6, clip_norm=1.0)
"""Whose schedule turns while the second framework goes on."""
CONFIG = TransformerConfig.tiny(
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout=0.0,
    tie_embeddings="all",
    tgt_vocab_size=71,
    dtype="float64",
    param_dtype="float64",
)
MAPPING = twin_mapping(tied=True)
OPTIONS = training_options(OPTIMIZER, smoothing=0.1)

pytestmark = pytest.mark.usefixtures("x64")


def batch(step):
    return twins.random_batch(CONFIG, seed=step)


def of_torch(state, steps):
    """Takes these steps; their losses."""
    losses = []
    for step in steps:
        arrays = (torch.from_numpy(batch(step)[name]) for name in ("src", "tgt_in", "tgt_out"))
        losses.append(reference.train_step(state, [reference.Batch(*arrays)], OPTIONS).loss)
    return losses


def new_torch():
    model = torch_reference.Transformer(CONFIG, generator=torch.Generator().manual_seed(0))
    return reference.initial_state(model, OPTIONS)


@pytest.fixture(scope="module")
def of_flax():
    update = None

    def steps(state, numbers):
        nonlocal update
        update = update or jax.jit(make_update(CONFIG, OPTIMIZER, smoothing=0.1))
        losses = []
        for step in numbers:
            given = Arrays.whole(*(jax.numpy.asarray(batch(step)[name]) for name in ("src", "tgt_in", "tgt_out")))
            state, metrics = update(state, given, NO_DROPOUT)
            losses.append(float(metrics.loss))
        return state, losses

    return steps


def new_flax(weights):
    params = {name: jax.numpy.asarray(array) for name, array in MAPPING.apply(weights).items()}
    return TrainState(
        step=jax.numpy.zeros((), "int32"),
        params=params,
        opt_state=make_optimizer(OPTIMIZER, d_model=CONFIG.d_model).init(params),
    )


def weights_of(state):
    return {name: tensor.detach().numpy().copy() for name, tensor in state.model.named_parameters()}


def names_of(state):
    return [name for name, _ in state.model.named_parameters()]


def assert_same(got, expected, *, atol):
    assert got.keys() == expected.keys()
    for name in got:
        if not name.endswith("k_proj.bias"):  # whose gradient is rounding alone
            np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=atol, err_msg=name)


def test_from_torch_to_flax(of_flax):
    state = new_torch()
    of_torch(state, range(BEFORE))
    adam = from_torch(state.optimizer.state_dict(), names=names_of(state)).carried(MAPPING)
    flax = new_flax(weights_of(state))
    flax = flax._replace(step=jax.numpy.int32(BEFORE), opt_state=to_optax(adam, flax.opt_state))
    flax, losses = of_flax(flax, range(BEFORE, BEFORE + AFTER))
    expected = of_torch(state, range(BEFORE, BEFORE + AFTER))
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    assert_same(dict(flax.params), MAPPING.apply(weights_of(state)), atol=1e-9)
    after = from_torch(state.optimizer.state_dict(), names=names_of(state)).carried(MAPPING)
    found = from_optax(flax.opt_state)
    assert found.step == after.step == BEFORE + AFTER
    assert_same(found.first, after.first, atol=1e-10)
    assert_same(found.second, after.second, atol=1e-10)


def test_from_flax_to_torch(of_flax):
    flax, _ = of_flax(new_flax(weights_of(new_torch())), range(BEFORE))
    state = new_torch()
    back = MAPPING.inverse().apply({name: np.asarray(array) for name, array in flax.params.items()})
    state.model.load_state_dict({name: torch.tensor(array) for name, array in back.items()})
    adam = from_optax(flax.opt_state).carried(MAPPING.inverse())
    moments = AdamState(
        step=adam.step,
        first={name: adam.first[name] for name in names_of(state)},
        second={name: adam.second[name] for name in names_of(state)},
    )
    reference.resume(
        state, step=BEFORE, optimizer=to_torch(moments, state.optimizer.state_dict(), names=names_of(state))
    )
    losses = of_torch(state, range(BEFORE, BEFORE + AFTER))
    flax, expected = of_flax(flax, range(BEFORE, BEFORE + AFTER))
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    assert_same(MAPPING.apply(weights_of(state)), {n: np.asarray(a) for n, a in flax.params.items()}, atol=1e-9)


def test_there_and_back_is_bit_identical():
    state = new_torch()
    of_torch(state, range(2))
    adam = from_torch(state.optimizer.state_dict(), names=names_of(state))
    flax = new_flax(weights_of(state))
    again = from_optax(to_optax(adam.carried(MAPPING), flax.opt_state)).carried(MAPPING.inverse())
    for moments, back in ((adam.first, again.first), (adam.second, again.second)):
        assert all((back[name] == moments[name]).all() for name in moments)


def test_what_is_no_state_of_adam_is_named():
    state = new_torch()
    names = names_of(state)
    with pytest.raises(ValueError, match=r"none of src_embedding\.weight, encoder"):
        from_torch(state.optimizer.state_dict(), names=names)
    of_torch(state, range(1))
    found = state.optimizer.state_dict()
    with pytest.raises(ValueError, match=f"a name for each of {len(names)} parameters, in their order, got 1"):
        from_torch(found, names=names[:1])
    found["state"][0]["max_exp_avg_sq"] = torch.zeros(1)
    with pytest.raises(ValueError, match="Adam or AdamW, got max_exp_avg_sq besides"):
        from_torch(found, names=names)
    del found["state"][0]["max_exp_avg_sq"]
    found["state"][0]["step"] = torch.tensor(7.0)
    with pytest.raises(ValueError, match=r"one number of steps, got \[1, 7\]"):
        from_torch(found, names=names)
    found["state"][0]["step"] = torch.tensor(1.0)
    with pytest.raises(ValueError, match="both moments of every parameter, got one of a"):
        AdamState(step=1, first={"a": np.ones(1)}, second={})
    with pytest.raises(ValueError, match="one state of Adam over a dictionary of parameters, got 0"):
        from_optax(())
    named = torch.optim.AdamW(state.model.named_parameters())
    named.load_state_dict({**named.state_dict(), "state": found["state"]})
    assert from_torch(named.state_dict()).first.keys() == set(names)
