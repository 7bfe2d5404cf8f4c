"""Beam search of both twins with the same weights, in float64: the same hypotheses, in the same order, scores equal."""

import itertools

import jax
import numpy as np
import pytest
import torch

import flax_transformer.decoding
import torch_reference.beam
from flax_transformer.parameters import abstract_model, with_parameters
from parity.tolerances import SCORES_RELATIVE
from parity.weights.twins import twin_mapping
from tests.parity.test_decoding import ONE_LAYER, VARIANTS, config_of, lively_weights, sources
from transformer_config import BeamConfig

pytestmark = pytest.mark.usefixtures("x64")

STOPPING = ("bound", "transformers", "transformers_early", "transformers_never", "ctranslate2")
SEARCHES = {
    **{rule: BeamConfig(beam_size=3, num_hypotheses=3, stopping=rule, max_len=9) for rule in STOPPING},
    **{
        f"{rule}, no penalty": BeamConfig(
            beam_size=3, num_hypotheses=2, stopping=rule, max_len=9, length_penalty="none"
        )
        for rule in STOPPING
    },
    "one beam": BeamConfig(beam_size=1, max_len=9),
    "GNMT": BeamConfig(beam_size=4, num_hypotheses=4, length_penalty="gnmt", alpha=1.0, max_len=8),
    "lengths": BeamConfig(beam_size=2, num_hypotheses=2, min_len=3, max_len=14, max_len_ratio=0.4),
    "lengths that grow": BeamConfig(beam_size=2, num_hypotheses=2, max_len=3, max_len_growth=1.7, alpha=0.0),
    "what is never chosen": BeamConfig(beam_size=3, num_hypotheses=2, never=(0, 5, 9, 66), max_len=9),
    "a first piece": BeamConfig(beam_size=3, num_hypotheses=3, first_id=7, max_len=9),
    "a forced end": BeamConfig(beam_size=3, num_hypotheses=3, forced_end=True, max_len=4),
    "all that is forced": BeamConfig(
        beam_size=3, num_hypotheses=3, stopping="transformers", first_id=1, forced_end=True, max_len=4
    ),
    "lengths by the source": BeamConfig(beam_size=2, num_hypotheses=2, min_len_ratio=0.9, max_len=12, alpha=2.0),
}


def torch_beam(model_config, weights, src, search):
    module = torch_reference.Transformer(model_config, generator=torch.Generator().manual_seed(1))
    module.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()}, strict=False)
    found = torch_reference.beam.beam_search(module, torch.from_numpy(src), config=search)
    return {name: array.numpy() for name, array in found._asdict().items()}


def flax_beam(model_config, weights, src, search):
    params = twin_mapping(tied=model_config.tie_embeddings == "all").apply(weights)
    module = abstract_model(model_config)

    @jax.jit
    def run(params, src):
        return flax_transformer.decoding.beam_search(with_parameters(module, params), src, config=search)

    return {name: np.asarray(array) for name, array in run(params, src)._asdict().items()}


def assert_equal(got, expected):
    for name in ("ids", "lengths", "ended"):
        assert got[name].tolist() == expected[name].tolist(), name
    for name in ("scores", "log_probs"):
        np.testing.assert_allclose(got[name], expected[name], rtol=SCORES_RELATIVE)


@pytest.mark.parametrize("search", SEARCHES)
def test_every_search(search):
    config = config_of(**VARIANTS["tiny"])
    weights, src = lively_weights(config), sources(config)
    expected, got = (beam(config, weights, src, SEARCHES[search]) for beam in (torch_beam, flax_beam))
    assert_equal(got, expected)
    assert not got["lengths"][-1].any()  # all padding
    assert (got["lengths"][:-1, 0] > 0).all()
    assert got["ended"].any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_model(variant):
    config = config_of(**VARIANTS[variant])
    weights, src = lively_weights(config), sources(config)
    search = BeamConfig(beam_size=3, num_hypotheses=3, max_len=9)
    expected, got = (beam(config, weights, src, search) for beam in (torch_beam, flax_beam))
    assert_equal(got, expected)


def test_the_rules_differ():
    """Otherwise the tests above would not tell them apart."""
    config = config_of(**ONE_LAYER, tie_embeddings="none", eos_id=2)
    weights = {name: array / (2 if array.ndim > 1 else 1) for name, array in lively_weights(config).items()}
    weights["output_projection.bias"][config.eos_id] += 1.5
    src = np.random.default_rng(1).integers(4, 60, (100, 7), dtype=np.int32)
    found = {}
    for rule in STOPPING:
        searches = (
            BeamConfig(beam_size=3, num_hypotheses=2, stopping=rule, alpha=alpha, max_len=20) for alpha in (0.0, 1.0)
        )
        found[rule] = [flax_beam(config, weights, src, search)["ids"].tolist() for search in searches]
    for first, second in itertools.combinations(STOPPING, 2):
        # Without a penalty CTranslate2 stops earlier, and mostly with the same.
        if (first, second) != ("transformers_early", "ctranslate2"):
            assert found[first] != found[second], (first, second)


def all_hypotheses(config, weights, row, *, max_len):
    """Every hypothesis of a tiny vocabulary, with its log-probability."""
    module = torch_reference.Transformer(config, generator=torch.Generator().manual_seed(1))
    module.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()}, strict=False)
    pieces = [i for i in range(config.tgt_vocab_size) if i not in (config.pad_id, config.bos_id, config.eos_id)]
    found = {}
    for length in range(max_len):
        for ids in itertools.product(pieces, repeat=length):
            whole = (*ids, config.eos_id)
            tgt = torch.tensor([[config.bos_id, *ids]])
            with torch.no_grad():
                log_probs = module(torch.from_numpy(row[None]), tgt)[0].log_softmax(-1)
            found[whole] = sum(log_probs[i, piece].item() for i, piece in enumerate(whole))
    return found


@pytest.mark.parametrize("penalty", ["none", "length", "gnmt"])
def test_a_beam_as_wide_as_all_there_is_finds_the_best_of_all(penalty):
    """D1, D2: what `bound` stops at is the best, found by trying everything."""
    config = config_of(
        num_encoder_layers=1, num_decoder_layers=1, src_vocab_size=71, tgt_vocab_size=7, eos_id=2, tie_embeddings="none"
    )
    weights = {name: array * (3 if name.startswith("output") else 1) for name, array in lively_weights(config).items()}
    src = sources(config)[:4]
    # Four pieces, at most two of them before the end: 80 continuations at most, of which all are kept.
    search = BeamConfig(beam_size=80, num_hypotheses=5, length_penalty=penalty, alpha=1.5, max_len=3)
    got = flax_beam(config, weights, src, search)
    divisor = {"none": lambda n: 1.0, "length": lambda n: n**1.5, "gnmt": lambda n: ((5 + n) / 6) ** 1.5}[penalty]
    lengths = set()
    for row, ids, scores in zip(src, got["ids"], got["scores"], strict=True):
        all_scores = {
            ids: value / divisor(len(ids)) for ids, value in all_hypotheses(config, weights, row, max_len=3).items()
        }
        best = sorted(all_scores, key=lambda ids: -all_scores[ids])[:5]
        assert [tuple(each[each != config.pad_id].tolist()) for each in ids] == best
        np.testing.assert_allclose(scores, [all_scores[each] for each in best], rtol=1e-12, atol=1e-12)
        lengths |= set(map(len, best))
    assert lengths == {1, 2, 3}
