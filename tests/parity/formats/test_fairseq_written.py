"""Checkpoints that we write for fairseq: there and back, and what its loader looks for."""

import json

import numpy as np
import pytest
import torch

from parity import __main__ as cli
from parity.twins import random_weights
from parity.twins_proof import sinusoids
from parity.weights.checkpoint import StoreError
from parity.weights.formats import FieldError
from parity.weights.formats.fairseq_layers import half_minus_1_table
from parity.weights.models import CONFIG, detect, read_model, write_model
from parity.weights.rules import bits_equal
from parity.weights.store import Checkpoint, write_tensors
from tests.parity.formats.foreign import random_model
from tests.parity.formats.test_fairseq import arguments, state_of
from transformer_config import TransformerConfig

DTYPES = ("float32", "float16", "bfloat16", "float64")


def random_config(seed):
    """One that fairseq can express, and no two dimensions alike where they need not be."""
    rng = np.random.default_rng(seed)
    heads, head_dim = int(rng.integers(1, 5)), int(rng.integers(4, 9))
    width, vocab = heads * head_dim, int(rng.integers(40, 60))
    tie = str(rng.choice(["none", "output", "all"]))
    return TransformerConfig(
        src_vocab_size=vocab,
        tgt_vocab_size=vocab if tie == "all" else vocab + 9,
        d_model=width,
        d_ff=width + 7,
        num_heads=heads,
        num_encoder_layers=int(rng.integers(1, 4)),
        num_decoder_layers=int(rng.integers(1, 4)),
        activation=str(rng.choice(["relu", "gelu", "gelu_tanh"])),
        norm_order=str(rng.choice(["pre", "post"])),
        tie_embeddings=tie,
        output_bias="never",
        embedding_scale=bool(rng.integers(2)),
        freeze_padding=True,
        positions=str(rng.choice(["fixed", "learned"])),
        positions_skip_padding=True,
        position_offset=2,
        max_len=33,
        dropout=0.3,
        attention_dropout=0.1,
        activation_dropout=0.2,
        pad_id=1,
        bos_id=2,
        eos_id=2,
    )


def our_model(path, config, *, dtype="float32", seed=0):
    weights = random_weights(config, seed=seed)
    if config.positions == "fixed":
        table = half_minus_1_table(config)
        weights |= {f"{side}_positions.table": table for side in ("src", "tgt")}
    weights = {name: array if "table" in name else array.astype(dtype) for name, array in weights.items()}
    write_tensors(path, Checkpoint(tensors=weights, metadata={CONFIG: json.dumps(config.to_dict())}))


def carry(source, target):
    return write_model(read_model(source), target, "fairseq", source=source, sinusoids=sinusoids)


@pytest.mark.parametrize("seed", range(20))
def test_there_and_back(seed, tmp_path):
    config = random_config(seed)
    our_model(tmp_path / "a.safetensors", config, dtype=DTYPES[seed % 4], seed=seed)
    written = carry(tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert not written.changed
    assert detect(tmp_path / "b.pt") == "fairseq"
    original, back = read_model(tmp_path / "a.safetensors"), read_model(tmp_path / "b.pt")
    assert back.config == config
    assert set(back.weights) >= set(original.weights)
    for name in original.weights:
        assert bits_equal(back.weights[name], original.weights[name]), name


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_same_as_fairseq_has_it(seed, tmp_path):
    """Names and values of its state dict, and its arguments."""
    model = random_model("fsmt", seed, activation_function=("relu", "gelu", "gelu_new")[seed % 3]).float()
    given = arguments(model.config)
    expected = state_of(model, old=False)
    torch.save({"args": given, "model": expected}, tmp_path / "a.pt")
    carry(tmp_path / "a.pt", tmp_path / "b.pt")
    written = torch.load(tmp_path / "b.pt", weights_only=True)
    assert set(written["model"]) == set(expected)
    assert all(torch.equal(written["model"][name], tensor) for name, tensor in expected.items())
    ours = written["cfg"]["model"]
    renamed = {"arch": "transformer", "task": None, "lr": None}
    assert {name: ours.get(name) for name in vars(given)} == {**vars(given), **renamed}


def test_what_its_loader_looks_for(tmp_path):
    """As `load_checkpoint_to_cpu`, `_upgrade_state_dict` and `load_model_ensemble_and_task` of fairseq use it."""
    our_model(tmp_path / "a.safetensors", random_config(2))
    carry(tmp_path / "a.safetensors", tmp_path / "b.pt")
    state = torch.load(tmp_path / "b.pt", weights_only=True)
    assert state["args"] is None, "or it would be taken for a Namespace"
    assert {"optimizer_name", "lr_scheduler_state", "num_updates"} <= set(state["optimizer_history"][-1])
    assert "optimizer" not in state["optimizer_history"][-1]
    assert "train_iterator" in state["extra_state"]
    assert state["cfg"]["task"]["_name"] == "translation"
    assert {"data", "source_lang", "target_lang"} <= set(state["cfg"]["task"]), "overridden by who loads it"
    assert not isinstance(state["cfg"]["generation"]["print_alignment"], bool)
    model = state["cfg"]["model"]
    assert model["_name"] == "transformer"
    asked_without_a_default = {"encoder_layers_to_keep", "decoder_layers_to_keep", "share_all_embeddings"}
    asked_without_a_default |= {"encoder_embed_path", "decoder_embed_path", "min_params_to_wrap"}
    assert asked_without_a_default <= set(model)
    assert not {"src_vocab_size", "tgt_vocab_size"} & set(model)
    for stack in ("encoder", "decoder"):
        assert state["model"][f"{stack}.version"].tolist() == [3.0], "below 3 the final norm is left out"


@pytest.mark.parametrize("positions", ["fixed", "learned"])
def test_tied_tensors_share_storage(positions, tmp_path):
    our_model(tmp_path / "a.safetensors", random_config(0).replace(positions=positions, tie_embeddings="none"))
    carry(tmp_path / "a.safetensors", tmp_path / "untied.pt")
    untied = torch.load(tmp_path / "untied.pt", weights_only=True)["model"]
    assert ("encoder.embed_positions._float_tensor" in untied) == (positions == "fixed")
    assert ("encoder.embed_positions.weight" in untied) == (positions == "learned")
    size = random_config(0).src_vocab_size
    tied = random_config(0).replace(positions=positions, tie_embeddings="all", tgt_vocab_size=size)
    our_model(tmp_path / "b.safetensors", tied)
    carry(tmp_path / "b.safetensors", tmp_path / "tied.pt")
    state = torch.load(tmp_path / "tied.pt", weights_only=True)["model"]
    places = {state[f"{name}.weight"].data_ptr() for name in ("encoder.embed_tokens", "decoder.output_projection")}
    assert places == {state["decoder.embed_tokens.weight"].data_ptr()}


def test_the_command(tmp_path, capsys):
    our_model(tmp_path / "a.safetensors", random_config(4))
    assert cli.main(["convert", str(tmp_path / "a.safetensors"), str(tmp_path / "b.pt"), "--to", "fairseq"]) == 0
    said = capsys.readouterr().out
    assert "0.0e+00 apart in float64" in said
    assert "its own class is not installed" in said


def test_sinusoids_that_we_compute(tmp_path):
    """fairseq computes them too, from angles in float32."""
    config = random_config(4).replace(positions="concatenated_half_minus_1")
    our_model(tmp_path / "a.safetensors", config)
    assert carry(tmp_path / "a.safetensors", tmp_path / "b.pt").changed.keys() == {"positions"}
    assert read_model(tmp_path / "b.pt").config == config.replace(positions="fixed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "silu"}, "activation='silu', where it has 'relu'"),
        ({"norm_eps": 1e-6}, "norm_eps=1e-06, where it has 1e-05"),
        ({"pad_id": 0, "bos_id": 1}, "pad_id=0, where it has 1; bos_id=1, where it has 2"),
        ({"output_bias": "trained"}, "output_bias='trained', where it has 'never'"),
        ({"window": 3}, "window=3, where it has None"),
        ({"positions": "interleaved"}, "the positions that this format's class computes"),
        ({"positions_skip_padding": False}, "positions_skip_padding=False, where it has True"),
    ],
)
def test_what_fairseq_cannot_say_is_refused(changes, message, tmp_path):
    our_model(tmp_path / "a.safetensors", random_config(4).replace(**changes))
    with pytest.raises(FieldError, match=f"fairseq: expected .*{message}"):
        carry(tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert not (tmp_path / "b.pt").exists()


def test_the_file_needs_its_suffix(tmp_path):
    our_model(tmp_path / "a.safetensors", random_config(4))
    with pytest.raises(StoreError, match=r"b: expected one of the suffixes \.pt, \.pth"):
        carry(tmp_path / "a.safetensors", tmp_path / "b")
