import io
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.train.conftest import train
from train.corpus import load_corpus
from train.search import SearchOptions
from train.translate import load_run, translate_stream
from train.translator import Translation, Translations, Translator

LINES = ["eins zwei", "", "neun acht sieben", "eins", "  ", "drei \u2028 vier", "sechs"]


@pytest.fixture(scope="module")
def run_dir(tiny_run, tmp_path_factory) -> Path:
    """A run of a few steps that has ended."""
    folder = tmp_path_factory.mktemp("run")
    train(tiny_run(folder, max_steps=3))
    return folder


GREEDY = SearchOptions(beam=1, max_len_ratio=1e6)


def translate(run_dir: Path, text: bytes, *, status=0, batch_size=None, num_devices=1, **options) -> list[str]:
    trained = load_run(run_dir, num_devices=num_devices).with_batch_size(batch_size)
    search = SearchOptions(**options) if options else GREEDY
    with tempfile.TemporaryFile("w+", encoding="utf-8", newline="") as target:
        assert translate_stream(trained, io.BytesIO(text), target, options=search) == status
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
    *warnings, summary = capsys.readouterr().err.splitlines()
    assert warnings == [f"warning: line {i + 1}: translation cut at the limit on length" for i in expected.unfinished]
    assert summary == "7 lines translated with 1 shapes compiled (at most 1)."


def test_batch_size_and_line_ends_change_nothing(run_dir, monkeypatch):
    expected = translate(run_dir, "\n".join(LINES).encode())
    monkeypatch.setattr("train.translate.LINES_AT_ONCE", 3)
    assert translate(run_dir, "\r\n".join(LINES).encode(), batch_size=2) == expected
    assert translate(run_dir, b"") == []


def test_unfinished_lines_are_numbered_over_the_whole_input(run_dir, monkeypatch, capsys):
    monkeypatch.setattr("train.translate.LINES_AT_ONCE", 2)

    def fake(self, params, lines, **options):
        return Translations(of_lines=tuple((Translation(text=x, score=0.0, ended=x in "ac"),) for x in lines))

    monkeypatch.setattr(Translator, "translate", fake)
    assert translate(run_dir, b"a\nb\nc\nd\n") == ["a", "b", "c", "d"]
    assert [line.split(":")[1] for line in capsys.readouterr().err.splitlines()[:-1]] == [" line 2", " line 4"]


def test_lines_that_are_too_long_are_said(run_dir, monkeypatch, capsys):
    """Neither cut nor lost: an empty line stands for them, and the status says that not all was translated."""
    monkeypatch.setattr("train.translate.LONGEST_SOURCE", 20)
    lines = translate(run_dir, b"eins\n" + b"neun " * 40 + b"\nzwei\n", status=1)
    assert lines[1] == ""
    assert [lines[0], lines[2]] == translate(run_dir, b"eins\nzwei\n")
    assert "warning: line 2: not translated, expected at most 20 pieces\n" in capsys.readouterr().err


def test_n_best(run_dir):
    lines = translate(run_dir, b"eins zwei\n\nneun\n", beam=3, nbest=3)
    numbers, texts, scores = zip(*(line.split(" ||| ") for line in lines), strict=True)
    assert numbers == tuple("000111222")
    assert texts[3:6] == ("", "", "")
    assert len(set(texts[:3])) == 3
    for start in (0, 6):
        of_line = [float(score) for score in scores[start : start + 3]]
        assert of_line == sorted(of_line, reverse=True)
        assert of_line[0] < 0
    best = translate(run_dir, b"eins zwei\n\nneun\n", beam=3)
    assert best == [texts[0], "", texts[6]]


@pytest.mark.parametrize("options", [{"beam": 3}, {"sample": True, "nbest": 2, "top_k": 7, "temperature": 0.8}])
def test_what_stands_beside_a_line_changes_nothing(run_dir, options):
    """D3: batch size, order, neighbours, devices; for samples, as long as the line has the same number."""

    def translated(lines, **more):
        """Scores to four digits: float32 products of other sizes may round otherwise."""
        written = translate(run_dir, "\n".join(lines).encode(), **options, **more)
        return [line[:-2] if "|||" in line else line for line in written]

    expected = translated(LINES)
    each = options.get("nbest", 1)
    assert len(expected) == each * len(LINES)
    for batch_size in (1, 3):
        assert translated(LINES, batch_size=batch_size) == expected
    assert translated(LINES, num_devices=8) == expected
    others = [line if i == 2 else "acht drei fünf eins eins sechs" for i, line in enumerate(LINES)]
    among_others = translated(others)
    assert among_others[2 * each : 3 * each] == expected[2 * each : 3 * each]


@pytest.mark.parametrize("options", [{"beam": 2}, {"beam": 1}, {"sample": True, "nbest": 2}])
def test_what_needs_more_room_is_translated_again(run_dir, monkeypatch, options):
    trained = load_run(run_dir)
    search = SearchOptions(**options).search(max_len=8)

    def translated():
        lines: list[int] = []
        translator = Translator(
            trained.config, trained.tokenizer, trained.devices, search=search, progress=lines.append
        )
        found = translator.translate(trained.params, LINES)
        assert translator.compilations <= translator.max_compilations
        assert sum(lines) == sum(bool(line.strip()) for line in LINES)
        return found, translator.compilations

    at_once, compilations = translated()
    assert compilations == 1
    monkeypatch.setattr("train.decode_shapes.ROOM", 0.25)
    in_turns, compilations = translated()
    assert compilations > 1
    assert in_turns.unfinished == at_once.unfinished
    for first, second in zip(in_turns.of_lines, at_once.of_lines, strict=True):
        assert [one.text for one in first] == [one.text for one in second]
        assert [one.score for one in first] == pytest.approx([one.score for one in second], abs=1e-4)


def test_samples(run_dir):
    def draw(seed, nbest=40, **options):
        lines = translate(run_dir, b"eins zwei drei\n", sample=True, nbest=nbest, seed=seed, **options)
        return [line.split(" ||| ")[1] for line in lines]

    assert draw(0) == draw(0)
    assert draw(0)[:9] == draw(0, nbest=9)
    assert draw(0) != draw(1)
    assert len(set(draw(0))) > 20
    greedy = translate(run_dir, b"eins zwei drei\n", beam=1)
    assert set(draw(0, top_k=1)) == set(draw(0, top_p=1e-6)) == set(draw(0, temperature=1e-4)) == set(greedy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.5}, "--temperature: expected only with --sample"),
        ({"top_p": 0.5}, "--top-p: expected only with --sample"),
        ({"beam": 2, "nbest": 3}, "num_hypotheses: expected at most beam_size=2, got 3"),
        ({"beam": 0}, "beam_size: expected at least 1, got 0"),
        ({"alpha": -1.0}, "alpha: expected at least 0, got -1.0"),
        ({"sample": True, "temperature": 0.0}, "temperature: expected more than 0, got 0.0"),
        ({"sample": True, "top_p": 1.5}, r"top_p: expected a share in \(0, 1\], got 1.5"),
        ({"sample": True, "top_k": 0}, "top_k: expected at least 1, got 0"),
        ({"min_len": 200}, "min_len: expected less than max_len="),
        ({"max_len_ratio": 0.0}, "max_len_ratio: expected more than 0, got 0.0"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        SearchOptions(**options).search(max_len=128)


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
