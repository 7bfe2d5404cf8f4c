"""What a run writes beside its checkpoints, when it is asked to."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.train.conftest import Ended, metrics, train
from tests.train.test_tensorboard import scalars
from train.journal import SETTLING_STEPS, Journal, evaluations_since_best
from train.run_dir import RunDir


@pytest.fixture(scope="module")
def asked(whole: Ended, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is continued from step 6, with everything on: what it writes then."""
    folder = tmp_path_factory.mktemp("asked")
    report = dataclasses.replace(whole.config.report, log_every_steps=2, tensorboard=True, profile_steps=3)
    config = whole.config.replace(run_dir=folder, report=report)
    train(config.replace(max_steps=6))
    train(config)
    return folder


def test_nothing_unless_asked(whole: Ended) -> None:
    assert not {"tensorboard", "profile"} & {path.name for path in whole.config.run_dir.iterdir()}


def test_event_files_show_what_metrics_have(asked: Path) -> None:
    shown = scalars(asked / "tensorboard")
    records = metrics(asked, timed=True)
    assert [record["step"] for record in records if record["kind"] == "train"] == [2, 4, 6, 8, 10, 12]
    for kind, field in (
        ("train", "loss"),
        ("train", "padding"),
        ("validation", "nll_per_token"),
        ("final_test", "bleu"),
    ):
        expected = {record["step"]: record[field] for record in records if record["kind"] == kind}
        found = shown[f"{kind}/{field}"]
        if kind.startswith("final"):  # the scores of the first start's end are gone from metrics.jsonl alone
            found = {step: found[step] for step in expected}
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_trace_is_written(asked: Path) -> None:
    traces = list((asked / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 2  # one of each start
    assert all(trace.stat().st_size > 0 for trace in traces)


def test_the_steps_that_are_traced(tmp_path: Path, whole: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr("jax.profiler.start_trace", calls.append)
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    report = dataclasses.replace(whole.config.report, profile_steps=3)
    for last, expected in ((20, 5 + SETTLING_STEPS + 3), (5 + SETTLING_STEPS + 1, "close")):
        journal = Journal(whole.config.replace(report=report), RunDir(tmp_path), step=5)
        seen: list[object] = []
        for step in range(5, last):
            before = len(calls)
            journal.profile(step)
            seen += [(step, call) for call in calls[before:]]
        assert seen[0] == (5 + SETTLING_STEPS, tmp_path / "profile")
        assert seen[1:] == ([] if expected == "close" else [(expected, "stop")])
        journal.close()
        journal.close()
        assert calls[-1] == "stop"
        assert calls.count("stop") == 1
        calls.clear()


def test_evaluations_since_the_best() -> None:
    def text(kind: str, field: str, values: list[float]) -> str:
        noise = {"kind": "train", "step": 1, "nll": 0.0}
        return "".join(json.dumps(r) + "\n" for value in values for r in (noise, {"kind": kind, field: value}))

    for values, waited in (([], 0), ([3.0], 0), ([3.0, 2.0], 0), ([3.0, 2.0, 2.0, 2.5], 2), ([1.0, 2.0], 1)):
        assert evaluations_since_best(text("validation", "nll_per_token", values), "loss") == waited
        worse = [-value for value in values]
        assert evaluations_since_best(text("validation_scores", "bleu", worse), "bleu") == waited
    assert evaluations_since_best(text("validation", "nll_per_token", [1.0, 2.0]), "bleu") == 0
