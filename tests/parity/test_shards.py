"""Models in several files and an index, in any format: what is in them, and how much memory they need."""

import json
import tracemalloc

import pytest
import safetensors.numpy

from parity import __main__ as cli
from parity.twins import random_weights
from parity.twins_proof import sinusoids
from parity.weights.foreign import Model
from parity.weights.formats import FORMATS
from parity.weights.models import detect, read_model, write_model
from parity.weights.rules import bits_equal
from parity.weights.store import StoreError, read_tensors
from tests.parity.test_convert import FLAX, SRC, TGT, TIED, TORCH, carry, model
from transformer_config import TransformerConfig

INDEX = "model.safetensors.index.json"
UNTIED = {"tie_embeddings": "none"}


@pytest.mark.parametrize("changes", [TIED, UNTIED], ids=["tied", "untied"])
def test_our_own_models_in_shards(tmp_path, changes):
    original = model(tmp_path / "a.safetensors", **changes)
    done = carry(tmp_path / "a.safetensors", tmp_path / "b", FLAX, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "b" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    assert index["metadata"]["total_size"] == done.written.nbytes == sum(array.nbytes for array in original.values())
    assert detect(tmp_path / "b") == FLAX
    kernel = "encoder.layers.0.feed_forward.linear1.kernel"
    stored = safetensors.numpy.load_file(tmp_path / "b" / index["weight_map"][kernel])[kernel]
    assert bits_equal(stored, original["encoder.layers.0.feed_forward.linear1.weight"].T.copy())
    carry(tmp_path / "b", tmp_path / "c", TORCH, max_shard_bytes=20_000)
    back = read_tensors(tmp_path / "c")
    assert set(back.tensors) == set(original)
    assert all(bits_equal(back.tensors[name], array) for name, array in original.items())
    assert dict(back.aliases) == ({TGT: SRC} if changes is TIED else {})
    assert read_model(tmp_path / "c").config == read_model(tmp_path / "a.safetensors").config


def test_small_enough_for_one_file(tmp_path):
    original = model(tmp_path / "a.pt", **TIED)
    carry(tmp_path / "a.pt", tmp_path / "b", TORCH, max_shard_bytes=10**9)
    assert [file.name for file in (tmp_path / "b").iterdir()] == ["model.safetensors"]
    assert bits_equal(read_model(tmp_path / "b").weights[SRC], original[SRC])


def test_shards_need_a_folder(tmp_path, capsys):
    model(tmp_path / "a.pt")
    command = ["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--to", TORCH, "--no-verify"]
    assert cli.main([*command, "--max-shard-bytes", "20000"]) == 1
    assert "b.pt: expected a name without a suffix, for a folder of shards, got '.pt'" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]


def test_shards_of_two_models(tmp_path):
    for name, heads in (("b", 5), ("c", 3)):
        model(tmp_path / f"{name}.pt", **{**UNTIED, "num_heads": heads})
        carry(tmp_path / f"{name}.pt", tmp_path / name, TORCH, max_shard_bytes=20_000)
    last = sorted(file.name for file in (tmp_path / "b").glob("*.safetensors"))[-1]
    (tmp_path / "c" / last).replace(tmp_path / "b" / last)
    with pytest.raises(
        StoreError, match=f"expected the same 'transformer_config' in every file, got another in {last}"
    ):
        read_model(tmp_path / "b")


@pytest.mark.parametrize("target", ["marian", FLAX])
def test_memory_does_not_grow_with_the_model(tmp_path, target):
    """Of 75 MB, 25 of them in one tensor, no more is held than a matrix that is turned round, for each file in work."""
    config = TransformerConfig(
        src_vocab_size=12_000,
        tgt_vocab_size=12_000,
        tie_embeddings="all",
        d_model=512,
        d_ff=1_024,
        num_heads=8,
        num_encoder_layers=3,
        num_decoder_layers=2,
        positions="fixed",
        output_bias="fixed",
        max_len=64,
        freeze_padding=True,
    )
    weights = random_weights(config, seed=0)
    made = Model(format_=FORMATS[TORCH], config=config, weights=weights, stored=weights)
    options = {"sinusoids": sinusoids, "max_shard_bytes": 10_000_000}
    source = FLAX if target == "marian" else "marian"
    write_model(made, tmp_path / "a", source, source=tmp_path, **options)
    del weights, made
    tracemalloc.start()
    try:
        carry(tmp_path / "a", tmp_path / "b", target, max_shard_bytes=10_000_000, workers=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 15_000_000
