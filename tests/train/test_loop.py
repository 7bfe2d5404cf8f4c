import dataclasses
import io
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from tests.train.conftest import write_corpus
from train.checkpoint import Checkpoints
from train.config import CheckpointConfig, EvaluationConfig
from train.loop import RunResult, TrainingDivergedError, run
from train.run_dir import RunDir


def train(config) -> tuple[RunResult, str]:
    """The result, and what the terminal showed."""
    console = Console(record=True, width=160, file=io.StringIO())
    return run(config, console=console), console.export_text()


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def saved(config, step=None) -> tuple:
    """Every array of a checkpoint, bit for bit, and where it stands in the data."""
    config = config.with_vocabulary(RunDir(config.run_dir).tokenizer().size)
    checkpoints = Checkpoints(config.run_dir / "checkpoints", keep=config.checkpoint.keep)
    try:
        step = checkpoints.latest_step() if step is None else step
        state, position = checkpoints.restore(config, step)
    finally:
        checkpoints.close()
    leaves = jax.tree.leaves_with_path(state)
    return step, position, [(str(path), x.dtype, np.asarray(x).tobytes()) for path, x in leaves]


@pytest.fixture(scope="module")
def whole(tiny_run, tmp_path_factory):
    """A run of two epochs that was never stopped: config, result, what the terminal showed."""
    config = tiny_run(tmp_path_factory.mktemp("whole"))
    return config, *train(config)


def test_the_folder_of_a_run(whole):
    config, result, shown = whole
    assert sorted(path.name for path in config.run_dir.iterdir()) == [
        "checkpoints",
        "config.json",
        "corpus.sha256",
        "metrics.jsonl",
        "tokenizer.json",
    ]
    steps = sorted(int(path.name) for path in (config.run_dir / "checkpoints").iterdir() if path.name.isdigit())
    assert len(steps) == config.checkpoint.keep
    assert steps[-1] == result.step
    step, position, _ = saved(config)
    assert (step, position.epoch, position.batch) == (result.step, 2, 0)
    assert "training step 1 (at most 1), evaluation step 2 (at most 2)" in " ".join(shown.split())
    assert "48 training pairs, 5 validation, 3 test" in shown
    assert "1 of 5 pairs have an empty side; kept and scored" in shown


def test_metrics(whole):
    config, result, _ = whole
    records = metrics(config.run_dir)
    steps = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in steps] == list(range(1, result.step + 1))
    assert [record["epoch"] for record in steps] == [0] * (result.step // 2) + [1] * (result.step // 2)
    tokens = [[record["num_tokens"] for record in steps if record["epoch"] == epoch] for epoch in (0, 1)]
    assert sum(tokens[0]) == sum(tokens[1])  # every pair in every epoch,
    assert tokens[0] != tokens[1]  # in another order
    assert steps[0].keys() == {
        *("kind", "step", "epoch", "loss", "nll", "num_tokens", "grad_norm", "learning_rate"),
    }
    assert all(math.isfinite(record["loss"]) for record in steps)
    validation = [record for record in records if record["kind"] == "validation"]
    assert [(record["step"], record["epoch"]) for record in validation] == [(result.step // 2, 0), (result.step, 1)]
    assert validation[1]["nll_per_token"] < validation[0]["nll_per_token"]
    assert validation[1]["nll_per_token"] == result.validation.per_token
    final = {record["kind"]: record for record in records if record["kind"].startswith("final")}
    assert final["final_test"]["bleu"] == result.test_scores.bleu
    assert final["final_validation"]["bleu_signature"] == result.validation_scores.bleu_signature


def test_stopped_and_continued_ends_bit_identical(tiny_run, tmp_path, whole):
    """T3: stopped twice in a row, in the middle of an epoch between checkpoints, and at an epoch's end."""
    reference, expected, _ = whole
    assert expected.step // 2 > 4
    for stop in [4, expected.step // 2, None]:
        config = tiny_run(tmp_path, max_steps=stop)
        result, shown = train(config)
        assert result.step == (stop or expected.step)
        assert metrics(tmp_path)[-1]["kind"] == "final_test"
    assert f"Continuing from step {expected.step // 2}, epoch 2, batch 0." in shown
    assert saved(config) == saved(reference)
    assert metrics(tmp_path) == metrics(reference.run_dir)
    assert result == expected


def test_killed_between_checkpoints_and_continued_ends_bit_identical(tiny_run, tmp_path, whole, monkeypatch):
    """T3: the steps after the last checkpoint are taken again, and their lines of metrics written once."""
    reference, *_ = whole
    config = tiny_run(tmp_path)
    append, calls = RunDir.append_metrics, []

    def killed(self, record):
        append(self, record)
        calls.append(record)
        if len(calls) == 5:
            with self.metrics_file.open("a") as file:
                file.write('{"kind": "train", "st')  # cut short
            raise KeyboardInterrupt

    monkeypatch.setattr(RunDir, "append_metrics", killed)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert saved(config)[0] == 3
    monkeypatch.undo()
    _, shown = train(config)
    assert "Continuing from step 3, epoch 1, batch 3." in shown
    assert saved(config) == saved(reference)
    assert metrics(tmp_path) == metrics(reference.run_dir)


def test_a_finished_run_is_only_scored_again(whole):
    config, expected, _ = whole
    before = saved(config), metrics(config.run_dir)
    result, _ = train(config)
    assert result == expected
    assert (saved(config), metrics(config.run_dir)) == before


def test_a_changed_config_or_corpus_is_refused(tiny_run, tmp_path, whole):
    config, *_ = whole
    before = metrics(config.run_dir), saved(config)
    with pytest.raises(ValueError, match=r"got label_smoothing: 0\.1 before, 0\.2 now"):
        train(config.replace(label_smoothing=0.2))
    elsewhere = dataclasses.replace(config.corpus, path=write_corpus(tmp_path, seed=1))
    with pytest.raises(ValueError, match=r"expected the training text that this run was started with \(sha256 "):
        train(config.replace(corpus=elsewhere))
    assert (metrics(config.run_dir), saved(config)) == before
    train(config)  # and the run can still be continued


def test_a_loss_that_is_no_number_stops_and_the_good_checkpoint_stays(tiny_run, tmp_path, monkeypatch):
    """T13: a NaN is planted into the parameters after step 4."""
    config = tiny_run(tmp_path, checkpoint=CheckpointConfig(every_steps=2, keep=1))
    from train import loop

    compile_train_step = loop.compile_train_step

    def faulty(config):
        step = compile_train_step(config)

        def planted(state, batch, key):
            state, values = step(state, batch, key)
            if int(values.step) == 4:
                name = "src_embedding.weight"
                state = state._replace(params={**state.params, name: state.params[name].at[0, 0].set(np.nan)})
            return state, values

        return planted

    monkeypatch.setattr(loop, "compile_train_step", faulty)
    monkeypatch.setattr(loop.Trainer, "_save_is_due", lambda self, *, epoch_ends: self.step == 3 or self.step > 4)
    with pytest.raises(TrainingDivergedError, match=r"loss nan, .* in epoch 1; the last good checkpoint is step 3"):
        train(config)
    step, _, leaves = saved(config)
    assert step == 3
    assert all(np.isfinite(np.frombuffer(data, dtype)).all() for _, dtype, data in leaves)
    assert max(record["step"] for record in metrics(tmp_path)) == 4


def test_bleu_while_training_and_another_seed(tiny_run, tmp_path, whole):
    evaluation = EvaluationConfig(batch_size=4, max_decode_len=8, every_epochs=2, bleu_every_epochs=1)
    train(tiny_run(tmp_path, evaluation=evaluation, seed=1))
    records = metrics(tmp_path)
    kinds = [(record["kind"], record["epoch"]) for record in records if record["kind"] != "train"]
    assert kinds == [("validation_bleu", 0), ("validation", 1), ("final_validation", 2), ("final_test", 2)]
    assert records[0]["loss"] != metrics(whole[0].run_dir)[0]["loss"]
