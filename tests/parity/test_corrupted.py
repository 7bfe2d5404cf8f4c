"""1,000 damaged checkpoints: each is refused by name, or converts to what its own loader reads of it."""

import json
import os
import shutil
import time

import numpy as np
import pytest
import safetensors.torch
import torch

from parity.convert import convert
from parity.twins_proof import sinusoids
from parity.weights.checkpoint import StoreError
from parity.weights.formats import FORMATS, FieldError, Fields
from parity.weights.formats.generation import DEFAULTS as SEARCH_DEFAULTS
from parity.weights.formats.generation import read_generation
from parity.weights.models import CONFIG
from parity.weights.problems import MappingError
from tests.parity.corrupted_sources import SOURCES, damaged

VARIANTS = 125  # of each of eight sources
SECONDS = 20
"""For one variant: what takes longer hangs."""


@pytest.fixture
def quick(monkeypatch):
    """Files that nobody needs after a power cut."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def out(tmp_path):
    """Where nothing but results may stand."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def whole_files(source, folder):
    """The checkpoint's files before anything has happened to them."""
    folder.mkdir(parents=True)
    source.build(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def put(files, folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def run(source, folder, out):
    return convert(
        folder / source.path,
        out / source.target,
        source_format=source.format_name if source.settings else None,
        target_format=source.target_format,
        settings=source.settings,
        sinusoids=sinusoids,
        prove=None,
    )


def fault_of_result(source, folder, target):
    """How the result differs from what the source's own loader reads, mapped by the format's table; or None."""
    config, weights = source.expected(folder)
    format_ = FORMATS[source.target_format]
    mapping = format_.mapping(config)
    expected = {n: a for n, a in mapping.inverse().apply(weights).items() if n not in mapping.source_aliases}
    if target.is_dir():
        got = safetensors.torch.load_file(target / "model.safetensors")
        values = json.loads((target / "config.json").read_text())
        if search_of(target, config) != search_of(folder, config):
            return "another search"
    else:
        got = safetensors.torch.load_file(target)
        with safetensors.safe_open(target, "pt") as opened:
            values = json.loads(opened.metadata()[CONFIG])
    if format_.read(Fields(values, file="the target")) != config:
        return "another config"
    if got.keys() != expected.keys():
        return f"other names: {sorted(got.keys() ^ expected.keys())}"
    for name, array in expected.items():
        if got[name].isnan().any():
            return f"NaN in {name}"
        theirs = torch.from_numpy(np.ascontiguousarray(array))
        if got[name].dtype != theirs.dtype or got[name].shape != theirs.shape or not torch.equal(got[name], theirs):
            return f"another {name}"
    return None


def search_of(folder, config):
    values = json.loads((folder / "generation_config.json").read_text())
    return read_generation(Fields(values, file="generation_config.json", defaults=SEARCH_DEFAULTS), config)


def fault_of_error(error, folder):
    """What is wrong with a refusal, or None."""
    if type(error) not in (StoreError, FieldError, MappingError, FileNotFoundError):
        return f"{type(error).__name__}, which is none of those that convert documents"
    if str(folder) not in str(error) or "expected" not in str(error):
        return "a message without the file, or without what was expected"
    str(error).encode()  # what cannot be printed is no message
    return None


def fault(source, folder, out):
    """What is wrong with the conversion of one variant, or None; and whether it was refused."""
    started = time.monotonic()
    try:
        run(source, folder, out)
    except Exception as error:
        found = fault_of_error(error, folder) or (f"left {os.listdir(out)}" if os.listdir(out) else None)
        return found and f"{found}: {error!r}", True
    if time.monotonic() - started > SECONDS:
        return "it took too long", False
    target = out / source.target
    found = fault_of_result(source, folder, target)
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    return found, False


@pytest.mark.filterwarnings("ignore")  # torch's and transformers', of damaged files
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", SOURCES)
def test_a_damaged_checkpoint_is_refused_or_read_as_it_stands(name, tmp_path, out):
    source, folder = SOURCES[name], tmp_path / "source"
    files = whole_files(source, tmp_path / "whole")
    put(files, folder)
    assert fault(source, folder, out) == (None, False), "the whole one"
    faults, refused = {}, 0
    weights = [file for file in files if not file.endswith("config.json")]
    for seed in range(VARIANTS):
        rng = np.random.default_rng([seed, len(name)])
        file = str(rng.choice(weights if rng.integers(3) else list(files)))
        kind, data = damaged(rng, file, files[file])
        put({**files, file: data}, folder)
        found, refusal = fault(source, folder, out)
        refused += refusal
        if found is not None:
            faults[f"{seed}: {file}, {kind}"] = found
    assert not faults, "\n".join(f"{variant}: {found}" for variant, found in faults.items())
    assert refused > VARIANTS // 3


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.has_hashes])
def test_a_flipped_bit_of_a_weight_that_has_a_hash_is_refused(name, tmp_path, out):
    source, folder = SOURCES[name], tmp_path / "source"
    files = whole_files(source, tmp_path / "whole")
    put(files, folder)
    _, tensors = source.load(folder)
    rng = np.random.default_rng(len(name))
    for key in rng.choice(list(tensors), 20):
        data = tensors[key].numpy().tobytes()
        file = next(file for file, content in files.items() if data in content)
        at = files[file].index(data) + int(rng.integers(len(data)))
        changed = bytearray(files[file])
        changed[at] ^= 1 << int(rng.integers(8))
        put({**files, file: bytes(changed)}, folder)
        with pytest.raises(StoreError, match=rf"{file}: expected '.*' as it was written, got other bytes"):
            run(source, folder, out)
        assert not os.listdir(out)


def edited(change):
    """A config.json, or generation_config.json, after a change."""
    return lambda data: json.dumps(change(json.loads(data))).encode()


def relabelled(data):
    """The first tensor of a safetensors file said to be of integers."""
    return data.replace(b'"F32"', b'"I32"', 1)


def marked_as_folder(data):
    """The last of a zip's records of data."""
    at = data.rindex(b"PK\x01\x02", 0, data.rindex(b"/data/"))
    return data[: at + 38] + b"\x10" + data[at + 39 :]


CLAIMS = {
    "layers": ("marian", "config.json", edited(lambda v: {**v, "decoder_layers": 10**9}), "as many layers as"),
    "width": (
        "marian",
        "config.json",
        edited(lambda v: {**v, "d_model": 10**9}),
        "the width of a tensor, got 1000000000",
    ),
    "positions": (
        "our shards",
        "config.json",
        edited(lambda v: {**v, "max_position_embeddings": 10**9}),
        "max_position_embeddings: expected an integer of at most 131072",
    ),
    "depth": ("marian", "config.json", lambda data: b'{"a":' + b"[" * 10**5, r"config\.json: expected JSON"),
    "twice": ("marian", "config.json", lambda data: b'{"d_model":9,' + data[1:], "the field 'd_model' twice"),
    "heads": (
        "marian",
        "config.json",
        edited(lambda v: {**v, "encoder_attention_heads": 3, "decoder_attention_heads": 3}),
        r"config\.json: num_heads: expected a divisor of d_model=8, got 3",
    ),
    "integers": ("marian", "model.safetensors", relabelled, "expected floating-point numbers in our '.*', got int32"),
    "relabelled": (
        "our safetensors",
        "m.safetensors",
        relabelled,
        "the names, dtypes, shapes and text that were written",
    ),
    "text": (
        "our pt",
        "m.pt",
        lambda data: data.replace(b'"norm_eps": 1e-05', b'"norm_eps": 1e-04'),
        "the names, dtypes, shapes and text that were written",
    ),
    "no data": ("our pt", "m.pt", marked_as_folder, r"expected '.*/data/\d+' as torch\.save stores it, got a folder"),
    "search": (
        "marian",
        "generation_config.json",
        edited(lambda v: {**v, "length_penalty": []}),
        r"generation_config\.json: length_penalty: expected a number of at least 0, got \[\]",
    ),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CLAIMS)
def test_what_was_once_believed_is_refused(case, tmp_path, out):
    name, file, change, message = CLAIMS[case]
    source, folder = SOURCES[name], tmp_path / "source"
    files = whole_files(source, tmp_path / "whole")
    put({**files, file: change(files[file])}, folder)
    with pytest.raises((StoreError, FieldError), match=message):
        run(source, folder, out)
    assert not os.listdir(out)


def overwritten(target, change):
    tensors = safetensors.torch.load_file(target)
    with safetensors.safe_open(target, "pt") as opened:
        text = opened.metadata()
    change(tensors, text)
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target, text)


NORM = "encoder.layers.0.norm1.weight"
WRONG = {
    "one bit": lambda tensors, text: tensors[NORM].view(torch.int32)[1].bitwise_xor_(1),
    "NaN": lambda tensors, text: tensors[NORM].fill_(float("nan")),
    "a lost tensor": lambda tensors, text: tensors.pop(NORM),
    "another dtype": lambda tensors, text: tensors.update({NORM: tensors[NORM].double()}),
    "transposed": lambda tensors, text: tensors.update(
        {name: tensor.T for name, tensor in tensors.items() if name.endswith("self_attn.q_proj.weight")}
    ),
    "another config": lambda tensors, text: text.update(
        {CONFIG: text[CONFIG].replace('"activation": "gelu"', '"activation": "relu"')}
    ),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_conversion_would_be_found(wrong, tmp_path, out, monkeypatch):
    source, folder = SOURCES["our pt"], tmp_path / "source"
    put(whole_files(source, tmp_path / "whole"), folder)
    right = run

    def run_wrong(*arguments):
        right(*arguments)
        overwritten(out / source.target, WRONG[wrong])

    monkeypatch.setitem(fault.__globals__, "run", run_wrong)
    found, refused = fault(source, folder, out)
    assert found is not None
    assert not refused


@pytest.mark.parametrize(
    ("error", "leaves", "message"),
    [
        (KeyError("d_model"), False, "KeyError, which is none of those"),
        (StoreError("expected whole weights"), False, "a message without the file"),
        (StoreError("{folder}/m.pt: expected whole weights"), True, "left"),
        (StoreError("{folder}/m.pt: expected whole weights"), False, None),
    ],
)
def test_a_wrong_refusal_would_be_found(error, leaves, message, tmp_path, out, monkeypatch):
    def run_wrong(*arguments):
        if leaves:
            (out / "half").touch()
        raise type(error)(str(error).format(folder=tmp_path))

    monkeypatch.setitem(fault.__globals__, "run", run_wrong)
    found, refused = fault(SOURCES["our pt"], tmp_path, out)
    assert refused
    assert (found is None) == (message is None)
    assert message is None or message in found
