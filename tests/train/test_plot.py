import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from train.plot import plot_runs, read_metrics, run_names, series, smooth

TRAIN = [
    {"kind": "train", "step": s, "loss": 9 - s / 1000, "nll": 8 - s / 1000, "learning_rate": s * 1e-7}
    for s in range(100, 3100, 100)
]
FASTER = [record | {"tokens_per_second": 123_456.0, "padding": 0.1} for record in TRAIN]
HELD_OUT = [
    {"kind": "validation", "step": 1000, "nll_per_token": 7.0, "nll_per_character": 2.0},
    {"kind": "validation_scores", "step": 2000, "bleu": 20.5, "chrf": 40.0},
    {"kind": "final_validation", "step": 3000, "bleu": 30.5, "nll_per_token": 5.0},
]
PANELS = {"Loss", "BLEU on the validation text", "Learning rate", "Throughput"}


def write(run: Path, records: list[dict], *, end: str = "") -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + end)
    return run


def texts(svg: Path) -> list[str]:
    return [
        "".join(node.itertext()).strip() for node in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_suffix_is_the_format_and_nothing_else_is_left(tmp_path, suffix, magic):
    run = write(tmp_path / "run", FASTER + HELD_OUT)
    output = tmp_path / "new" / f"figure{suffix}"
    assert plot_runs([run], output) == output
    assert output.read_bytes().startswith(magic)
    assert list(output.parent.iterdir()) == [output]


def test_panels_names_units_and_commas(tmp_path):
    first, second = write(tmp_path / "first", FASTER + HELD_OUT), write(tmp_path / "second", FASTER)
    shown = texts(plot_runs([first, second], tmp_path / "all.svg"))
    assert set(shown) >= PANELS | {"first", "second", "validation", "step", "nats a piece", "real tokens/s"}
    assert {"1,000", "3,000", "100,000"} <= set(shown)


@pytest.mark.parametrize(
    ("records", "panels"),
    [
        (TRAIN, {"Loss", "Learning rate"}),
        (TRAIN[:1], {"Loss", "Learning rate"}),
        (TRAIN + HELD_OUT, PANELS - {"Throughput"}),
        ([{"kind": "validation_bleu", "step": 5, "bleu": 3.0}], {"BLEU on the validation text"}),
        ([{"kind": "train", "step": 1, "nll": float("nan"), "learning_rate": 0.0}], {"Loss", "Learning rate"}),
    ],
)
def test_empty_panels_are_left_out(tmp_path, records, panels):
    assert PANELS & set(texts(plot_runs([write(tmp_path / "run", records)], tmp_path / "some.svg"))) == panels


def test_more_runs_than_colours(tmp_path):
    runs = [write(tmp_path / f"run-{i:02d}", TRAIN) for i in range(9)]
    assert {run.name for run in runs} <= set(texts(plot_runs(runs, tmp_path / "many.svg")))


def test_pyplot_and_its_state_are_left_alone(tmp_path):
    run = write(tmp_path / "run", TRAIN)
    code = """
import sys
from pathlib import Path
from train.plot import plot_runs
assert "matplotlib" not in sys.modules
plot_runs([Path(sys.argv[1])], Path(sys.argv[2]))
assert "matplotlib.pyplot" not in sys.modules and "jax" not in sys.modules, "imported"
import matplotlib
assert not matplotlib.rcParams["axes.grid"], "changed"
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(run), str(tmp_path / "plot.png")], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    assert read_metrics(write(tmp_path / "run", TRAIN, end='{"kind": "train", "st')) == TRAIN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "my-run: expected the folder of a training run, found no metrics.jsonl in it"),
        ("", "my-run: expected records in metrics.jsonl, found none"),
        ('{"kind"', "my-run: expected records in metrics.jsonl, found none"),
        ('{"kind"\n{"kind": "train", "step": 1}\n', "my-run: expected a JSON object in line 1 of metrics.jsonl, got"),
        ('{"loss": 1}\n', "my-run: expected a record with kind and step in line 1 of metrics.jsonl"),
        ("7\n", "my-run: expected a record with kind and step in line 1 of metrics.jsonl"),
    ],
)
def test_a_run_without_metrics_is_named(tmp_path, text, message):
    run = tmp_path / "my-run"
    if text is not None:
        run.mkdir()
        (run / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        plot_runs([run], tmp_path / "plot.png")
    assert not (tmp_path / "plot.png").exists()


def test_other_mistakes(tmp_path, monkeypatch):
    run = write(tmp_path / "run", TRAIN)
    with pytest.raises(ValueError, match=r"ends in one of .png, .svg, .pdf, got .*plot.gif"):
        plot_runs([run], tmp_path / "plot.gif")
    with pytest.raises(ValueError, match="at least one folder"):
        plot_runs([], tmp_path / "plot.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'twinformer\[plot\]'"):
        plot_runs([run], tmp_path / "plot.png")


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="expected losses, scores or rates in the metrics of run, found none"):
        plot_runs([write(tmp_path / "run", [{"kind": "final_test", "step": 3, "bleu": 1.0}])], tmp_path / "plot.png")


def test_series_are_sorted_and_the_later_record_of_a_step_counts():
    records = [
        {"kind": "train", "step": 2, "loss": 5.0},
        {"kind": "train", "step": 1, "loss": 9.0, "nll": 7.0},
        {"kind": "other", "step": 3, "loss": 1.0},
        {"kind": "train", "step": 2, "nll": 4.0},
    ]
    found = series(records, ("train",), ("nll", "loss"))
    assert found.steps.tolist() == [1, 2]
    assert found.values.tolist() == [7, 4]
    assert series(records, ("train",), ("bleu",)).steps.tolist() == []


def test_the_running_mean_keeps_lines_straight_away_from_the_ends():
    line = np.arange(200.0)
    assert np.allclose(smooth(line)[3:-3], line[3:-3])
    assert np.allclose(smooth(line)[[0, -1]], [1.5, 197.5])
    assert smooth(np.array([3.0])).tolist() == [3.0]


def test_runs_of_one_name_are_told_apart(tmp_path):
    assert run_names([Path("runs/a"), Path("runs/b/")]) == ["a", "b"]
    assert run_names([Path("runs/x/a"), Path("runs/y/a")]) == ["x/a", "y/a"]
    assert run_names([Path("runs/a"), Path("runs/a")]) == ["a", "a"]
