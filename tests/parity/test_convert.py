import os

import numpy as np
import pytest

from parity.convert import convert
from parity.weights.problems import MappingError
from parity.weights.rules import bits_equal
from parity.weights.store import Checkpoint, read_tensors, write_tensors

TORCH, FLAX = "torch-reference", "flax"
CONFIG = {"config": '{"d_model": 6}'}
SRC, TGT = "src_embedding.weight", "tgt_embedding.weight"


def torch_layout(*, tied, dtype="float32"):
    source = np.random.default_rng(3)
    shapes = {SRC: (9, 6), TGT: (9, 6), "tgt_positions.table": (4, 6), "encoder.final_norm.weight": (6,)}
    for layer in ("encoder.layers.0", "decoder.layers.1"):
        shapes |= {f"{layer}.self_attn.{name}.weight": (6, 5) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
        shapes |= {
            f"{layer}.feed_forward.linear1.{leaf}": shape for leaf, shape in [("weight", (8, 6)), ("bias", (8,))]
        }
        shapes |= {f"{layer}.norm1.{leaf}": (6,) for leaf in ("weight", "bias")}
    if not tied:
        shapes |= {"output_projection.weight": (7, 6), "output_projection.bias": (7,)}
    tensors = {name: source.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    tensors[TGT] = tensors[SRC]  # equal values, which must not make them one tensor
    if tied:
        del tensors[TGT]
    return Checkpoint(tensors=tensors, aliases={TGT: SRC} if tied else {}, metadata=CONFIG)


def needs_torch_for(name):
    if name.endswith(".pt"):
        pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("first", "second"), [("a.pt", "b"), ("a.safetensors", "b.safetensors")])
def test_there_and_back(tmp_path, first, second, tied, dtype):
    needs_torch_for(first)
    original = torch_layout(tied=tied, dtype=dtype)
    a, b, c = tmp_path / first, tmp_path / second, tmp_path / ("back-" + first)
    write_tensors(a, original)
    summary = convert(a, b, source_format=TORCH, target_format=FLAX)
    assert (summary.tied, summary.tensors) == (tied, len(original.tensors))
    assert summary.elements == sum(array.size for array in original.tensors.values())
    assert ("one embedding" in str(summary)) == tied
    flax = read_tensors(b)
    assert (TGT in flax.tensors) == (not tied)
    assert not flax.aliases
    kernel = flax.tensors["encoder.layers.0.feed_forward.linear1.kernel"]
    assert bits_equal(kernel, original.tensors["encoder.layers.0.feed_forward.linear1.weight"].T)
    convert(b, c, source_format=FLAX, target_format=TORCH)
    back = read_tensors(c)
    assert set(back.tensors) == set(original.tensors)
    assert all(bits_equal(back.tensors[name], array) for name, array in original.tensors.items())
    assert (dict(back.aliases), dict(back.metadata)) == (dict(original.aliases), CONFIG)


def test_tied_under_the_other_name(tmp_path):
    original = torch_layout(tied=True)
    tensors = dict(original.tensors)
    tensors[TGT] = tensors.pop(SRC)
    write_tensors(tmp_path / "a.safetensors", Checkpoint(tensors=tensors, aliases={SRC: TGT}))
    assert convert(tmp_path / "a.safetensors", tmp_path / "b", source_format=TORCH, target_format=FLAX).tied
    flax = read_tensors(tmp_path / "b").tensors
    assert bits_equal(flax[SRC], original.tensors[SRC])
    assert TGT not in flax


@pytest.mark.parametrize("tied", [True, False])
def test_same_format_in_another_kind_of_file(tmp_path, tied):
    pytest.importorskip("torch")
    original = torch_layout(tied=tied)
    write_tensors(tmp_path / "a.pt", original)
    convert(tmp_path / "a.pt", tmp_path / "b.safetensors", source_format=TORCH, target_format=TORCH)
    read = read_tensors(tmp_path / "b.safetensors")
    assert all(bits_equal(read.tensors[name], array) for name, array in original.tensors.items())
    assert dict(read.aliases) == dict(original.aliases)


def test_weights_of_other_models_are_refused(tmp_path):
    original = torch_layout(tied=False)
    path, target = tmp_path / "a.safetensors", tmp_path / "b"
    write_tensors(path, Checkpoint(tensors={**original.tensors, "lm_head.weight": np.ones((2, 3))}))
    with pytest.raises(MappingError, match=r"lm_head\.weight"):
        convert(path, target, source_format=TORCH, target_format=FLAX)
    write_tensors(path, original)
    with pytest.raises(MappingError, match=r"linear1\.weight"):
        convert(
            path, tmp_path / "c.safetensors", source_format=FLAX, target_format=TORCH
        )  # mistaken for the other layout
    write_tensors(path, Checkpoint(tensors={"encoder.final_norm.weight": np.ones(3)}))
    with pytest.raises(MappingError, match="not the weights of a twin"):
        convert(path, target, source_format=TORCH, target_format=FLAX)
    write_tensors(path, Checkpoint(tensors=original.tensors, aliases={"encoder.norm1.weight": SRC}))
    with pytest.raises(ValueError, match="alone to be a second name"):
        convert(path, target, source_format=TORCH, target_format=FLAX)
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_nothing_is_overwritten_unasked(tmp_path):
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_tensors(source, torch_layout(tied=True))
    target.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"b\.safetensors"):
        convert(source, target, source_format=TORCH, target_format=FLAX)
    assert target.read_bytes() == b"mine"
    convert(source, target, source_format=TORCH, target_format=FLAX, overwrite=True)
    assert SRC in read_tensors(target).tensors
    for same in (source, tmp_path / "x" / ".." / "a.safetensors", tmp_path):
        with pytest.raises(ValueError, match="apart from the source"):
            convert(source, same, source_format=TORCH, target_format=FLAX, overwrite=True)


def test_paths_must_fit_their_format(tmp_path):
    source = tmp_path / "a.safetensors"
    write_tensors(source, torch_layout(tied=True))
    for target, target_format, message in [("b.pt", FLAX, "Orbax"), ("b", TORCH, r"\.pt"), ("b", "jax", "'jax'")]:
        with pytest.raises(ValueError, match=message):
            convert(source, tmp_path / target, source_format=TORCH, target_format=target_format)
    with pytest.raises(FileNotFoundError):
        convert(tmp_path / "no.safetensors", tmp_path / "b", source_format=TORCH, target_format=FLAX)
