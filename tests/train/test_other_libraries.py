"""The stopping rules that bear other libraries' names find what those libraries find, with the same weights."""

import functools
import importlib.util
import itertools
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from flax_transformer.decoding import beam_search
from flax_transformer.parameters import abstract_model, with_parameters
from parity.twins import random_weights
from parity.twins_proof import sinusoids
from parity.weights.ctranslate2_export import write_ctranslate2
from parity.weights.twins import twin_mapping
from transformer_config import BOS_ID, EOS_ID, PAD_ID, BeamConfig, TransformerConfig

SENTENCES, MAX_LEN = 40, 14
END_LIKELIER = {"post": 2.5, "pre": 1.2}


def _peers():
    path = Path(__file__).parents[2] / "benchmarks" / "decoding_peers.py"
    spec = importlib.util.spec_from_file_location("decoding_peers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peers = _peers()


@functools.cache
def setting(norm_order):
    """A model that says different things and ends at different lengths, and sources with padding."""
    config = TransformerConfig.tiny(
        dropout=0.0,
        activation="relu",
        tie_embeddings="all",
        src_vocab_size=37,
        tgt_vocab_size=37,
        norm_order=norm_order,
    )
    weights = {
        name: array * (3 if array.ndim > 1 and "embedding" not in name else 1)
        for name, array in random_weights(config, seed=3).items()
    }
    # The end becomes likelier than other pieces, whatever was said.
    last = f"decoder.layers.{config.num_decoder_layers - 1}.norm3" if norm_order == "post" else "decoder.final_norm"
    direction = np.eye(config.d_model, dtype=np.float32)[0]
    if norm_order == "pre":  # where what came in would weigh more
        weights[f"{last}.weight"] = weights[f"{last}.weight"] * (1 - direction)
    weights[f"{last}.bias"] = weights[f"{last}.bias"] + 2 * direction
    weights["src_embedding.weight"][EOS_ID] += END_LIKELIER[norm_order] * direction
    # What is never chosen is hardly likely either: CTranslate2 would share out its probability.
    weights["src_embedding.weight"][[PAD_ID, BOS_ID]] -= 20 * direction
    rng = np.random.default_rng(0)
    src = rng.integers(4, 37, (SENTENCES, 8), dtype=np.int32)
    for row, length in enumerate(rng.integers(3, 8, SENTENCES)):
        src[row, length] = EOS_ID
        src[row, length + 1 :] = PAD_ID
    return config, weights, src


def ours(norm_order, **options):
    config, weights, src = setting(norm_order)
    params = twin_mapping(tied=True).apply(weights)
    search = BeamConfig(beam_size=4, num_hypotheses=4, max_len=MAX_LEN, **options)
    run = jax.jit(lambda params, src: beam_search(with_parameters(abstract_model(config), params), src, config=search))
    found = jax.device_get(run(params, src))
    return [
        [(ids[: n - ended].tolist(), score) for ids, n, ended, score in zip(*row, strict=True)]
        for row in zip(found.ids, found.lengths, found.ended, found.scores, strict=True)
    ]


def assert_same(got, expected):
    ends = 0
    for of_one, of_other in zip(got, expected, strict=True):
        assert [ids for ids, _ in of_one] == [ids for ids, _ in of_other]
        np.testing.assert_allclose([s for _, s in of_one], [s for _, s in of_other], rtol=2e-4)
        ends += sum(len(ids) < MAX_LEN for ids, _ in of_other)
    assert 0 < ends < 4 * SENTENCES, "the test wants hypotheses that end and hypotheses that do not"


EARLY = {"transformers": False, "transformers_early": True, "transformers_never": "never"}


@pytest.mark.parametrize(
    ("norm_order", "stopping", "alpha"),
    [*itertools.product(["post"], EARLY, [0.0, 0.6, 1.5]), ("pre", "transformers", 0.6)],
)
def test_transformers(norm_order, stopping, alpha, tmp_path):
    config, weights, src = setting(norm_order)
    model = peers.transformers_model(config, weights, tmp_path / "model")
    with torch.no_grad():
        found = model.generate(
            torch.from_numpy(src).long(),
            attention_mask=torch.from_numpy(src != PAD_ID).long(),
            num_beams=4,
            num_return_sequences=4,
            length_penalty=alpha,
            early_stopping=EARLY[stopping],
            max_new_tokens=MAX_LEN,
            suppress_tokens=[PAD_ID, BOS_ID],
            return_dict_in_generate=True,
            output_scores=True,
        )
    expected = []
    for ids, score in zip(found.sequences[:, 1:].tolist(), found.sequences_scores.tolist(), strict=True):
        expected.append(([i for i in ids if i not in (PAD_ID, EOS_ID)], score))
    expected = [expected[i : i + 4] for i in range(0, len(expected), 4)]
    assert_same(ours(norm_order, stopping=stopping, alpha=alpha), expected)


@pytest.mark.parametrize(("norm_order", "alpha"), [("post", 0.0), ("post", 0.6), ("post", 1.5), ("pre", 0.6)])
def test_ctranslate2(norm_order, tmp_path, alpha):
    import ctranslate2

    config, weights, src = setting(norm_order)
    pieces = [str(number) for number in range(config.tgt_vocab_size)]
    write_ctranslate2(tmp_path / "model", config, weights, pieces=pieces, sinusoids=sinusoids)
    translator = ctranslate2.Translator(str(tmp_path / "model"), device="cpu", compute_type="float32")
    found = translator.translate_batch(
        [[str(i) for i in row if i != PAD_ID] for row in src.tolist()],
        beam_size=4,
        num_hypotheses=4,
        length_penalty=alpha,
        max_decoding_length=MAX_LEN,
        min_decoding_length=0,
        return_scores=True,
        suppress_sequences=[[str(PAD_ID)], [str(BOS_ID)]],
    )
    expected = [
        [([int(i) for i in ids], score) for ids, score in zip(each.hypotheses, each.scores, strict=True)]
        for each in found
    ]
    assert_same(ours(norm_order, stopping="ctranslate2", alpha=alpha), expected)
