import dataclasses
import json
import os
import re

import numpy as np
import pytest

from parity import __main__ as cli
from parity.convert import NotProvenError, convert
from parity.twins import random_weights
from parity.twins_proof import Proof, prove, sinusoids
from parity.weights.formats import FieldError
from parity.weights.lazy import Converted
from parity.weights.mapping import Rule, WeightMapping
from parity.weights.models import CONFIG, newest_params, read_model
from parity.weights.problems import MappingError
from parity.weights.rules import bits_equal
from parity.weights.store import Checkpoint, StoreError, read_tensors, write_tensors
from transformer_config import TransformerConfig

TORCH, FLAX = "torch-reference", "flax"
SRC, TGT = "src_embedding.weight", "tgt_embedding.weight"
ONE_LAYER = {"num_encoder_layers": 1, "num_decoder_layers": 1}
TIED = {"tie_embeddings": "all", "src_vocab_size": 67}


def model(path, *, dtype="float32", with_config=True, change=None, **changes):
    """Writes one of our own; returns its tensors."""
    config = TransformerConfig.tiny(**{**ONE_LAYER, **changes})
    tensors = {name: array.astype(dtype) for name, array in random_weights(config, seed=2).items()}
    tensors = tensors if change is None else change(tensors)
    metadata = {CONFIG: json.dumps(config.to_dict())} if with_config else {}
    aliases = {TGT: SRC} if config.tie_embeddings == "all" else {}
    write_tensors(path, Checkpoint(tensors=tensors, aliases=aliases, metadata=metadata))
    return tensors


def carry(source, target, target_format, **options):
    fields = {"source_format": None, "settings": {}, "sinusoids": sinusoids, "prove": None, **options}
    return convert(source, target, target_format=target_format, **fields)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("changes", [TIED, {"tie_embeddings": "none"}], ids=["tied", "untied"])
@pytest.mark.parametrize(("first", "second"), [("a.pt", "b"), ("a.safetensors", "b.safetensors")])
def test_there_and_back(tmp_path, first, second, changes, dtype):
    original = model(tmp_path / first, dtype=dtype, **changes)
    done = carry(tmp_path / first, tmp_path / second, FLAX)
    assert done.written.tensors == len(original)
    assert done.written.nbytes == sum(array.nbytes for array in original.values())
    flax = read_tensors(tmp_path / second)
    assert (TGT in flax.tensors) == (changes is not TIED)
    kernel = flax.tensors["encoder.layers.0.feed_forward.linear1.kernel"]
    assert bits_equal(kernel, original["encoder.layers.0.feed_forward.linear1.weight"].T)
    carry(tmp_path / second, tmp_path / f"back-{first}", TORCH)
    back = read_tensors(tmp_path / f"back-{first}")
    assert set(back.tensors) == set(original)
    assert all(bits_equal(back.tensors[name], array) for name, array in original.items())
    assert dict(back.aliases) == ({TGT: SRC} if changes is TIED else {})


def test_tied_under_the_other_name(tmp_path):
    original = model(tmp_path / "a.safetensors", **TIED)
    read = read_tensors(tmp_path / "a.safetensors")
    tensors = dict(read.tensors)
    tensors[TGT] = tensors.pop(SRC)
    write_tensors(tmp_path / "c.safetensors", Checkpoint(tensors=tensors, aliases={SRC: TGT}, metadata=read.metadata))
    carry(tmp_path / "c.safetensors", tmp_path / "b", FLAX)
    flax = read_tensors(tmp_path / "b").tensors
    assert bits_equal(flax[SRC], original[SRC])
    assert TGT not in flax


def test_the_command_proves_what_it_has_done(tmp_path, capsys):
    model(tmp_path / "a.pt")
    assert cli.main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b"), "--to", FLAX]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path / 'a.pt'} (torch-reference) -> {tmp_path / 'b'} (flax)" in said
    assert re.search(r"equal: our twin with the source's weights and .*: 0\.0e\+00 apart in float64", said)
    assert cli.main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "c"), "--to", FLAX, "--no-verify"]) == 0
    assert "Not verified." in capsys.readouterr().out


def test_what_would_compute_something_else_is_not_written(tmp_path):
    model(tmp_path / "a.pt")

    def prove_another(source, read, target, written, changed):
        """As if the target had been read back with one matrix the other way round."""
        name = "decoder.layers.0.self_attn.q_proj.weight"
        weights = {**written.weights, name: written.weights[name].T}
        every = Converted(WeightMapping([Rule("{name*}", "{name*}")]), weights)
        return prove(source, read, target, dataclasses.replace(written, weights=every), changed)

    with pytest.raises(NotProvenError, match=r"b: not written, because it would compute something else: our twin"):
        carry(tmp_path / "a.pt", tmp_path / "b", FLAX, prove=prove_another)
    assert os.listdir(tmp_path) == ["a.pt"]
    assert not Proof(links=()).passed, "nothing compared is no proof"


def test_a_file_without_a_config_needs_what_no_tensor_says(tmp_path, capsys):
    model(tmp_path / "a.pt", with_config=False, norm_order="pre")
    with pytest.raises(FieldError, match=r"a\.pt: expected num_heads, which no tensor says"):
        carry(tmp_path / "a.pt", tmp_path / "b", FLAX)
    settings = ["--set", "num_heads=5", "norm_order=pre", "activation=gelu"]
    assert cli.main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b"), "--to", FLAX, *settings]) == 0
    config = read_model(tmp_path / "b").config
    assert (config.num_heads, config.norm_order, config.d_ff, config.final_norm) == (5, "pre", 44, "always")
    capsys.readouterr()
    assert cli.main(["inspect", str(tmp_path / "b")]) == 0
    said = capsys.readouterr().out
    assert "flax, our Flax twin's parameters" in said
    assert "num_heads=5" in said
    assert re.search(r"src_embedding\.weight +71x30 +float32 +8,520", said)


def damaged(change):
    return {"change": lambda tensors: {**tensors, **change(tensors)}}


WRONG = {
    "an unknown tensor": (
        damaged(lambda t: {"lm_head.weight": np.ones((2, 3), np.float32)}),
        (StoreError, "names of one layout, got names that fit none"),
    ),
    "a missing tensor": (
        {"change": lambda t: {name: array for name, array in t.items() if "norm1.bias" not in name}},
        (MappingError, r"a\.pt: missing our 'encoder\.layers\.0\.norm1\.bias' \(30,\)"),
    ),
    "another shape": (
        damaged(lambda t: {"encoder.layers.0.norm1.bias": np.ones(31, np.float32)}),
        (StoreError, r"a\.pt: expected our 'encoder\.layers\.0\.norm1\.bias' of shape \(30,\), got \(31,\)"),
    ),
    "NaN": (
        damaged(lambda t: {"encoder.layers.0.norm1.bias": np.full(30, np.nan, np.float32)}),
        (StoreError, r"a\.pt: expected numbers in our 'encoder\.layers\.0\.norm1\.bias', got NaN"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_damaged_weights_are_named_and_leave_nothing_behind(case, tmp_path):
    options, (error, message) = WRONG[case]
    model(tmp_path / "a.pt", **options)
    with pytest.raises(error, match=message):
        carry(tmp_path / "a.pt", tmp_path / "b.safetensors", FLAX)
    assert os.listdir(tmp_path) == ["a.pt"]


def test_of_a_run_the_moving_average_is_carried(tmp_path):
    for step in ("9", "10"):
        for item in ("params", "ema"):
            (tmp_path / "checkpoints" / step / item).mkdir(parents=True)
    assert newest_params(tmp_path) == tmp_path / "checkpoints" / "10" / "ema"
    (tmp_path / "checkpoints" / "10" / "ema").rmdir()
    assert newest_params(tmp_path) == tmp_path / "checkpoints" / "10" / "params"


def test_nothing_is_overwritten_unasked(tmp_path):
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    model(source, **TIED)
    target.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"b\.safetensors"):
        carry(source, target, FLAX)
    assert target.read_bytes() == b"mine"
    carry(source, target, FLAX, overwrite=True)
    assert SRC in read_tensors(target).tensors
    for same in (source, tmp_path / "x" / ".." / "a.safetensors", tmp_path):
        with pytest.raises(ValueError, match="apart from the source"):
            carry(source, same, FLAX, overwrite=True)


def test_wrong_usage(tmp_path, capsys):
    model(tmp_path / "a.pt")
    for arguments, message in [
        (["--to", "onnx"], "--to: expected one of torch-reference, flax"),
        (["--to", FLAX, "--from", "onnx"], "--from: expected one of"),
        (["--to", FLAX, "--set", "heads=5"], "a field of TransformerConfig, got 'heads=5'"),
    ]:
        assert cli.main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b"), *arguments]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        carry(tmp_path / "no.safetensors", tmp_path / "b", FLAX)
    assert cli.main(["formats"]) == 0
    assert "MarianMTModel" in capsys.readouterr().out
