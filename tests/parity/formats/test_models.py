"""Models in files, from every format to every other that can hold them, and back."""

import json

import pytest
import torch
from safetensors.numpy import load_file

import torch_reference
from parity import __main__ as cli
from parity.twins import random_weights
from parity.weights.formats import FORMATS, FieldError
from parity.weights.models import CONFIG, detect, read_model, write_model
from parity.weights.rules import bits_equal
from parity.weights.sharded import Beside
from parity.weights.store import Checkpoint, write_tensors
from tests.parity.formats.foreign import CLASSES, batch, fields_of, random_model, their_logits
from torch_reference.embedding import Positions
from transformer_config import TransformerConfig


def sinusoids(config, length):
    return Positions(config.replace(dtype="float64"), generator=torch.Generator())(length).numpy()


def carry(source, target, format_name, **options):
    with Beside(target) as path:
        return write_model(read_model(source), path, format_name, source=source, sinusoids=sinusoids, **options)


@pytest.fixture(params=CLASSES)
def saved(request, tmp_path):
    """A model of a real class in float32, as the class saves it."""
    model = random_model(request.param, 11).float()
    model.save_pretrained(tmp_path / "source")
    return model, tmp_path / "source"


def loaded(folder):
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    return CLASSES[kind][1].from_pretrained(folder).eval()


def same_logits(first, second):
    config = FORMATS[first.config.model_type].read(fields_of(first))
    src, tgt_in, _ = batch(config, 0)
    with torch.no_grad():
        return torch.equal(their_logits(first, src, tgt_in), their_logits(second, src, tgt_in))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["torch-reference", "flax", "itself"])
def test_there_and_back(saved, tmp_path, way):
    model, source = saved
    kind = model.config.model_type
    assert detect(source) == kind
    between = tmp_path / ("between" if way == "itself" else "between.safetensors")
    carry(source, between, kind if way == "itself" else way)
    assert detect(between) == (kind if way == "itself" else way)
    carry(between, tmp_path / "back", kind)
    back = loaded(tmp_path / "back")
    assert same_logits(model, back)
    for name, tensor in model.state_dict().items():
        assert bits_equal(back.state_dict()[name].numpy(), tensor.numpy()), name
    assert sorted(child.name for child in tmp_path.iterdir()) == sorted(["source", between.name, "back"])


@pytest.mark.filterwarnings("ignore")
def test_shards(saved, tmp_path):
    model, source = saved
    written = carry(source, tmp_path / "shards", model.config.model_type, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == written.nbytes
    tensors = [name for file in files for name in load_file(tmp_path / "shards" / file)]
    assert sorted(tensors) == sorted(index["weight_map"])
    assert same_logits(model, loaded(tmp_path / "shards"))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    ours, again = read_model(tmp_path / "theirs"), read_model(tmp_path / "shards")
    assert all(bits_equal(ours.weights[name], again.weights[name]) for name in again.weights)


@pytest.mark.filterwarnings("ignore")
def test_what_is_ignored_is_listed_a_line_a_reason(saved, capsys):
    assert cli.main(["inspect", str(saved[1])]) == 0
    lines = [line.removeprefix("ignored ") for line in capsys.readouterr().out.splitlines() if "ignored " in line]
    fields = {reason: names.split(", ") for names, reason in (line.split(": ", 1) for line in lines)}
    assert len(fields) == len(lines) > 2
    assert {name: reason for reason in fields for name in fields[reason]} == read_model(saved[1]).ignored


OURS = {
    "marian": {"tie_embeddings": "all", "src_vocab_size": 67, "max_len": 40},
    "fsmt": {"tie_embeddings": "none", "output_bias": "never", "max_len": 40},
    "m2m_100": {
        "tie_embeddings": "all",
        "src_vocab_size": 67,
        "norm_order": "pre",
        "positions": "concatenated_half_minus_1",
        "position_offset": 1,
        "positions_skip_padding": True,
        "max_len": 40,
    },
}


def our_model(path, **changes):
    """Of our own reference, in a file."""
    config = TransformerConfig.tiny(**changes)
    metadata = {CONFIG: json.dumps(config.to_dict())}
    write_tensors(path, Checkpoint(tensors=random_weights(config, seed=1), metadata=metadata))
    return config


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OURS)
def test_our_own_model_in_a_foreign_class(kind, tmp_path):
    """Sinusoids that we compute become a table there."""
    config = our_model(tmp_path / "a.safetensors", **OURS[kind])
    written = carry(tmp_path / "a.safetensors", tmp_path / "b", kind)
    assert "positions" in written.changed
    model = loaded(tmp_path / "b").double()
    reference = torch_reference.Transformer(
        config.replace(dtype="float64", param_dtype="float64"), generator=torch.Generator()
    )
    weights = {name: torch.tensor(a) for name, a in read_model(tmp_path / "a.safetensors").weights.items()}
    reference.load_state_dict(weights, strict=False)
    src, tgt_in, tgt = batch(config, 0)
    src[2, :3] = 5
    with torch.no_grad():
        ours, theirs = reference(torch.from_numpy(src), torch.from_numpy(tgt_in)), their_logits(model, src, tgt_in)
    real = torch.from_numpy(tgt != config.pad_id)
    # The table is rounded to float32, of M2M100 the angles too.
    torch.testing.assert_close(ours[real], theirs[real], rtol=0, atol=3e-5 * float(ours.abs().max()))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("marian", {"norm_order": "pre"}, "norm_order='pre', where it has 'post'"),
        ("marian", {"window": 3}, "window=3, where it has None"),
        ("marian", {"norm_eps": 1e-6}, "norm_eps=1e-06, where it has 1e-05"),
        ("m2m_100", {"tie_embeddings": "output", "src_vocab_size": 67}, "tie_embeddings='output'"),
        ("m2m_100", {"positions": "interleaved"}, "the positions that this format's class computes"),
        ("fsmt", {"output_bias": "if_untied"}, "output_bias='if_untied', where it has 'never'"),
    ],
)
def test_what_a_format_cannot_say_is_refused(kind, changes, message, tmp_path):
    our_model(tmp_path / "a.safetensors", **{**OURS[kind], **changes})
    with pytest.raises(FieldError, match=message):
        carry(tmp_path / "a.safetensors", tmp_path / "b", kind)
    assert [child.name for child in tmp_path.iterdir()] == ["a.safetensors"]


def test_folders_that_were_made_for_it_go_with_it(tmp_path):
    def broken_off():
        with Beside(tmp_path / "new" / "folder" / "model") as path:
            path.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        broken_off()
    assert not list(tmp_path.iterdir())
    with Beside(tmp_path / "new" / "model") as path:
        path.write_text("whole")
    assert (tmp_path / "new" / "model").read_text() == "whole"
