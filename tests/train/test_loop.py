import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.train.conftest import Ended, listing, metrics, saved, steps_saved, train, write_corpus
from train import loop
from train.bpe import BPETokenizer
from train.checkpoint import Checkpoints
from train.config import CheckpointConfig, EvaluationConfig, OptimizerConfig
from train.corpus import load_corpus
from train.evaluate import HeldOutLoss, score
from train.journal import Journal
from train.loop import Trainer, TrainingDivergedError
from train.run_dir import RunDir

EPOCH = 6
"""Steps of the tiny run's epoch."""


def kinds(run_dir: Path) -> list[tuple[str, int]]:
    """Of all records but those of training steps."""
    return [(record["kind"], record["step"]) for record in metrics(run_dir) if record["kind"] != "train"]


def kill_before_step(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As a kill does it: nothing more of the run happens, the saves that were begun end or do not."""
    take = Trainer._take

    def killed(self, made, progress):
        if made.number == number:
            raise KeyboardInterrupt
        take(self, made, progress)

    monkeypatch.setattr(Trainer, "_take", killed)


def test_the_folder_of_a_run(whole: Ended) -> None:
    config, result, shown = whole.config, whole.result, " ".join(whole.shown.split())
    assert sorted(path.name for path in config.run_dir.iterdir()) == [
        "checkpoints",
        "config.json",
        "corpus.sha256",
        "lock",
        "metrics.jsonl",
        "starts.jsonl",
        "tokenizer.json",
    ]
    assert result.step == 2 * EPOCH
    assert steps_saved(config.run_dir) == [result.step - 3, result.step]  # the newest, which is the best one too
    step, evaluated, _ = saved(config)
    assert (step, evaluated) == (result.step, result.step)
    assert "training step 1 of 1, evaluation step 2 of 2" in shown
    assert "48 training pairs, 5 validation, 3 test" in shown
    assert "1 of 5 pairs have an empty side; kept and scored" in shown


def test_metrics(whole: Ended) -> None:
    config, result = whole.config, whole.result
    records = metrics(config.run_dir, timed=True)
    steps = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in steps] == list(range(1, result.step + 1))
    assert [record["epoch"] for record in steps] == [0] * EPOCH + [1] * EPOCH
    tokens = [[record["num_tokens"] for record in steps if record["epoch"] == epoch] for epoch in (0, 1)]
    assert sum(tokens[0]) == sum(tokens[1])  # every pair in every epoch,
    assert tokens[0] != tokens[1]  # in another order
    assert steps[0].keys() == {
        *("kind", "step", "epoch", "loss", "nll", "num_tokens", "grad_norm", "learning_rate"),
        *("tokens_per_second", "padding"),
    }
    assert all(math.isfinite(record["loss"]) and 0 < record["padding"] < 1 for record in steps)
    validation = [record for record in records if record["kind"] == "validation"]
    assert [(record["step"], record["epoch"]) for record in validation] == [(EPOCH, 0), (result.step, 1)]
    assert validation[1]["nll_per_token"] < validation[0]["nll_per_token"]
    assert validation[1]["nll_per_token"] == result.validation.per_token
    final = {record["kind"]: record for record in records if record["kind"].startswith("final")}
    assert final["final_test"]["bleu"] == result.test_scores.bleu
    assert final["final_validation"]["bleu_signature"] == result.validation_scores.bleu_signature
    assert final["final_validation"]["nll_per_token"] == result.validation.per_token


def test_starts_are_written_down(tiny_run, tmp_path: Path) -> None:
    for steps in (1, 2):
        train(tiny_run(tmp_path, max_steps=steps))
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert len(starts) == 2
    assert starts[0]["versions"]["jax"] == jax.__version__
    assert starts[0]["devices"] == "1 x cpu in 1 process(es), jit, mesh data 1 x fsdp 1"
    assert starts[0]["command"].startswith("python -m train")
    assert starts[0]["time"] <= starts[1]["time"]


# Going on (T3).


@pytest.mark.parametrize("stops", [(4, EPOCH), (EPOCH + 1, 2 * EPOCH - 1)])
def test_stopped_and_continued_ends_bit_identical(tiny_run, tmp_path: Path, whole: Ended, stops) -> None:
    """Stopped twice in a row, in the middle of an epoch between checkpoints, and at an epoch's end."""
    for stop in (*stops, None):
        config = tiny_run(tmp_path, max_steps=stop)
        result, shown = train(config)
        assert result.step == (stop or whole.result.step)
        assert kinds(tmp_path)[-3:] == [(k, result.step) for k in ("validation", "final_validation", "final_test")]
    epoch, batch = divmod(stops[-1], EPOCH)
    assert f"Continuing from step {stops[-1]}, epoch {epoch + 1}, batch {batch}." in shown
    assert saved(config) == saved(whole.config)
    assert metrics(tmp_path) == metrics(whole.config.run_dir)
    assert result == whole.result


def test_killed_between_checkpoints_and_continued_ends_bit_identical(
    tiny_run, tmp_path: Path, whole: Ended, monkeypatch
) -> None:
    """The steps after the last checkpoint are taken again, and their lines of metrics written once."""
    config = tiny_run(tmp_path)
    append, calls = Journal.append, []

    def killed(self, record):
        append(self, record)
        calls.append(record)
        if len(calls) == 5:
            with self._run_dir.metrics_file.open("a") as file:
                file.write('{"kind": "train", "st')  # cut short
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert saved(config)[0] == 3
    _, shown = train(config)
    assert "Continuing from step 3, epoch 1, batch 3." in shown
    assert saved(config) == saved(whole.config)
    assert metrics(tmp_path) == metrics(whole.config.run_dir)


@pytest.mark.parametrize("moment", ["measured", "saved"])
def test_evaluated_exactly_once_whenever_killed(tiny_run, tmp_path: Path, whole: Ended, monkeypatch, moment) -> None:
    """Between the evaluation and its save, and between that save and the next."""
    config, save = tiny_run(tmp_path), Checkpoints.save

    def killed(self, state, record, *, measured=None):
        if measured is not None:
            raise KeyboardInterrupt
        save(self, state, record)

    with monkeypatch.context() as patch:
        if moment == "measured":
            patch.setattr(Checkpoints, "save", killed)
        else:
            kill_before_step(patch, EPOCH + 1)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert kinds(tmp_path) == [("validation", EPOCH)]
    assert saved(config)[:2] == ((3, None) if moment == "measured" else (EPOCH, EPOCH))
    train(config)
    assert metrics(tmp_path) == metrics(whole.config.run_dir)
    assert saved(config) == saved(whole.config)


def test_a_finished_run_is_only_scored_again(tmp_path: Path, whole: Ended) -> None:
    config = whole.copy(tmp_path)
    before = saved(config), metrics(tmp_path, timed=True), listing(tmp_path / "checkpoints")
    result, shown = train(config)
    assert result == whole.result
    assert (saved(config), metrics(tmp_path, timed=True), listing(tmp_path / "checkpoints")) == before
    assert "Compiled" not in shown


@pytest.mark.parametrize("how", ["deleted", "garbage", "emptied", "of another run"])
def test_metrics_come_from_the_checkpoint(tmp_path: Path, whole: Ended, how: str) -> None:
    config, file = whole.copy(tmp_path), tmp_path / "metrics.jsonl"
    expected = file.read_bytes()
    if how == "deleted":
        file.unlink()
    else:
        spoilt = {"garbage": expected + b'{"kind": "tr\x00\xff', "emptied": b"", "of another run": b'{"kind": "x"}\n'}
        file.write_bytes(spoilt[how])
    train(config)
    assert metrics(tmp_path, timed=True) == [json.loads(line) for line in expected.splitlines()]


# What a run is made of stays what it was.


def test_a_changed_config_or_corpus_is_refused(tmp_path: Path, whole: Ended) -> None:
    config = whole.copy(tmp_path / "run")
    before = {name: digest for name, digest in listing(tmp_path / "run").items() if name != "starts.jsonl"}
    with pytest.raises(ValueError, match=r"got label_smoothing: 0\.1 before, 0\.2 now"):
        train(config.replace(label_smoothing=0.2))
    elsewhere = dataclasses.replace(config.corpus, path=write_corpus(tmp_path / "corpus", seed=1))
    with pytest.raises(ValueError, match=r"expected the training text that this run was started with \(sha256 "):
        train(config.replace(corpus=elsewhere))
    RunDir(tmp_path / "run").write_config(config)
    after = {name: digest for name, digest in listing(tmp_path / "run").items() if name != "starts.jsonl"}
    assert after == before
    (tmp_path / "run" / "corpus.sha256").unlink()
    with pytest.raises(ValueError, match=r"checkpoints/12: expected the training text that it was trained on"):
        train(config.replace(corpus=elsewhere))
    (tmp_path / "run" / "corpus.sha256").unlink()
    train(config)  # and the run can still be continued


def test_another_tokenizer_is_refused(tmp_path: Path, whole: Ended) -> None:
    config = whole.copy(tmp_path)
    text = [side for pair in load_corpus(config.corpus).train for side in pair]
    BPETokenizer.train(text[:20], config.tokenizer).save(tmp_path / "tokenizer.json")
    before = listing(tmp_path / "checkpoints"), metrics(tmp_path, timed=True)
    with pytest.raises(ValueError, match=r"checkpoints/12: expected the tokenizer that it was trained with, got ano"):
        train(config)
    assert (listing(tmp_path / "checkpoints"), metrics(tmp_path, timed=True)) == before


def test_a_missing_tokenizer_comes_from_the_checkpoint(tmp_path: Path, whole: Ended, monkeypatch) -> None:
    config, file = whole.copy(tmp_path), tmp_path / "tokenizer.json"
    expected = file.read_bytes()
    file.unlink()
    monkeypatch.setattr(BPETokenizer, "train", lambda *_: pytest.fail("a tokenizer was learned anew"))
    train(config)
    assert file.read_bytes() == expected


def test_a_broken_checkpoint_is_named_and_nothing_is_lost(tmp_path: Path, whole: Ended) -> None:
    config = whole.copy(tmp_path)
    file = tmp_path / "checkpoints" / "12" / "run" / "metadata"
    file.write_bytes(file.read_bytes()[:100])
    before = {name: digest for name, digest in listing(tmp_path).items() if name != "starts.jsonl"}
    with pytest.raises(ValueError, match=rf"{tmp_path}/checkpoints/12: .* cannot be read"):
        train(config)
    assert {name: digest for name, digest in listing(tmp_path).items() if name != "starts.jsonl"} == before
    (tmp_path / "checkpoints" / "12").rename(tmp_path / "away")
    _, shown = train(config)
    assert "Continuing from step 9, epoch 2, batch 3." in shown
    assert saved(config) == saved(whole.config)


# Divergence (T13).


def test_a_loss_that_is_no_number_stops_and_the_good_checkpoint_stays(
    tiny_run, tmp_path: Path, whole: Ended, monkeypatch
) -> None:
    """A NaN is planted into the parameters before step 4, at which a save is due."""
    config = tiny_run(tmp_path, checkpoint=CheckpointConfig(every_steps=2, keep=5))
    take = Trainer._take

    def planted(self, made, progress):
        if made.number == 3:
            name = "src_embedding.weight"
            params = {**self.state.params, name: self.state.params[name].at[:].set(np.nan)}
            self.state = self.state._replace(params=params)
        take(self, made, progress)

    monkeypatch.setattr(Trainer, "_take", planted)
    file = tmp_path / "batch-of-step-4.json"
    with pytest.raises(TrainingDivergedError) as error:
        train(config)
    message = str(error.value)
    assert "loss nan, gradient norm nan at step 4, epoch 1, batch 3, which was not applied" in message
    assert f"Its pairs are in {file}; the last good checkpoint is step 2" in message
    assert steps_saved(tmp_path) == [2]
    _, _, leaves = saved(config)
    assert all(np.isfinite(np.frombuffer(data, dtype)).all() for _, dtype, _, data in leaves)
    assert max(record["step"] for record in metrics(tmp_path)) == 3
    pairs = json.loads(file.read_text(encoding="utf-8"))
    assert pairs["step"] == 4
    corpus = list(load_corpus(config.corpus).train)
    assert len(pairs["pairs"]) == 8
    assert [(pair["source"], pair["target"]) for pair in pairs["pairs"]] == [
        tuple(corpus[pair["pair"]]) for pair in pairs["pairs"]
    ]
    monkeypatch.undo()
    train(config)
    assert saved(config) == saved(whole.config)


def test_a_learning_rate_that_is_too_high_stops(tiny_run, tmp_path: Path) -> None:
    optimizer = OptimizerConfig(schedule="constant", learning_rate=1e38, warmup_steps=1, clip_norm=None)
    config = tiny_run(tmp_path, optimizer=optimizer, checkpoint=CheckpointConfig(every_steps=100))
    with pytest.raises(TrainingDivergedError, match=r"at step 2, epoch 1, batch 1, .*; nothing had been saved yet"):
        train(config)
    assert steps_saved(tmp_path) == []


# Evaluation.


def test_when_it_is_evaluated(tiny_run, tmp_path: Path, whole: Ended) -> None:
    """Every 5 steps, every 2 epochs, and after the last step; BLEU every epoch, but only where the loss is measured."""
    evaluation = dataclasses.replace(whole.config.evaluation, every_epochs=2, every_steps=5, bleu_every_epochs=1)
    config = tiny_run(tmp_path, evaluation=evaluation, seed=1, epochs=3, max_steps=16)
    train(config)
    at = [(kind, step) for kind, step in kinds(tmp_path) if kind == "validation"]
    assert at == [("validation", step) for step in (5, 10, 12, 15, 16)]
    assert [step for kind, step in kinds(tmp_path) if kind == "validation_scores"] == [12, 16]
    assert metrics(tmp_path)[0]["loss"] != metrics(whole.config.run_dir)[0]["loss"]  # another seed
    # What was measured because the run was to end there goes when it goes on.
    train(config.replace(max_steps=17))
    at = [(kind, step) for kind, step in kinds(tmp_path) if not kind.startswith("final")]
    assert at[-3:] == [("validation", 15), ("validation", 17), ("validation_scores", 17)]


PATIENCE = {
    "loss": ([4.0, 3.0, 3.5, 3.0, 2.0, 1.0], 4),
    "bleu": ([4.0, 5.0, 4.5, 5.0, 6.0, 7.0], 4),
    "better in time": ([4.0, 3.0, 3.5, 2.9, 2.95, 2.8], 6),
}


@pytest.mark.parametrize("name", PATIENCE)
def test_early_stopping(tiny_run, tmp_path: Path, monkeypatch, name: str) -> None:
    """With patience 2: two evaluations in a row that are no better than the best, of which equal ones are two."""
    figures, epochs = PATIENCE[name]
    metric = "bleu" if name == "bleu" else "loss"

    def loss(self):
        figure = figures[self.step // EPOCH - 1] if metric == "loss" else 4.0 - 0.1 * self.step
        return HeldOutLoss(nll=10.0 * figure, num_tokens=10, num_characters=20)

    def scores(self, text):
        return dataclasses.replace(score(["a"], ["b"]), bleu=figures[self.step // EPOCH - 1])

    monkeypatch.setattr(Trainer, "_validation_loss", loss)
    monkeypatch.setattr(Trainer, "_scores", scores)
    evaluation = EvaluationConfig(
        batch_size=4, max_decode_len=8, bleu_every_epochs=1 if metric == "bleu" else None, metric=metric, patience=2
    )
    config = tiny_run(
        tmp_path, evaluation=evaluation, epochs=len(figures), checkpoint=CheckpointConfig(every_steps=EPOCH, keep=1)
    )
    result, shown = train(config)
    assert result.step == epochs * EPOCH
    if epochs == len(figures):
        assert "Stopping" not in shown
        return
    assert f"Stopping: the last 2 evaluations have brought no better {metric}." in shown
    assert steps_saved(tmp_path)[0] in (2 * EPOCH, 4 * EPOCH)  # equally good
    before = metrics(tmp_path, timed=True), saved(config)
    again, shown = train(config)  # and it stays stopped
    assert again == result
    assert "Stopping" in shown
    assert (metrics(tmp_path, timed=True), saved(config)) == before


# Half width.


def test_float16_continued_ends_bit_identical(tiny_run, tmp_path: Path, whole: Ended) -> None:
    """T15: the loss scale goes on too."""
    model = whole.config.model.replace(dtype="float16")
    runs = [tiny_run(tmp_path / name, model=model, epochs=1) for name in ("stopped", "whole")]
    train(runs[0].replace(max_steps=4))
    for run in runs:
        train(run)
    assert saved(runs[0]) == saved(runs[1])
    assert metrics(runs[0].run_dir) == metrics(runs[1].run_dir)
    scales = {name: data for name, _, _, data in saved(runs[0])[2] if "loss_scale" in name}
    assert len(scales) == 3
    records = [record for record in metrics(runs[0].run_dir) if record["kind"] == "train"]
    assert records[0]["loss_scale"] == 2.0**15
    assert records[-1]["loss"] < records[0]["loss"]


def test_a_float16_gradient_that_overflows_is_no_divergence(
    tiny_run, tmp_path: Path, whole: Ended, monkeypatch
) -> None:
    model = whole.config.model.replace(dtype="float16")
    first_state = loop.first_state

    def enormous(config):
        state = first_state(config)
        return state._replace(loss_scale=state.loss_scale._replace(scale=np.float32(2.0**40)))

    monkeypatch.setattr(loop, "first_state", enormous)
    train(tiny_run(tmp_path, model=model, max_steps=3))
    scales = [record["loss_scale"] for record in metrics(tmp_path) if record["kind"] == "train"]
    assert scales == [2.0**40, 2.0**39, 2.0**38]


@pytest.mark.parametrize(("decay_steps", "said"), [(3, False), (9, True)])
def test_a_cosine_that_ends_elsewhere_is_said(tiny_run, tmp_path, decay_steps, said):
    cosine = OptimizerConfig(schedule="cosine", learning_rate=1e-3, warmup_steps=2, decay_steps=decay_steps)
    _, shown = train(tiny_run(tmp_path / "run", max_steps=3, optimizer=cosine))
    assert (f"reaches its end at step {decay_steps}, the run at step 3." in shown) == said
