"""Models in CTranslate2: the same log-probabilities, token by token, up to float32."""

import json
import re
import sys

import ctranslate2
import numpy as np
import pytest
import torch

import torch_reference
from parity import __main__ as cli
from parity import twins
from parity.convert import NotProvenError, convert
from parity.twins_proof import prove, sinusoids
from parity.weights import ctranslate2_export
from parity.weights.ctranslate2_export import write_ctranslate2
from parity.weights.formats import FieldError
from parity.weights.models import CONFIG
from parity.weights.piece_names import piece_names
from parity.weights.store import Checkpoint, StoreError, write_tensors
from tests.parity.formats.foreign import CLASSES, random_model
from train.bpe import BPETokenizer
from train.config import TokenizerConfig
from transformer_config import TransformerConfig

MODELS = {
    "post-norm": {},
    "pre-norm, untied, silu": {"norm_order": "pre", "activation": "silu", "tie_embeddings": "none"},
    "no biases, tanh gelu, another eps": {
        "norm_order": "pre",
        "norm_eps": 1e-3,
        "use_bias": False,
        "embedding_scale": False,
        "activation": "gelu_tanh",
    },
    "a table with an offset, a fixed bias": {
        "positions": "learned",
        "position_offset": 2,
        "output_bias": "fixed",
        "activation": "relu",
    },
    "a fixed table, one matrix, a trained bias": {
        "positions": "fixed",
        "tie_embeddings": "all",
        "src_vocab_size": 67,
        "output_bias": "trained",
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_log_probabilities(name, tmp_path):
    config = TransformerConfig.tiny(d_model=32, num_heads=4, **MODELS[name])
    weights = {
        key: array * (3 if array.ndim > 1 and "layers" in key else 1)
        for key, array in twins.random_weights(config, seed=1).items()
    }
    pieces = [str(i) for i in range(max(config.src_vocab_size, config.tgt_vocab_size))]
    write_ctranslate2(tmp_path / "model", config, weights, pieces=pieces, sinusoids=sinusoids)
    translator = ctranslate2.Translator(str(tmp_path / "model"), device="cpu", compute_type="float32")
    rng = np.random.default_rng(0)
    src, tgt = rng.integers(4, 60, (6, 7)), rng.integers(4, 60, (6, 5))
    src[:, -1] = config.eos_id
    scored = translator.score_batch(
        [[str(i) for i in row] for row in src.tolist()], [[str(i) for i in row] for row in tgt.tolist()]
    )
    model = torch_reference.Transformer(config, generator=torch.Generator())
    model.load_state_dict({key: torch.tensor(array) for key, array in weights.items()}, strict=False)
    read = np.concatenate([np.full((6, 1), config.bos_id), tgt], axis=1)
    predicted = torch.from_numpy(np.concatenate([tgt, np.full((6, 1), config.eos_id)], axis=1))
    with torch.no_grad():
        log_probs = model(torch.from_numpy(src), torch.from_numpy(read)).log_softmax(-1)
    expected = log_probs.gather(-1, predicted[..., None])[..., 0].numpy()
    np.testing.assert_allclose([each.log_probs for each in scored], expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_norm": "always"}, "final_norm='always', where it has 'if_pre'"),
        ({"window": 2}, "window=2, where it has None"),
        ({"norm_formula": "unbiased_deviation"}, "norm_formula='unbiased_deviation'"),
    ],
)
def test_what_it_cannot_express_is_refused(changes, message, tmp_path):
    config = TransformerConfig.tiny(**changes)
    with pytest.raises(FieldError, match=message):
        write_ctranslate2(tmp_path / "model", config, {}, pieces=[], sinusoids=sinusoids)
    assert not (tmp_path / "model").exists()


def converted(tmp_path, *, source="a.safetensors", **changes):
    config = TransformerConfig.tiny(d_model=32, num_heads=4, **changes)
    metadata = {CONFIG: json.dumps(config.to_dict())}
    path = tmp_path / source
    write_tensors(path, Checkpoint(tensors=twins.random_weights(config, seed=1), metadata=metadata))
    return convert(
        path,
        tmp_path / "model",
        source_format=None,
        target_format="ctranslate2",
        settings={},
        sinusoids=sinusoids,
        prove=prove,
    )


def test_a_conversion_is_proven(tmp_path, capsys):
    done = converted(tmp_path, positions_skip_padding=True)
    assert [link.second for link in done.proof.links] == ["CTranslate2"]
    assert done.proof.passed
    assert done.written.notes == ("pieces are named by their ids: no tokenizer.json or vocab.json names them all",)
    assert ctranslate2.contains_model(str(tmp_path / "model"))
    assert cli.main(["inspect", str(tmp_path / "model")]) == 1
    assert "expected a format that can be read, got ctranslate2, which is only written" in capsys.readouterr().err
    assert cli.main(["formats"]) == 0
    assert re.search(r"ctranslate2 +no +yes ", capsys.readouterr().out)


def test_an_error_of_the_export_is_found_and_leaves_nothing(tmp_path, monkeypatch):
    table = ctranslate2_export._table
    monkeypatch.setattr(ctranslate2_export, "_table", lambda *given: np.roll(table(*given), 1, axis=0))
    with pytest.raises(
        NotProvenError, match=r"model: not written, because .* CTranslate2: log-probabilities in float32"
    ):
        converted(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2.specs", None)
    with pytest.raises(StoreError, match=r"ctranslate2: expected it to be installed, .*pip install ctranslate2"):
        converted(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_names_of_pieces(tmp_path):
    assert piece_names(tmp_path, 3) is None
    (tmp_path / "vocab.json").write_text('{"</s>": 0, "▁a": 2, "b": 1}')
    assert piece_names(tmp_path, 3) == ("</s>", "b", "▁a")
    assert piece_names(tmp_path, 4) is None, "one has no name"
    tokenizer = BPETokenizer.train(["eins zwei", "one two"] * 3, TokenizerConfig(vocab_size=300))
    tokenizer.save(tmp_path / "tokenizer.json")
    pieces = piece_names(tmp_path, tokenizer.size)
    assert pieces[:5] == ("<pad>", "<bos>", "<eos>", "<unk>", "!")
    assert "".join(pieces[i] for i in tokenizer.encode(["two"])[0]) == "two"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(StoreError, match="expected the names of a vocabulary, got a damaged file"):
        piece_names(tmp_path, 3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CLASSES)
def test_from_the_classes_of_transformers(kind, tmp_path):
    random_model(kind, 11).float().save_pretrained(tmp_path / "source")
    target = tmp_path / "opus.mt-de-en"  # a folder, whatever dots it has in its name
    options = {"source_format": None, "settings": {}, "sinusoids": sinusoids, "prove": prove}
    done = convert(tmp_path / "source", target, target_format="ctranslate2", **options)
    assert [link.first for link in done.proof.links] == ["the source's own class", "our twin with the source's weights"]
    assert done.proof.passed
    convert(tmp_path / "source", tmp_path / "b.c", target_format=kind, **{**options, "prove": None})
