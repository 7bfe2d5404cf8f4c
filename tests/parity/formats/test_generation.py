"""How a folder is decoded: each field of its generation_config.json is used, ignored with a reason, or refused."""

import json

import pytest
import transformers

from parity.twins_proof import sinusoids
from parity.weights.formats import FieldError, Fields
from parity.weights.formats.generation import DEFAULTS, read_generation_file
from parity.weights.models import read_model, write_model
from tests.parity.formats.foreign import CLASSES, carried, random_model
from transformer_config import BeamConfig, LengthConfig

FILE = "generation_config.json"


@pytest.fixture(scope="module")
def config():
    return carried(random_model("marian", 0))[0]


def read(values, config):
    fields = Fields(values, file=FILE, defaults=DEFAULTS)
    return read_generation_file(fields, config), fields


HARMLESS = {
    **{"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "top_h": 0.4, "typical_p": 0.5},
    **{"epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "use_cache": False, "cache_config": {}, "max_cache_len": 5},
    **{"prefill_chunk_size": 4, "low_memory": True, "compile_config": {}, "disable_compile": True},
    **{"output_attentions": True, "output_hidden_states": True, "output_scores": True, "output_logits": True},
    **{"return_dict_in_generate": True, "is_assistant": True, "num_assistant_tokens": 4, "bos_token_id": 5},
    **{"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.1, "speculation_type": "x"},
    **{"max_matching_ngram_size": 3, "assistant_lookbehind": 3, "target_lookbehind": 3},
    **{"assistant_ensemble_weight": 0.5, "continuous_batching_config": {}, "cache_implementation": "static"},
    **{"_from_model_config": True, "transformers_version": "4.32.0.dev0", "_commit_hash": "0" * 40},
}
"""Another value for each field that changes nothing where nothing is drawn."""
REFUSED = {
    **{"do_sample": True, "penalty_alpha": 0.6, "dola_layers": "low", "num_beam_groups": 2, "diversity_penalty": 0.5},
    **{"repetition_penalty": 1.2, "encoder_repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "max_time": 1.0},
    **{"encoder_no_repeat_ngram_size": 3, "exponential_decay_length_penalty": [5, 1.1], "stop_strings": ["."]},
    **{"begin_suppress_tokens": [5], "sequence_bias": {"5": 1.0}, "guidance_scale": 2.0, "watermarking_config": {}},
    **{"constraints": [1], "force_words_ids": [[5]], "token_healing": True, "remove_invalid_values": True},
    **{"use_mtp": True, "prompt_lookup_num_tokens": 3, "assistant_early_exit": 2, "cache_implementation": "quantized"},
    **{"eos_token_id": 5, "pad_token_id": 5, "decoder_start_token_id": 5, "forced_eos_token_id": 5},
}
"""And for each that changes what is found."""
USED = {
    "max_length": (30, {"max_len": 29}),
    "max_new_tokens": (8, {"max_len": 8}),
    "min_length": (4, {"min_len": 3}),
    "min_new_tokens": (4, {"min_len": 4}),
    "num_beams": (5, {"beam_size": 5}),
    "num_return_sequences": (2, {"num_hypotheses": 2}),
    "early_stopping": ("never", {"stopping": "transformers_never"}),
    "length_penalty": (0.3, {"alpha": 0.3}),
    "renormalize_logits": (True, {"renormalize": True}),
    "bad_words_ids": ([[6], [8]], {"never": (6, 8)}),
    "suppress_tokens": ([9], {"never": (9,)}),
    "forced_bos_token_id": (7, {"first_id": 7}),
}
PLAIN = {"max_length": 20, "num_beams": 4, "decoder_start_token_id": None}


def plain(config):
    ids = {"decoder_start_token_id": config.bos_id, "eos_token_id": config.eos_id, "pad_token_id": config.pad_id}
    return {**PLAIN, **ids}


def test_every_field_of_the_class_is_in_one_of_the_tables():
    known = set(transformers.GenerationConfig().to_dict())
    known |= set(transformers.GenerationConfig._get_default_generation_params())
    assert known <= {*HARMLESS, *REFUSED, *USED}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_nothing_is_ignored_with_a_reason(name, config):
    search, fields = read({**plain(config), name: HARMLESS[name]}, config)
    assert search == read(plain(config), config)[0]
    assert name in fields.ignored or name == "cache_implementation"


@pytest.mark.parametrize("name", REFUSED)
def test_what_ours_has_not_is_refused_by_name(name, config):
    with pytest.raises(FieldError, match=rf"{FILE}: {name}: expected "):
        read({**plain(config), name: REFUSED[name]}, config)


@pytest.mark.parametrize("name", USED)
def test_what_ours_has_is_used(name, config):
    value, expected = USED[name]
    before, after = read(plain(config), config)[0], read({**plain(config), name: value}, config)[0]
    if name in ("bad_words_ids", "suppress_tokens"):
        expected = {"never": tuple(sorted({*expected["never"], config.pad_id} - {config.eos_id}))}
    assert {key: getattr(after, key) for key in expected} == expected
    assert before != after


JUNK = [-1, "x", [], [[]], [[1, 2]], {}, [None], 0.5, True, 10**400, float("nan")]


@pytest.mark.parametrize("name", [*USED, *REFUSED])
def test_values_of_other_types_are_refused_by_name_or_mean_what_they_say(name, config):
    for value in JUNK:
        try:
            search, _ = read({**plain(config), name: value}, config)
        except FieldError as error:
            assert FILE in str(error)  # noqa: PT017
        else:
            assert isinstance(search, BeamConfig)


def test_an_unknown_field_is_refused(config):
    with pytest.raises(FieldError, match=rf"{FILE}: expected fields that are known, got thinking=True"):
        read({**plain(config), "thinking": True}, config)


def test_what_starts_a_target_where_nothing_else_does(config):
    values = {**plain(config), "decoder_start_token_id": None, "bos_token_id": config.bos_id}
    assert read(values, config)[0] == read(plain(config), config)[0]
    with pytest.raises(FieldError, match="bos_token_id: expected"):
        read({**values, "bos_token_id": config.bos_id - 1}, config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CLASSES)
def test_what_the_class_saves_is_read(name, tmp_path):
    model = random_model(name, 0).float()
    model.save_pretrained(tmp_path / "a")
    assert isinstance(read_model(tmp_path / "a").search, LengthConfig)
    everything = {**model.generation_config.to_dict(), **model.generation_config._get_default_generation_params()}
    everything |= {key: value for key, value in model.generation_config.to_dict().items() if value is not None}
    (tmp_path / "a" / FILE).write_text(json.dumps(everything))
    assert isinstance(read_model(tmp_path / "a").search, LengthConfig)


def test_the_search_of_an_opus_model_goes_there_and_back(tmp_path):
    model = random_model("marian", 0).float()
    model.save_pretrained(tmp_path / "a")
    pad = model.config.pad_token_id
    # As Helsinki-NLP's models have it.
    values = {"bad_words_ids": [[pad]], "bos_token_id": 0, "decoder_start_token_id": pad, "eos_token_id": 0}
    values |= {"forced_eos_token_id": 0, "max_length": 512, "num_beams": 6, "pad_token_id": pad}
    values |= {"renormalize_logits": True, "transformers_version": "4.32.0.dev0"}
    (tmp_path / "a" / FILE).write_text(json.dumps(values))
    read_ = read_model(tmp_path / "a")
    assert (read_.search.beam_size, read_.search.renormalize, read_.search.forced_end) == (6, True, True)
    write_model(read_, tmp_path / "b", "marian", source=tmp_path / "a", sinusoids=sinusoids)
    assert read_model(tmp_path / "b").search == read_.search
