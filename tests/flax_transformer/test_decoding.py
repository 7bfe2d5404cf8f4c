import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_transformer.decoding import greedy
from flax_transformer.parameters import abstract_model, parameters, with_parameters
from transformer_config import LengthConfig

MAX_LEN = 12


@functools.cache
def compiled(config, max_len):
    model = abstract_model(config)
    return jax.jit(
        lambda params, src: greedy(with_parameters(model, params), src, config=LengthConfig(max_len=max_len)).ids[:, 0]
    )


def decode(model, src, *, max_len=MAX_LEN):
    return np.asarray(compiled(model.config, max_len)(parameters(model), src))


def uncached(model, src, *, max_len=MAX_LEN):
    """The argmax of the whole model run anew for every token, one compilation by padding the target."""
    config = model.config
    run = jax.jit(lambda p, s, t: with_parameters(model, p)(s, t))
    tgt = np.full((len(src), max_len + 1), config.pad_id, np.int32)
    tgt[:, 0] = config.bos_id
    finished = (src == config.pad_id).all(axis=1)
    for i in range(max_len):
        logits = np.array(run(parameters(model), src, tgt))[:, i]
        logits[:, [config.pad_id, config.bos_id]] = -np.inf
        tgt[:, i + 1] = np.where(finished, config.pad_id, logits.argmax(axis=1))
        finished |= tgt[:, i + 1] == config.eos_id
    return tgt[:, 1:]


def sources(seed=0, *, batch=6, length=7):
    rng = np.random.default_rng(seed)
    src = rng.integers(4, 60, (batch, length), dtype=np.int32)
    for row in range(1, batch):
        src[row, length - row % length :] = 0
    src[-1] = 0
    return src


@pytest.fixture
def ending(build):
    """Builds a model that says different things for different sources, and ends at different lengths.

    Untrained models mostly repeat one piece; large weights make them livelier, and `eos_id` is a piece they do say.
    """

    def ending(eos_id=66, **changes):
        model = build(tie_embeddings="none", eos_id=eos_id, **changes)
        lively = {
            name: value * (4 if name.endswith(("kernel", "table")) else 1) for name, value in parameters(model).items()
        }
        return with_parameters(model, lively)

    return ending


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "changes",
    [
        {"eos_id": 66},
        {"eos_id": 45, "norm_order": "pre", "window": 2},
        {"eos_id": 55, "attention": "blockwise", "positions": "learned", "position_offset": 2},
        {"eos_id": 66, "bos_id": 0, "positions_skip_padding": True, "final_norm": "always"},
        {"eos_id": 66, "gradient_checkpointing": True},
    ],
)
def test_cached_equals_uncached(ending, changes):
    """D4."""
    model, src = ending(**changes), sources()
    got = decode(model, src)
    assert (got == uncached(model, src)).all()
    lengths = (got != 0).sum(axis=1)
    assert len(set(lengths[:-1])) > 1, "the test wants sentences of different lengths"


def test_output_is_made_of_pieces_then_one_end_then_padding(ending):
    model, src = ending(), sources(1)
    got = decode(model, src)
    assert (got[-1] == 0).all()  # a row that is all padding is over at once
    ends = [row[row != 0][-1] == 66 for row in got[:-1]]
    assert len(set(ends)) == 2, "the test wants sentences that end and sentences that do not"
    for row, ended in zip(got[:-1], ends, strict=True):
        length = (row != 0).sum()
        assert length == MAX_LEN or ended
        assert not row[length:].any()
        assert 66 not in row[: length - 1]
        assert 1 not in row  # bos_id


def test_specials_are_never_chosen(build):
    """Even where they are likeliest by far."""
    model = build(tie_embeddings="none")
    values = parameters(model)
    bias = values["output_projection.bias"].at[jnp.array([0, 1])].set(100.0)
    got = decode(with_parameters(model, {**values, "output_projection.bias": bias}), sources())
    assert (got[:-1] > 1).any()
    assert 1 not in got


@pytest.mark.usefixtures("x64")
def test_a_sentence_does_not_depend_on_its_batch(ending):
    """D3: neighbours, batch size, padding."""
    model, src = ending(), sources(2)
    together = decode(model, src)
    assert (decode(model, src[::-1].copy())[::-1] == together).all()
    assert (decode(model, src[2:4]) == together[2:4]).all()
    assert (decode(model, np.pad(src, ((0, 0), (0, 4)))) == together).all()
    longer = decode(model, src, max_len=MAX_LEN + 5)
    assert (longer[:, :MAX_LEN] == together).all()


def test_one_compilation_for_any_content(ending):
    """D5."""
    model, traces = ending(), []

    @jax.jit
    def run(params, src):
        traces.append(1)
        return greedy(with_parameters(model, params), src, config=LengthConfig(max_len=MAX_LEN)).ids[:, 0]

    outputs = [np.asarray(run(parameters(model), sources(seed))) for seed in range(4)]
    assert len(traces) == 1
    assert len({x.tobytes() for x in outputs}) == 4


def test_beyond_a_learned_table(build):
    with pytest.raises(ValueError, match="at most 33 positions"):
        decode(build(positions="learned"), sources(), max_len=34)
