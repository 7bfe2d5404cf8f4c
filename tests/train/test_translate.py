import io
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.train.conftest import train
from train.corpus import load_corpus
from train.evaluate import Translator
from train.translate import load_run, translate_stream

LINES = ["eins zwei", "", "neun acht sieben", "eins", "  ", "drei \u2028 vier", "sechs"]


@pytest.fixture(scope="module")
def run_dir(tiny_run, tmp_path_factory) -> Path:
    """A run of a few steps that has ended."""
    folder = tmp_path_factory.mktemp("run")
    train(tiny_run(folder, max_steps=3))
    return folder


def translate(run_dir: Path, text: bytes, **options) -> list[str]:
    with tempfile.TemporaryFile("w+", encoding="utf-8", newline="") as target:
        assert translate_stream(run_dir, io.BytesIO(text), target, **options) == 0
        target.seek(0)
        written = target.read()
    assert written.endswith("\n") or not text
    return written.split("\n")[:-1]


def test_lines_keep_their_order_and_number(run_dir, capsys):
    trained = load_run(run_dir)
    assert trained.step == 3
    expected = Translator(trained.config, trained.tokenizer, trained.devices).translate(trained.params, LINES)
    lines = translate(run_dir, "\n".join(LINES).encode() + b"\n")
    assert lines == [line.replace("\n", " ") for line in expected.lines]
    assert lines[1] == lines[4] == ""
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == [f"warning: line {i + 1}: translation cut at the limit on length" for i in expected.unfinished]


def test_batch_size_and_line_ends_change_nothing(run_dir, monkeypatch):
    expected = translate(run_dir, "\n".join(LINES).encode())
    monkeypatch.setattr("train.translate.LINES_AT_ONCE", 3)
    assert translate(run_dir, "\r\n".join(LINES).encode(), batch_size=2) == expected
    assert translate(run_dir, b"") == []


def test_unfinished_lines_are_numbered_over_the_whole_input(run_dir, monkeypatch, capsys):
    from train.evaluate import Translations

    monkeypatch.setattr("train.translate.LINES_AT_ONCE", 2)
    fake = lambda self, params, lines: Translations(lines=tuple(lines), unfinished=(1,))  # noqa: E731
    monkeypatch.setattr(Translator, "translate", fake)
    assert translate(run_dir, b"a\nb\nc\nd\n") == ["a", "b", "c", "d"]
    assert [line.split(":")[1] for line in capsys.readouterr().err.splitlines()] == [" line 2", " line 4"]


def test_bytes_that_are_no_utf8_name_the_line(run_dir):
    with pytest.raises(ValueError, match=r"standard input, line 2: expected UTF-8, got .*0xff"):
        translate(run_dir, b"eins\nzw\xffei\n")


def test_the_loaded_run_is_what_was_trained(run_dir):
    trained = load_run(run_dir)
    assert trained.config.model.src_vocab_size == trained.tokenizer.size
    assert all(np.isfinite(value).all() for value in trained.params.values())
    corpus = load_corpus(trained.config.corpus)
    assert trained.tokenizer.decode(trained.tokenizer.encode(corpus.test.target)) == list(corpus.test.target)


def test_what_is_missing_is_named(run_dir, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere/config\.json: expected the config of a run"):
        load_run(tmp_path / "nowhere")
    for name in ("config.json", "tokenizer.json"):
        expected = {"config.json": r"tokenizer\.json", "tokenizer.json": "checkpoints: expected the checkpoints"}[name]
        (tmp_path / name).write_bytes((run_dir / name).read_bytes())
        with pytest.raises(FileNotFoundError, match=expected):
            load_run(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FileNotFoundError, match="expected a finished checkpoint, found none"):
        load_run(tmp_path)
