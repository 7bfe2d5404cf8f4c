"""Runs evaluated on a split: what is scored is what is written, and two runs are compared fairly."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import pytest
import sacrebleu
from rich.console import Console

from tests.train.conftest import Ended, listing, train
from tests.train.test_cli import HELP, python
from tests.train.test_translate import translate
from train import evaluate_run as module
from train.__main__ import main
from train.average import average_run
from train.config import CorpusConfig, OptimizerConfig
from train.corpus import load_split, split_name
from train.evaluate_run import evaluate_run
from train.run_dir import RunDir
from train.search import SearchConfig, SearchOptions
from train.translate import load_run
from train.translator import Translation, Translations, Translator
from transformer_config import BeamConfig, LengthConfig, SamplingConfig

GREEDY = SearchOptions(beam=1)


def evaluated(run: Path, **options):
    """The report, and what the terminal showed."""
    console = Console(record=True, width=100, file=io.StringIO())
    return evaluate_run(run, console=console, **options), console.export_text()


def lines_of(file: Path) -> list[str]:
    *lines, rest = file.read_bytes().decode().split("\n")
    assert rest == ""
    return lines


def faked(monkeypatch: pytest.MonkeyPatch, write, *, ended=True, too_long=()) -> None:
    """A translator that writes `write(line)`."""

    def fake(self, params, lines, **options):
        found = [(Translation(text=write(line), score=0.0, ended=ended),) for line in lines]
        return Translations(of_lines=tuple(found), too_long=too_long)

    monkeypatch.setattr(Translator, "translate", fake)


def another_corpus(whole: Ended, folder: Path, corpus: Path) -> Path:
    """The run, with a config that says that it was trained on `corpus`."""
    config = whole.copy(folder)
    moved = config.replace(corpus=dataclasses.replace(config.corpus, path=corpus))
    (folder / "config.json").write_text(json.dumps(moved.to_dict()))
    return folder


def test_the_written_file_has_the_scores(folder: Path, corpus_dir: Path) -> None:
    report, shown = evaluated(folder, split="val")
    file = folder / "hypotheses" / "val.en.txt"
    hypotheses, references = lines_of(file), lines_of(corpus_dir / "val.en")
    source = (corpus_dir / "val.de").read_bytes()
    assert hypotheses == translate(folder, source, beam=4) == list(report.evaluations[0].hypotheses)
    assert len(set(hypotheses)) > 2, "the test wants translations that differ"
    about = json.loads((folder / "hypotheses" / "val.en.txt.json").read_text())
    metrics = {"bleu": sacrebleu.BLEU(), "bleu_lowercased": sacrebleu.BLEU(lowercase=True), "chrf2": sacrebleu.CHRF()}
    for name, metric in metrics.items():
        score = metric.corpus_score(hypotheses, [references])
        assert about["scores"].pop(name) == score.score
        assert about["signatures"].pop(name) == str(metric.get_signature())
        assert f" {score.score:.2f} " in shown
        assert str(metric.get_signature()) in shown
        if name == "bleu":
            assert about["scores"].pop("length_ratio") == score.sys_len / score.ref_len
            assert f" {score.sys_len / score.ref_len:.3f} " in shown
    exact = sum(a == b for a, b in zip(hypotheses, references, strict=True)) / 5
    assert about["scores"] == {"exact_match": exact}
    assert about["signatures"] == {}
    assert (about["split"], about["languages"], about["sentences"], about["step"]) == ("val", ["de", "en"], 5, 12)
    assert about["search"]["kind"] == "beam"
    assert about["versions"]["sacrebleu"] == sacrebleu.__version__
    assert "against" not in about
    assert {file.name for file in (folder / "hypotheses").iterdir()} == {"val.en.txt", "val.en.txt.json"}
    assert 1 <= about["compilations"] <= about["max_compilations"]
    assert f"{about['compilations']} shapes compiled (at most {about['max_compilations']})." in shown


def test_hypotheses_stand_in_the_order_of_the_text(folder: Path, corpus: Path, monkeypatch) -> None:
    """One a line, whatever the model makes of it; and so they are scored."""
    faked(monkeypatch, lambda line: f"<{line}>\r\nx\u2028y")
    output = folder.parent / "new" / "out"
    report, _ = evaluated(folder, split="extra", data=corpus, output=output)
    assert lines_of(output) == [f"<{line}>  x\u2028y" for line in lines_of(corpus / "extra.de")]
    assert report.evaluations[0].hypotheses == tuple(lines_of(output))
    assert {file.name for file in output.parent.iterdir()} == {"out", "out.json"}
    assert not (folder / "hypotheses").exists()


def test_perfect_translations(folder: Path, corpus: Path, monkeypatch) -> None:
    answers = dict(zip(lines_of(corpus / "extra.de"), lines_of(corpus / "extra.en"), strict=True))
    faked(monkeypatch, lambda line: answers[line].upper())
    found = evaluated(folder, split="extra", data=corpus)[0].evaluations[0]
    assert (found.scores.bleu, found.scores.bleu_lowercased) == pytest.approx((0.0, 100.0))
    assert (found.scores.exact_match, found.length_ratio) == (0.0, 1.0)
    faked(monkeypatch, answers.__getitem__)
    found = evaluated(folder, split="extra", data=corpus)[0].evaluations[0]
    assert (found.scores.bleu, found.scores.chrf) == pytest.approx((100.0, 100.0))
    assert (found.scores.exact_match, found.length_ratio) == (1.0, 1.0)
    faked(monkeypatch, lambda line: f"{answers[line]} four")
    assert evaluated(folder, split="extra", data=corpus)[0].evaluations[0].length_ratio == 11 / 8


@pytest.mark.parametrize(
    ("options", "expected", "said"),
    [
        (
            {"beam": 3, "alpha": 1.5, "stopping": "ctranslate2", "length_penalty": "gnmt"},
            BeamConfig(
                beam_size=3,
                alpha=1.5,
                stopping="ctranslate2",
                length_penalty="gnmt",
                max_len=8,
                max_len_growth=2.0,
                max_len_ratio=2.0,
            ),
            "beam, beam_size=3, length_penalty=gnmt, alpha=1.5, stopping=ctranslate2, max_len=8, max_len_growth=2.0, "
            "max_len_ratio=2.0.",
        ),
        (
            {"beam": 1, "max_len": 7, "max_len_ratio": 9.0, "min_len": 2},
            LengthConfig(max_len=7, min_len=2, max_len_ratio=9.0),
            "greedy, min_len=2, max_len=7, max_len_ratio=9.0.",
        ),
        (
            {"sample": True, "seed": 5, "top_k": 3},
            SamplingConfig(top_k=3, max_len=8, max_len_growth=2.0, max_len_ratio=2.0),
            "sampling, temperature=1.0, top_k=3, max_len=8, max_len_growth=2.0, max_len_ratio=2.0, seed=5.",
        ),
    ],
)
def test_the_search_reaches_the_translator(folder: Path, monkeypatch, options, expected, said) -> None:
    """The same for both runs, and it is written down."""
    asked = []

    class Spy(Translator):
        def __init__(self, config, *others, search, seed, **more):
            asked.append((search, seed, config.evaluation.batch_size))
            super().__init__(config, *others, search=search, seed=seed, **more)

    monkeypatch.setattr(module, "Translator", Spy)
    faked(monkeypatch, lambda line: line)
    seed = options.get("seed", 0)
    report, shown = evaluated(folder, options=SearchOptions(**options), batch_size=2, against=folder)
    assert asked == [(expected, seed, 2)] * 2
    assert f"Search: {said}" in " ".join(shown.split())
    search = json.loads(report.to_json())["search"]
    assert search.pop("seed") == (seed if "sample" in options else None)
    assert search == {"kind": said.split(",")[0], **dataclasses.asdict(expected)}


def test_splits_by_name_and_by_role(folder: Path, corpus_dir: Path) -> None:
    by_role, by_name = (evaluated(folder, split=split, options=GREEDY)[0] for split in ("validation", "val"))
    assert by_role.evaluations[0].split == "val"
    assert by_role.evaluations[0].hypotheses == by_name.evaluations[0].hypotheses
    assert evaluated(folder, options=GREEDY)[0].evaluations[0].references == tuple(lines_of(corpus_dir / "test.en"))
    assert {file.name for file in (folder / "hypotheses").glob("*.txt")} == {"val.en.txt", "test.en.txt"}

    config = CorpusConfig(kind="files", path=corpus_dir, validation_split="test", test_split="test_2016")
    names = [split_name(config, split) for split in ("train", "validation", "test", "test_2016", "test_2017")]
    assert names == ["train", "test", "test", "test_2016", "test_2017"]
    demo = CorpusConfig(num_pairs=100)
    sizes = [len(load_split(demo, split_name(demo, split))) for split in ("train", "validation", "test")]
    assert sizes == [90, 5, 5]


def test_a_split_that_no_run_has_read(folder: Path, corpus: Path) -> None:
    (corpus / "more").mkdir()
    (corpus / "more" / "one.tsv").write_text("zwei drei\ttwo three\n")
    report, _ = evaluated(folder, split="more/one", data=corpus, options=GREEDY)
    assert report.evaluations[0].references == ("two three",)
    assert lines_of(folder / "hypotheses" / "more_one.en.txt") == translate(folder, b"zwei drei\n", beam=1)


def test_a_corpus_that_was_moved(whole: Ended, tmp_path: Path, corpus: Path) -> None:
    run = another_corpus(whole, tmp_path / "run", tmp_path / "gone")
    with pytest.raises(ValueError, match=r"--split test: .*gone: no folder; if it was moved: --data FOLDER"):
        evaluated(run)
    before = listing(corpus)
    moved, _ = evaluated(run, data=corpus, options=GREEDY)
    whole.copy(tmp_path / "same")
    assert moved.evaluations[0].scores == evaluated(tmp_path / "same", options=GREEDY)[0].evaluations[0].scores
    assert listing(corpus) == before


def test_averages_of_checkpoints(folder: Path, tmp_path: Path) -> None:
    report, shown = evaluated(folder, split="val", average_last=2, options=GREEDY)
    average_run(folder, tmp_path / "average", last=2)
    average, _ = evaluated(tmp_path / "average", split="val", options=GREEDY)
    newest, _ = evaluated(folder, split="val", options=GREEDY)
    hypotheses = [each.evaluations[0].hypotheses for each in (report, average, newest)]
    assert hypotheses[0] == hypotheses[1] != hypotheses[2]
    assert "step 12, average of the 2 newest checkpoints." in shown
    assert newest.evaluations[0].parameters == "newest checkpoint"


def test_moving_averages(tiny_run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_run(run, max_steps=3, optimizer=OptimizerConfig(warmup_steps=10, ema_decay=0.9)))
    for ema in (False, True):
        found = evaluated(run, ema=ema, options=GREEDY)[0].evaluations[0]
        assert (found.step, found.parameters) == (3, "moving average")
    averaged = evaluated(run, average_last=1, options=GREEDY)[0].evaluations[0]
    assert averaged.parameters == "average of the 1 newest checkpoints"


def test_what_was_cut_is_said(folder: Path, monkeypatch, capsys) -> None:
    faked(monkeypatch, lambda line: line)
    evaluated(folder, split="val")
    assert capsys.readouterr().err == ""
    faked(monkeypatch, lambda line: line, ended=False, too_long=(1, 4))
    found = evaluated(folder, split="val")[0].evaluations[0]
    assert (found.unfinished, found.too_long) == (5, 2)
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {folder}: 5 of 5 lines cut at the limit on length",
        f"warning: {folder}: 2 of 5 lines not translated, expected at most 1024 pieces",
    ]


def test_sources_that_are_too_long(folder: Path, corpus: Path, monkeypatch) -> None:
    lengths = [len(ids) + 1 for ids in load_run(folder).tokenizer.encode(lines_of(corpus / "extra.de"))]
    too_long = [length > min(lengths) for length in lengths]
    monkeypatch.setattr(module, "LONGEST_SOURCE", min(lengths))
    found = evaluated(folder, split="extra", data=corpus, options=GREEDY)[0].evaluations[0]
    assert 0 < sum(too_long) < 3
    assert found.too_long == sum(too_long)
    assert all(text == "" for text, over in zip(found.hypotheses, too_long, strict=True) if over)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "nope"}, r"--split nope: expected nope\.de and nope\.en .* holds .*extra\.de, extra\.en"),
        ({"split": "blind"}, r"--split blind: expected blind\.en or blind\.en\.gz in .*elsewhere"),
        ({"split": "blank"}, "--split blank: expected references to score with, got 2 lines without words"),
        ({"split": "empty"}, r"empty\.de, got an empty file"),
        ({"split": "none"}, r"expected at least one pair of sentences in .*none\.jsonl, got none"),
        ({"options": SearchOptions(nbest=2)}, "--nbest: expected 1, .* got 2"),
        ({"options": SearchOptions(top_k=2)}, "--top-k: expected only with --sample"),
        ({"average_last": 0}, "--average-last: expected at least 1, no --ema, got 0"),
        ({"average_last": 2, "ema": True}, "--average-last: .* got 2 --ema"),
        ({"average_last": 9}, "expected at least 9 checkpoints to average"),
        ({"ema": True}, "expected a checkpoint with ema"),
        ({"batch_size": 0}, "batch_size: expected more than 0, got 0"),
        ({"data": Path("nowhere")}, "--data: expected a folder, got nowhere"),
        ({"output": Path(".")}, r"--output: expected a file, got the folder \."),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, corpus: Path, monkeypatch, options, message) -> None:
    """Before anything is translated or written."""
    files = {"blind.de": "eins\n", "blank.de": "eins\nzwei\n", "blank.en": "\n \n", "none.jsonl": "\n"}
    for name, text in (files | {"empty.de": "", "empty.en": ""}).items():
        (corpus / name).write_text(text)
    monkeypatch.setattr(Translator, "translate", None)
    with pytest.raises(ValueError, match=message):
        evaluated(folder, **{"data": corpus} | options)
    assert not (folder / "hypotheses").exists()


def test_where_nothing_can_be_written_nothing_is_translated(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(Translator, "translate", None)
    with pytest.raises(OSError, match=r"config\.json"):
        evaluated(folder, output=folder / "config.json" / "out")


def test_a_demo_run_is_built_not_read(whole: Ended, tmp_path: Path, corpus: Path) -> None:
    run = whole.copy(tmp_path / "demo").run_dir
    demo = whole.config.replace(corpus=CorpusConfig(num_pairs=100))
    (run / "config.json").write_text(json.dumps(demo.to_dict()))
    with pytest.raises(ValueError, match="--data: expected none with corpus"):
        evaluated(run, data=corpus)
    with pytest.raises(ValueError, match="the demo corpus, which has train, validation, test, got 'val'"):
        evaluated(run, split="val")


def test_a_hub_corpus_in_a_folder(whole: Ended, tmp_path: Path) -> None:
    """`--data` stands for the dataset's name."""
    hub = CorpusConfig(kind="hub", hub="some/where", test_split="test")
    assert module._elsewhere(hub, None) == hub
    assert module._elsewhere(hub, tmp_path) == dataclasses.replace(hub, hub=str(tmp_path))


def test_the_command_line(folder: Path, corpus: Path, capsys) -> None:
    arguments = ["evaluate", "--run", str(folder), "--split", "extra", "--data", str(corpus), "--beam", "2"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "Split extra, de-en: 3 sentences" in shown
    assert "beam_size=2" in shown
    assert f"Written: {folder}/hypotheses/extra.en.txt\n" in shown
    output = folder / "out.txt"
    assert main([*arguments, "--json", "--against", str(folder), "--output", str(output)]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["search"]["beam_size"] == 2
    assert [each["p_value"] for each in about["differences"]] == [1.0, 1.0]
    assert lines_of(output) == lines_of(folder / "hypotheses" / "extra.en.txt")
    assert main(["evaluate", "--run", str(folder), "--split", "nope"]) == 1
    assert "error: " in capsys.readouterr().err


def test_help_answers_without_jax() -> None:
    done = python("-c", HELP.format(arguments=["evaluate", "--help"]))
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("--against", "--beam", "--split", "--data", "--json"))


def test_writing_to_the_run_leaves_it_as_it_was(folder: Path) -> None:
    before = listing(folder)
    evaluated(folder, options=GREEDY)
    after = listing(folder)
    new = {"hypotheses", "hypotheses/test.en.txt", "hypotheses/test.en.txt.json"}
    assert after.keys() - before.keys() == new
    assert {name: after[name] for name in before} == before
    assert RunDir(folder).read_config().run_dir == folder


def test_each_run_keeps_the_ids_of_its_own_vocabulary(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """What one model's translations begin with is another word, or none, to another."""
    asked = []

    class Spy(Translator):
        def __init__(self, config, *others, search, **more):
            asked.append((search.first_id, search.never, search.beam_size))
            super().__init__(config, *others, search=search, **more)

    shutil.copytree(folder, tmp_path / "other")
    other = RunDir(tmp_path / "other")
    theirs = SearchConfig(first_id=7, never=(0, 1, 5), beam_size=2)
    other.write_config(other.read_config().replace(search=theirs))
    monkeypatch.setattr(module, "Translator", Spy)
    faked(monkeypatch, lambda line: line)
    evaluated(folder, against=tmp_path / "other")
    assert asked == [(None, None, 4), (7, (0, 1, 5), 4)]
