"""Two runs evaluated on the same text: their difference, and how much of it is luck."""

import json
import shutil
from pathlib import Path

import pytest
import sacrebleu
from sacrebleu.significance import PairedTest

from tests.train.conftest import Ended
from tests.train.test_evaluate_run import GREEDY, another_corpus, evaluated, lines_of
from tests.train.test_translate import translate


def test_a_run_is_as_good_as_itself(folder: Path) -> None:
    report, shown = evaluated(folder, split="val", against=folder, options=GREEDY)
    assert [(each.metric, each.difference, each.p_value) for each in report.differences] == [
        ("BLEU", 0.0, 1.0),
        ("chrF2", 0.0, 1.0),
    ]
    assert all(each.interval == each.against_interval for each in report.differences)
    assert shown.count(" +0.00 ") == shown.count(" 1.0000 ") == 2
    files = [folder / "hypotheses" / f"val.en.txt{end}" for end in ("", ".against")]
    assert lines_of(files[0]) == lines_of(files[1])


def test_checkpoints_are_compared(folder: Path, tmp_path: Path, whole: Ended, corpus_dir: Path) -> None:
    """Which run is which, and that sacreBLEU finds the same on what was written."""
    other = whole.copy(tmp_path / "earlier").run_dir
    shutil.rmtree(other / "checkpoints" / "12")
    report, shown = evaluated(folder, split="val", against=other, options=GREEDY)
    files = [folder / "hypotheses" / f"val.en.txt{end}" for end in ("", ".against")]
    ours, theirs = map(lines_of, files)
    assert ours != theirs
    assert [each.step for each in report.evaluations] == [12, 9]
    assert theirs == translate(other, (corpus_dir / "val.de").read_bytes(), beam=1)
    metrics = {"BLEU": sacrebleu.BLEU(), "chrF2": sacrebleu.CHRF()}
    references = lines_of(corpus_dir / "val.en")
    signatures, results = PairedTest([("b", theirs), ("a", ours)], metrics, [references], test_type="bs")()
    about = json.loads((folder / "hypotheses" / "val.en.txt.json").read_text())
    assert about["against"]["step"] == 9
    for each, written in zip(report.differences, about["differences"], strict=True):
        before, after = results[each.metric]
        assert each.signature == str(signatures[each.metric])
        assert each.signature in shown
        assert "seed:12345" in each.signature
        assert (each.score, each.against_score) == (after.score, before.score)
        assert each.interval == (after.mean - after.ci, after.mean + after.ci)
        assert each.against_interval == (before.mean - before.ci, before.mean + before.ci)
        assert written["difference"] == each.difference == after.score - before.score
        assert f" {each.difference:+.2f} " in shown
        if each.difference:
            assert written["p_value"] == each.p_value == after.p_value
    assert report.differences[1].difference != 0
    rows = [row.split("│")[2].strip() for row in shown.splitlines() if " to " in row]
    assert rows == ["run", "earlier"] * 2


def test_other_references_are_no_comparison(folder: Path, tmp_path: Path, whole: Ended, corpus: Path) -> None:
    changed = lines_of(corpus / "test.en")
    changed[1] = "something else"
    (corpus / "test.en").write_text("\n".join(changed) + "\n")
    other = another_corpus(whole, tmp_path / "other", corpus)
    with pytest.raises(ValueError, match=r"--against .*other: .*references of test of .*run, .* sentence 2 is 'someth"):
        evaluated(folder, against=other)
    assert not (folder / "hypotheses").exists()
    for language in ("de", "en"):
        (corpus / f"test.{language}").write_text("one\n")
    with pytest.raises(ValueError, match="1 sentences, not 3"):
        evaluated(folder, against=other)
    # Read from one place, they are the same.
    assert len(evaluated(folder, against=other, data=corpus, options=GREEDY)[0].differences) == 2
