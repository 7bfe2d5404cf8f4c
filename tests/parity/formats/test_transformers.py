"""Models of the real classes with random weights, carried to both twins: same logits, same gradients, same beams."""

import jax
import numpy as np
import pytest
import torch

import torch_reference
from flax_transformer.decoding import beam_search
from flax_transformer.parameters import abstract_model, with_parameters
from parity.weights.formats import FORMATS, FieldError, Fields
from parity.weights.formats.generation import DEFAULTS, read_generation
from parity.weights.rules import bits_equal
from parity.weights.twins import twin_mapping
from tests.parity.formats.foreign import CLASSES, batch, carried, fields_of, random_model, their_logits
from torch_reference.beam import beam_search as reference_beam_search

LOGITS = 1e-12
"""Relative to the largest: float64 against float64, by other orders of sums."""


def reference(config, weights):
    module = torch_reference.Transformer(config, generator=torch.Generator().manual_seed(0))
    missing = module.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    assert not any(missing)
    return module


def assert_near(got, expected, *, what):
    scale = np.abs(expected).max()
    assert np.abs(got - expected).max() <= LOGITS * scale, (what, np.abs(got - expected).max() / scale)


def loss(logits, targets, pad_id):
    real = targets != pad_id
    return torch.nn.functional.cross_entropy(logits[real], targets[real])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", CLASSES)
def test_logits_and_gradients_of_the_reference(name, seed):
    model = random_model(name, seed)
    config, weights = carried(model)
    module = reference(config, weights)
    src, tgt_in, tgt = batch(config, seed)
    real = torch.from_numpy(tgt != config.pad_id)
    theirs, ours = their_logits(model, src, tgt_in), module(torch.from_numpy(src), torch.from_numpy(tgt_in))
    assert_near(ours[real].detach().numpy(), theirs[real].detach().numpy(), what="logits")
    for logits in (theirs, ours):
        loss(logits, torch.from_numpy(tgt), config.pad_id).backward()
    mapping = FORMATS[name].mapping(config)
    of_theirs = {n: p.grad.numpy() for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    of_ours = {n: p.grad.numpy() for n, p in module.named_parameters()}
    expected = mapping.apply(of_theirs, kind="gradient")
    assert expected.keys() >= of_ours.keys()
    largest = max(np.abs(array).max() for array in of_ours.values())
    for key, got in of_ours.items():
        # The key projection's bias has no gradient but rounding.
        assert np.abs(got - expected[key]).max() <= 1e-12 * max(largest, np.abs(expected[key]).max()), key


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", CLASSES)
def test_logits_of_the_flax_twin(name, seed):
    model = random_model(name, seed)
    config, weights = carried(model)
    params = twin_mapping(tied=config.tie_embeddings == "all").apply(weights)
    src, tgt_in, tgt = batch(config, seed)
    # Compiling is what takes the time, and tracing: the model is traced once, and its shapes are checked in there.
    abstract = abstract_model(config)
    run = jax.jit(lambda params, src, tgt: with_parameters(abstract, params)(src, tgt))
    ours = np.asarray(run(params, src.astype(np.int32), tgt_in.astype(np.int32)))
    real = tgt != config.pad_id
    assert_near(ours[real], their_logits(model, src, tgt_in).detach().numpy()[real], what="logits")


def random_search(model, seed):
    """Settings for `generate`, and ours."""
    rng = np.random.default_rng(seed)
    config, _ = carried(model)
    settings = {
        "num_beams": 4,
        "num_return_sequences": int(rng.integers(1, 5)),
        "max_length": int(rng.integers(8, 14)),
        "min_length": int(rng.integers(0, 5)),
        "length_penalty": float(rng.choice([0.0, 0.6, 1.0, 1.7])),
        "early_stopping": [False, True, "never"][seed % 3],
        "bad_words_ids": [[config.pad_id], [7]],
        "renormalize_logits": seed % 2 == 0,
        "forced_bos_token_id": None if rng.integers(2) else 9,
        "forced_eos_token_id": None if rng.integers(2) else config.eos_id,
    }
    return settings, read_generation(Fields(settings, file="generation_config.json", defaults=DEFAULTS), config)


def found_by_generate(model, src, settings):
    with torch.no_grad():
        found = model.generate(
            torch.from_numpy(src),
            attention_mask=torch.from_numpy(src != model.config.pad_token_id).long(),
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
    return found.sequences[:, 1:].numpy(), found.sequences_scores.numpy()


def assert_same_beams(found, expected, config, settings):
    """Pieces up to the end, and scores."""
    sequences, scores = expected
    many = settings["num_return_sequences"]
    for i, (row, score) in enumerate(zip(sequences, scores, strict=True)):
        length = int(found.lengths[i // many][i % many])
        assert found.ids[i // many][i % many][:length].tolist() == row[:length].tolist()
        assert (row[length:] == config.pad_id).all() or row[length - 1] == config.eos_id
        np.testing.assert_allclose(found.scores[i // many][i % many], score, rtol=1e-6)  # it keeps them in float32


@pytest.mark.filterwarnings("ignore")  # of `generate`, about the settings it is given
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", CLASSES)
def test_beams_of_the_reference(name, seed):
    model = lively(random_model(name, 200 + seed))
    config, weights = carried(model)
    settings, search = random_search(model, seed)
    src, _, _ = batch(config, seed)
    found = reference_beam_search(reference(config, weights), torch.from_numpy(src), config=search)
    assert_same_beams(found, found_by_generate(model, src, settings), config, settings)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", CLASSES)
def test_beams_of_the_flax_twin(name):
    model = lively(random_model(name, 300))
    config, weights = carried(model)
    settings, search = random_search(model, 4)
    src, _, _ = batch(config, 4)
    params = twin_mapping(tied=config.tie_embeddings == "all").apply(weights)
    run = jax.jit(lambda params, src: beam_search(with_parameters(abstract_model(config), params), src, config=search))
    found = jax.device_get(run(params, src.astype(np.int32)))
    assert_same_beams(found, found_by_generate(model, src, settings), config, settings)


def lively(model):
    """Untrained models mostly repeat one piece; with larger weights they say more."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim > 1 and "layers" in name:
                tensor.mul_(2)
    return model


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CLASSES)
def test_there_and_back_is_bit_identical(name, seed):
    model = random_model(name, seed).float()
    config, weights = carried(model)
    back = FORMATS[name].mapping(config).inverse().apply(weights)
    for key, tensor in model.state_dict().items():
        assert bits_equal(back.pop(key), tensor.numpy()), key
    computed = FORMATS[name].computed(config)
    assert back.keys() <= computed.keys()
    for key, table in back.items():
        assert bits_equal(table.astype(np.float32), computed[key]), key


@pytest.mark.parametrize("name", CLASSES)
def test_the_defaults_are_those_of_the_class(name):
    config_class, _, defaults = CLASSES[name]
    theirs = config_class()
    for field, default in defaults.items():
        if field != "decoder_vocab_size":  # which the class fills in
            assert getattr(theirs, field) == default, field


@pytest.mark.parametrize("name", CLASSES)
def test_a_config_goes_there_and_back(name):
    for seed in range(10):
        format_, model = FORMATS[name], random_model(name, seed)
        config = format_.read(fields_of(model))
        written = format_.write(config)
        assert format_.read(Fields(written, file="written")) == config
        # The class itself reads it as the same.
        again = CLASSES[name][0](**written)
        assert format_.read(Fields(again.to_dict(), file="again", defaults=CLASSES[name][2])) == config


def test_an_unknown_field_is_refused():
    fields = fields_of(random_model("marian", 0))
    changed = Fields({**fields.values, "rotary": True}, file="config.json", defaults=fields.defaults)
    with pytest.raises(FieldError, match=r"config.json: expected fields that are known, got rotary=True"):
        FORMATS["marian"].read(changed)
