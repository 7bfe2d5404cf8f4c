"""Every field of the real classes' configs, changed by itself: ours follows, or refuses it by name, or it does nothing.

Whatever our reader makes of the changed config, its model must compute what the class computes with it.
"""

import json

import numpy as np
import pytest
import torch

from parity.weights.formats import FieldError, fairseq_layers
from parity.weights.models import read_model
from tests.parity.formats.foreign import CLASSES, batch, random_model, their_logits
from tests.parity.formats.test_transformers import assert_near, assert_same_beams, found_by_generate, lively, reference
from torch_reference.beam import beam_search

BASE = {
    **{"d_model": 12, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 40},
    **{"encoder_ffn_dim": 19, "decoder_ffn_dim": 19, "encoder_layers": 2, "decoder_layers": 2},
    **{"activation_function": "gelu", "scale_embedding": True, "attention_dropout": 0.0},
}
OF_CLASS = {
    "marian": {
        **{"vocab_size": 40, "decoder_vocab_size": 40, "pad_token_id": 39, "decoder_start_token_id": 39},
        **{"eos_token_id": 0, "forced_eos_token_id": 0, "tie_word_embeddings": True},
        "share_encoder_decoder_embeddings": True,
    },
    "fsmt": {"src_vocab_size": 40, "tgt_vocab_size": 40, "tie_word_embeddings": False},
    "m2m_100": {"vocab_size": 40},
}
SEARCH = {"num_beams": 3, "max_length": 9, "bad_words_ids": None, "length_penalty": 1.0, "early_stopping": False}
"""In config.json, as folders have it that are older than generation_config.json."""

OTHERS = {
    "activation_function": ["relu", "silu", "gelu_new", "gelu_fast", "quick_gelu", "tanh"],
    "architectures": [["BartModel"]],
    "bad_words_ids": [[[7]], [[7, 8]]],
    "bos_token_id": [5],
    "chunk_size_feed_forward": [2],
    "d_model": [16],
    "decoder_start_token_id": [5],
    "dtype": ["float64"],
    "encoder_attention_heads": [3],
    "decoder_attention_heads": [3],
    "early_stopping": [True, "never"],
    "eos_token_id": [5],
    "forced_eos_token_id": [None, 5],
    "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}],
    "langs": [["fr", "ru"]],
    "length_penalty": [0.2, 2.0],
    "max_length": [6],
    "max_position_embeddings": [30],
    "model_type": ["bart"],
    "num_beams": [2, 4],
    "pad_token_id": [5],
    "problem_type": ["regression"],
    "transformers_version": ["4.0.0"],
    "vocab_size": [45],
    "src_vocab_size": [45],
    "tgt_vocab_size": [45],
    "_name_or_path": ["elsewhere"],
}
"""Other valid values, where it is not a flag to be flipped or a number to be moved."""
NOT_OF_THE_MODEL = {"dtype", "architectures", "model_type", "is_encoder_decoder"}
"""The class would be another one, or load into another precision: ours must refuse or ignore them, and that is all."""
OF_SEARCHES = {*SEARCH, "forced_eos_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}


def others(field, value):
    if field in OTHERS:
        return OTHERS[field]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value + 0.25]
    raise AssertionError(f"another value for {field}, which is {value!r}")


def changes():
    for kind, (config_class, _, _) in CLASSES.items():
        values = {**config_class(**BASE, **OF_CLASS[kind]).to_dict(), **SEARCH}
        for field in sorted(values):
            for other in others(field, values[field]):
                if (kind, other) == ("fsmt", "never"):
                    continue  # its config has a flag there
                yield pytest.param(kind, field, other, id=f"{kind}-{field}-{other}")


def changed_model(kind, field, other, folder):
    """The class with that config and random weights, saved without a generation_config.json; or None."""
    changed = {} if field in {*SEARCH, *NOT_OF_THE_MODEL} else {field: other}
    if field == "output_attentions":
        changed["attn_implementation"] = "eager"  # the only one that can
    model = lively(random_model(kind, 7, **{**BASE, **OF_CLASS[kind], **changed})).float()
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    values = {**json.loads((folder / "config.json").read_text()), **SEARCH, field: other}
    (folder / "config.json").write_text(json.dumps(values))
    return model.double()


def expect_followed_or_refused(kind, field, other, folder):
    theirs = changed_model(kind, field, other, folder)
    try:
        read = read_model(folder, kind)
    except FieldError as error:
        assert field in str(error)  # noqa: PT017
        return
    if field in NOT_OF_THE_MODEL:
        assert field in read.ignored
        return
    config = read.config.replace(dtype="float64", param_dtype="float64")
    ours = reference(config, {name: np.asarray(array, np.float64) for name, array in read.weights.items()})
    theirs.config.return_dict = True
    src, tgt_in, tgt = batch(config, 0)
    real = tgt != config.pad_id
    with torch.no_grad():
        expected = their_logits(theirs, src, tgt_in)[real]
        got = ours(torch.from_numpy(src), torch.from_numpy(tgt_in))[real]
    assert_near(got.numpy(), expected.numpy(), what="logits")
    if field in OF_SEARCHES:
        loaded = CLASSES[kind][1].from_pretrained(folder, dtype=torch.float64).eval()
        found = beam_search(ours, torch.from_numpy(src), config=read.search)
        assert_same_beams(found, found_by_generate(loaded, src, {}), config, {"num_return_sequences": 1})


@pytest.mark.filterwarnings("ignore")  # transformers', of the settings it is given
@pytest.mark.parametrize(("kind", "field", "other"), list(changes()))
def test_a_changed_field_is_followed_or_refused(kind, field, other, tmp_path):
    expect_followed_or_refused(kind, field, other, tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("field", "other", "ours"),
    [("scale_embedding", False, "embedding_scale"), ("activation_function", "relu", "activation")],
)
def test_a_field_that_is_ignored_would_be_found(field, other, ours, tmp_path, monkeypatch):
    read_shape = fairseq_layers.read_shape
    before = {"embedding_scale": True, "activation": "gelu"}[ours]
    monkeypatch.setattr(fairseq_layers, "read_shape", lambda fields: {**read_shape(fields), ours: before})
    with pytest.raises(AssertionError):
        expect_followed_or_refused("fsmt", field, other, tmp_path)
