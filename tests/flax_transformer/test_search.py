"""Searches and the slots they share, beyond what `tests/parity/test_beam.py` holds to the torch reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_transformer.beam import CHUNK, BeamSearch, top_k
from flax_transformer.decoding import decode
from flax_transformer.parameters import abstract_model, parameters, with_parameters
from flax_transformer.sampling import Sampling, _narrowed
from transformer_config import BeamConfig, LengthConfig, SamplingConfig

SEARCHES = {
    "greedy": lambda model: Sampling(LengthConfig(max_len=11), model),
    "samples": lambda model: Sampling(SamplingConfig(num_samples=3, max_len=11), model, seed=4),
    "beam": lambda model: BeamSearch(BeamConfig(beam_size=3, num_hypotheses=2, max_len=11), model),
}


def lively(model):
    values = {n: v * (4 if n.endswith(("kernel", "table")) else 1) for n, v in parameters(model).items()}
    return with_parameters(model, values)


def sources(batch=21, length=7):
    rng = np.random.default_rng(0)
    src = rng.integers(4, 60, (batch, length), dtype=np.int32)
    for row in range(batch):
        src[row, 1 + row * 3 % length :] = 0
    src[4] = 0
    return src


def decoded(model, search, src, slots, *, room=None):
    abstract = abstract_model(model.config)

    def run(params, src):
        return decode(with_parameters(abstract, params), src, search=search, slots=slots, room=room)

    return jax.device_get(jax.jit(run)(parameters(model), src))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", SEARCHES)
def test_slots_change_nothing(build, kind):
    """D3: sentences that wait for a slot, that take another's, that are left over; an empty one among them."""
    model, src = lively(build(tie_embeddings="none", eos_id=66)), sources()
    search = SEARCHES[kind](model.config)
    together = decoded(model, search, src, None)
    assert not together.lengths[4].any()
    assert len(set(together.lengths[:, 0].tolist())) > 3, "the test wants sentences of many lengths"
    for slots in (1, 2, 5, 16, 21, 40):
        found = decoded(model, search, src, slots)
        for name in ("ids", "lengths", "ended"):
            assert (getattr(found, name) == getattr(together, name)).all(), (slots, name)
        np.testing.assert_allclose(found.scores, together.scores, rtol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", SEARCHES)
@pytest.mark.parametrize("slots", [4, None])
def test_less_room_finds_the_same_or_nothing(build, kind, slots):
    """What takes too long has no hypothesis, whatever else is decoded after it in the same slots."""
    model, src = lively(build(tie_embeddings="none", eos_id=66)), sources()
    search = SEARCHES[kind](model.config)
    whole = decoded(model, search, src, slots)
    for room in (1, 5, 8, 11, 30):
        found = decoded(model, search, src, slots, room=room)
        assert found.ids.shape[-1] == min(room, 11)
        there = found.lengths[:, 0] > 0
        assert (found.lengths[~there] == 0).all()
        assert (found.ids[~there] == model.config.pad_id).all()
        assert (found.scores[~there] == -np.inf).all()
        for name in ("ids", "lengths", "ended"):
            expected = getattr(whole, name)
            expected = expected[..., :room] if name == "ids" else expected
            assert (getattr(found, name)[there] == expected[there]).all(), (room, name)
        np.testing.assert_allclose(found.scores[there], whole.scores[there], rtol=1e-12)
        real = src.any(axis=1)
        if room >= 11:
            assert (there == real).all()
        elif kind == "greedy":
            assert (there == real & whole.ended[:, 0] & (whole.lengths[:, 0] <= room)).all()
        assert room < 8 or there.any(), "the test wants sentences that are done early"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"slots": 0}, "slots: expected at least 1, got 0"), ({"room": 0}, "room: expected at least 1 piece, got 0")],
)
def test_no_slot_and_no_room_are_refused(build, options, message):
    model = build()
    with pytest.raises(ValueError, match=message):
        decode(model, jnp.ones((2, 3), jnp.int32), search=SEARCHES["greedy"](model.config), **options)


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_top_k_is_the_one_of_jax(data):
    """Many equal values among them."""
    classes = data.draw(st.sampled_from([5, 64, 8 * CHUNK - 1, 20 * CHUNK, 20 * CHUNK + 7]))
    k = data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 1_000)))
    x = rng.integers(0, data.draw(st.sampled_from([2, 50, 10**6])), (2, 3, classes)).astype(np.float32)
    got, expected = top_k(jnp.asarray(x), k), jax.lax.top_k(jnp.asarray(x), k)
    assert (got[0] == expected[0]).all()
    assert (got[1] == expected[1]).all()


def test_samples_are_as_frequent_as_they_are_likely(build):
    """First pieces of many samples against the model's own distribution, what is never chosen left out."""
    model = build(tie_embeddings="none", eos_id=66)
    src = sources()[:1]
    samples = 4_000
    search = Sampling(SamplingConfig(num_samples=samples, max_len=1, temperature=0.7), model.config)
    ids = decoded(model, search, src, None).ids[0, :, 0]
    logits = np.array(model(jnp.asarray(src), jnp.array([[model.config.bos_id]])))[0, 0] / 0.7
    logits[[model.config.pad_id, model.config.bos_id]] = -np.inf
    likely = np.exp(logits - logits.max())
    likely /= likely.sum()
    often = np.bincount(ids, minlength=len(likely))
    assert often[likely == 0].sum() == 0
    expected = samples * likely
    many = expected > 5
    assert many.sum() > 10
    chi_square = ((often - expected)[many] ** 2 / expected[many]).sum()
    assert chi_square < many.sum() + 6 * (2 * many.sum()) ** 0.5  # its standard deviation is √(2 · degrees of freedom)


def test_scores_of_samples_are_the_models(build):
    """Neither tempered nor narrowed: those of the whole model run on what was drawn."""
    model = lively(build(tie_embeddings="none", eos_id=66))
    config, src = model.config, sources()[:3]
    search = Sampling(SamplingConfig(num_samples=2, max_len=6, temperature=2.0, top_k=9), config)
    found = decoded(model, search, src, None)
    for sentence, sample in np.ndindex(3, 2):
        ids = found.ids[sentence, sample, : found.lengths[sentence, sample]]
        tgt = jnp.array([[config.bos_id, *ids[:-1].tolist()]])
        log_probs = jax.nn.log_softmax(model(jnp.asarray(src[sentence][None]), tgt))[0]
        expected = sum(float(log_probs[i, piece]) for i, piece in enumerate(ids))
        assert found.scores[sentence, sample] == pytest.approx(expected, rel=1e-4)


def test_what_is_drawn_from():
    logits = jnp.log(jnp.array([[[0.05, 0.4, 0.1, 0.25, 0.2]]]))

    def kept(**options):
        return np.flatnonzero(np.isfinite(_narrowed(logits, SamplingConfig(**options))[0, 0])).tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [1, 3]
    assert kept(top_k=99) == [0, 1, 2, 3, 4]
    assert kept(top_p=0.39) == [1]
    assert kept(top_p=0.41) == [1, 3]
    assert kept(top_p=0.86) == [1, 2, 3, 4]
    assert kept(top_p=1.0) == [0, 1, 2, 3, 4]
    assert kept(top_k=3, top_p=0.6) == [1, 3]  # of what top_k has left: 0.47, 0.29, 0.24


def test_limits_by_the_source(build):
    """Shortest and longest, absolute and relative."""
    model = lively(build(tie_embeddings="none", eos_id=66))
    src = sources()
    pieces = (src != 0).sum(axis=1)
    for options in (
        {"min_len": 4},
        {"min_len_ratio": 0.9},
        {"max_len_ratio": 0.1},
        {"min_len": 2, "min_len_ratio": 0.5, "max_len_ratio": 0.3},
        {"max_len_growth": 3.4},
        {"max_len_growth": 9.0, "max_len_ratio": 3.0},
    ):
        config = LengthConfig(max_len=14, **options)
        for search in (Sampling(config, model.config), BeamSearch(BeamConfig(max_len=14, **options), model.config)):
            found = decoded(model, search, src, 6)
            limit = np.maximum(14, np.floor(options.get("max_len_growth", 0.0) * pieces))
            limit = np.minimum(limit, np.floor(options.get("max_len_ratio", 9) * pieces) + 10)
            least = np.maximum(options.get("min_len", 0), np.ceil(options.get("min_len_ratio", 0.0) * pieces))
            real = pieces > 0
            lengths, ended = found.lengths[real, 0], found.ended[real, 0]
            assert (lengths <= limit[real]).all()
            assert (lengths > np.minimum(least, limit - 1)[real]).all()
            assert (ended | (lengths == limit[real])).all()
