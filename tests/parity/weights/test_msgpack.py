"""Files of flax.serialization: theirs are read, and ours are read by it."""

import json

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from parity import twins
from parity.convert import convert
from parity.twins_proof import prove, sinusoids
from parity.weights.models import read_model
from parity.weights.rules import bits_equal
from parity.weights.store import Checkpoint, StoreError, read_tensors, write_tensors
from parity.weights.twins import twin_mapping
from transformer_config import TransformerConfig

DTYPES = ["bfloat16", "float16", "float32", "float64", "complex64", "int8", "uint16", "bool", "float8_e4m3fn"]
CONFIG = TransformerConfig.tiny(num_encoder_layers=1, num_decoder_layers=1)


def arrays():
    rng = np.random.default_rng(0)
    return {f"layers.{i}.{dtype}": rng.integers(0, 2, (i + 1, 3)).astype(dtype) for i, dtype in enumerate(DTYPES)}


def tree(named):
    """As a user of older Flax has it."""
    nested: dict = {}
    for name, array in named.items():
        *levels, leaf = name.split(".")
        node = nested
        for level in levels:
            node = node.setdefault(level, {})
        node[leaf] = array
    return nested


def assert_theirs(read):
    assert set(read.tensors) == set(arrays())
    assert all(bits_equal(read.tensors[name], array) for name, array in arrays().items())


@pytest.mark.parametrize("chunk_bytes", [2**30, 16], ids=["whole", "in pieces"])
@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"params": t, "step": 3, "opt_state": {"0": {"count": 3}}}])
def test_files_of_flax(tmp_path, monkeypatch, wrap, chunk_bytes):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", chunk_bytes)
    data = flax.serialization.to_bytes(wrap(tree(arrays())))
    assert (b"__msgpack_chunked_array__" in data) == (chunk_bytes == 16)
    (tmp_path / "w.msgpack").write_bytes(data)
    read = read_tensors(tmp_path / "w.msgpack")
    assert_theirs(read)
    assert not read.metadata


@pytest.mark.parametrize("chunk_bytes", [2**30, 16], ids=["whole", "in pieces"])
def test_ours_are_read_by_flax(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", chunk_bytes)
    path = tmp_path / "w.msgpack"
    write_tensors(path, Checkpoint(tensors=arrays(), metadata={"note": "x"}))
    assert_theirs(read_tensors(path))
    zeros = jax.tree.map(np.zeros_like, tree(arrays()))
    restored = flax.serialization.from_bytes({"params": zeros}, path.read_bytes())["params"]
    assert jax.tree.all(jax.tree.map(bits_equal, restored, tree(arrays())))


def test_scalars_and_numbers(tmp_path):
    params = {"a": np.float32(2.5), "b": 3, "c": 1 + 2j, "d": jnp.float32(7), "none": None, "list": [np.ones(2)]}
    (tmp_path / "w.msgpack").write_bytes(flax.serialization.msgpack_serialize(params))
    read = read_tensors(tmp_path / "w.msgpack").tensors
    assert {name: (array.dtype.name, array.tolist()) for name, array in read.items()} == {
        "a": ("float32", 2.5),
        "b": ("int64", 3),
        "c": ("complex128", 1 + 2j),
        "d": ("float32", 7.0),
        "list.0": ("float64", [1.0, 1.0]),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tie", ["all", "none"])
def test_our_model_there_and_back(tmp_path, tie, dtype):
    config = CONFIG.replace(tie_embeddings=tie, tgt_vocab_size=CONFIG.src_vocab_size)
    weights = {name: array.astype(dtype) for name, array in twins.random_weights(config, seed=2).items()}
    metadata = {"transformer_config": json.dumps(config.to_dict())}
    write_tensors(tmp_path / "a.safetensors", Checkpoint(tensors=weights, metadata=metadata))
    options = {"source_format": None, "settings": {}, "sinusoids": sinusoids}
    carried = {"prove": prove if dtype == "float32" else None, **options}
    convert(tmp_path / "a.safetensors", tmp_path / "b.msgpack", target_format="flax", **carried)
    assert read_model(tmp_path / "b.msgpack").config == config
    expected = twin_mapping(tied=tie == "all").apply(weights)
    found = read_tensors(tmp_path / "b.msgpack").tensors
    assert all(bits_equal(found[name], array) for name, array in expected.items())
    convert(tmp_path / "b.msgpack", tmp_path / "c.msgpack", target_format="torch-reference", **options, prove=None)
    back = read_tensors(tmp_path / "c.msgpack").tensors
    assert set(back) == set(weights)
    assert all(bits_equal(back[name], array) for name, array in weights.items())


def test_a_file_of_flax_needs_what_no_tensor_says(tmp_path):
    params = twin_mapping(tied=False).apply(twins.random_weights(CONFIG, seed=2))
    (tmp_path / "w.msgpack").write_bytes(flax.serialization.msgpack_serialize({"params": tree(params)}))
    with pytest.raises(ValueError, match=r"w\.msgpack: expected num_heads"):
        read_model(tmp_path / "w.msgpack")
    model = read_model(tmp_path / "w.msgpack", None, {"num_heads": 5})
    assert (model.format_.name, model.config.d_ff) == ("flax", CONFIG.d_ff)


def test_every_flipped_or_missing_byte_is_seen_or_harmless(tmp_path):
    path = tmp_path / "w.msgpack"
    tensors = {"a.b": np.arange(6, dtype=np.float32).reshape(2, 3), "c": np.ones(4, ml_dtypes.bfloat16)}
    write_tensors(path, Checkpoint(tensors=tensors, metadata={"note": "x"}))
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    variants = [whole[:cut] for cut in range(0, len(whole), 3)] + [whole + b"\0", b"\xc0", b"\x93\1\2\3"]
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        variants.append(bytes(damaged))
    refused = 0
    for variant in variants:
        path.write_bytes(variant)
        try:
            read = read_tensors(path)
        except StoreError as error:
            refused += 1
            assert str(path) in str(error)  # noqa: PT017
        else:  # a byte of the free text, or of the entry that has the hashes
            assert set(read.tensors) == set(tensors)
            assert all(bits_equal(read.tensors[name], array) for name, array in tensors.items())
    assert refused > 0.8 * len(variants)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": "text"}, "expected only tensors, got 'a', a str"),
        ({"a": {"b": b"bytes"}}, r"expected only tensors, got 'a\.b', a bytes"),
        ({"a.b": np.ones(1), "a": {"b": np.ones(1)}}, r"got 'a\.b' twice"),
        ({"params": {"a": np.ones(1)}, "metadata": {"sha256": "{"}}, "expected hashes of tensors"),
        ({"params": {"a": np.ones(1)}, "metadata": {"sha256": '{"b": "0"}'}}, "got those of others"),
        ({"params": {"a": np.ones(1)}, "metadata": {"sha256": '{"a": "0"}'}}, "'a' as it was written, got other bytes"),
        ({"params": {"a": np.ones(1)}, "metadata": {"aliases": '{"b": "c"}'}}, "expected alias 'b'"),
        (3, "expected a tree of tensors, got a int"),
    ],
)
def test_what_is_no_file_of_weights_is_named(tmp_path, content, message):
    (tmp_path / "w.msgpack").write_bytes(flax.serialization.msgpack_serialize(content))
    with pytest.raises(StoreError, match=rf"w\.msgpack: .*{message}"):
        read_tensors(tmp_path / "w.msgpack")


def test_what_cannot_be_written_is_named(tmp_path):
    for tensors, metadata, message in [
        ({"a": np.array(["text"])}, {}, "'a' of a numeric dtype"),
        ({"a": np.ones(1), "a.b": np.ones(1)}, {}, r"got 'a\.b' inside of it"),
        ({"a": np.ones(1)}, {"sha256": "x"}, "metadata without 'sha256'"),
    ]:
        with pytest.raises(StoreError, match=rf"w\.msgpack: .*{message}"):
            write_tensors(tmp_path / "w.msgpack", Checkpoint(tensors=tensors, metadata=metadata))
    assert not list(tmp_path.iterdir())
