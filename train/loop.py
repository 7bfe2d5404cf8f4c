"""A training run from config to scores: prepares the data, trains, evaluates, saves, continues."""

import dataclasses
import itertools
import math
import time
from typing import Any

import jax
from jaxtyping import Array
from rich.console import Console

from train.baselines import copy_exact_match, nearest_pair_exact_match
from train.batching import (
    Batch,
    Bucket,
    drop_long,
    epoch_batches,
    evaluation_batches,
    extend_buckets,
    plan_buckets,
)
from train.checkpoint import Checkpoints, RunPosition
from train.config import TrainConfig
from train.corpus import Corpus, ParallelText, load_corpus
from train.display import TrainingProgress, encoding, show_corpus, show_scores, show_translations
from train.evaluate import HeldOutLoss, Scores, Translator, held_out_loss, score
from train.parallel import Compiled, compile_evaluation_step, compile_train_step, to_device, to_host
from train.prefetch import prefetched
from train.run_dir import RunDir
from train.sentences import EncodedText, encode_text, encode_to_disk
from train.state import TrainState, initial_state
from train.step import Arrays, StepMetrics
from train.tokenizer import Tokenizer


class TrainingDivergedError(RuntimeError):
    """The loss is no longer a number; what was saved before is still there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished run has to show."""

    step: int
    validation: HeldOutLoss
    validation_scores: Scores
    test_scores: Scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedData:
    """The corpus as ids, and the shapes its batches have."""

    corpus: Corpus
    tokenizer: Tokenizer
    train: EncodedText
    validation: EncodedText
    buckets: tuple[Bucket, ...]
    notes: tuple[str, ...]


def run(config: TrainConfig, *, console: Console) -> RunResult:
    """Trains, or continues, the run in `config.run_dir` until its last epoch; then scores it on held-out text.

    Raises ValueError for a config, corpus or folder that does not fit, TrainingDivergedError if the loss is not finite.
    """
    run_dir = RunDir(config.run_dir)
    run_dir.write_config(config)
    data = prepare(config, run_dir, console=console)
    config = config.with_vocabulary(data.tokenizer.size)
    show_corpus(console, config=config, corpus=data.corpus, buckets=data.buckets, notes=data.notes)
    checkpoints = Checkpoints(run_dir.checkpoints, keep=config.checkpoint.keep)
    try:
        trainer = Trainer(config, data=data, run_dir=run_dir, checkpoints=checkpoints, console=console)
        trainer.train()
        return trainer.finish()
    finally:
        checkpoints.close()


def prepare(config: TrainConfig, run_dir: RunDir, *, console: Console) -> PreparedData:
    """Loads the corpus, learns the tokenizer or takes the run's own, and plans the shapes of batches."""
    corpus = load_corpus(config.corpus)
    run_dir.pin_corpus(corpus.train.sha256)
    if run_dir.tokenizer_file.exists():
        tokenizer = run_dir.tokenizer()
    else:
        tokenizer = Tokenizer.train(itertools.chain.from_iterable(corpus.train), config.tokenizer)
        tokenizer.save(run_dir.tokenizer_file)
    with encoding(console, total=len(corpus.train)) as progress:
        folder = config.corpus.cache / f"{corpus.train.sha256[:16]}-{tokenizer.sha256[:16]}"
        encoded = encode_to_disk(corpus.train, tokenizer, folder, progress=progress)
    train, dropped = drop_long(encoded, max_len=config.batch.max_len)
    return PreparedData(
        corpus=corpus,
        tokenizer=tokenizer,
        train=train,
        validation=encode_text(corpus.validation, tokenizer),
        buckets=plan_buckets(train, config=config.batch),
        notes=(*corpus.notes, str(dropped)) if dropped else corpus.notes,
    )


class Trainer:
    """One run in one process."""

    def __init__(
        self, config: TrainConfig, *, data: PreparedData, run_dir: RunDir, checkpoints: Checkpoints, console: Console
    ):
        self.config = config
        self.data = data
        self.run_dir = run_dir
        self.checkpoints = checkpoints
        self.console = console
        self.train_step: Compiled[..., Any] = compile_train_step(config)
        self.evaluation_step: Compiled[..., Any] = compile_evaluation_step(config.model)
        self.translator = Translator(config, data.tokenizer)
        init_key, self.dropout_key = jax.random.split(jax.random.key(config.seed))
        self.state, self.position = self._start(init_key)
        self.step = int(self.state.step)

    def _start(self, init_key: Array) -> tuple[TrainState, RunPosition]:
        latest = self.checkpoints.latest_step()
        if latest is None:
            self.run_dir.rewind_metrics(-1)
            return initial_state(self.config, init_key), RunPosition()
        state, position = self.checkpoints.restore(self.config, latest)
        self.run_dir.rewind_metrics(latest)
        self.console.print(f"Continuing from step {latest:,}, epoch {position.epoch + 1}, batch {position.batch}.")
        return jax.device_put(state), position

    def train(self) -> None:
        """Every epoch that is left."""
        steps_before = self.step
        while self.position.epoch < self.config.epochs and not self._steps_are_up():
            self._epoch()
        if self.step > steps_before:
            self.console.print(
                f"Compilations: training step {self.train_step.compilations} (at most {len(self.data.buckets)}), "
                f"evaluation step {self.evaluation_step.compilations} "
                f"(at most {len(extend_buckets(self.data.validation, self.data.buckets))})."
            )

    def _epoch(self) -> None:
        config, epoch = self.config, self.position.epoch
        plan = epoch_batches(self.data.train, self.data.buckets, seed=config.seed, epoch=epoch)

        def made(i: int) -> tuple[int, Batch, Arrays]:
            batch = plan.batch(i)
            return i, batch, to_device(batch, vocab_size=config.model.tgt_vocab_size)

        started = time.perf_counter()
        with TrainingProgress(self.console, epoch=epoch, epochs=config.epochs, total=len(plan)) as progress:
            pending: StepMetrics | None = None
            for i, batch, arrays in prefetched(made, range(self.position.batch, len(plan))):
                self.state, metrics = self.train_step(self.state, arrays, self.dropout_key)
                # The step before is read only now, so that the device never waits for the host.
                if pending is not None:
                    progress.update(i, self._record(pending, epoch))
                pending = metrics
                self.step += 1
                self.position = dataclasses.replace(self.position, batch=i + 1)
                progress.count(batch)
                if self._save_is_due(epoch_ends=i + 1 == len(plan)):
                    progress.update(i + 1, self._record(pending, epoch))
                    pending = None
                    self.checkpoints.save(self.state, self.position)
                if self._steps_are_up():
                    break
            if pending is not None:
                progress.update(self.position.batch, self._record(pending, epoch))
        if self.position.batch == len(plan):
            seconds = time.perf_counter() - started
            self._finish_epoch(epoch, seconds=seconds, tokens_per_second=progress.tokens_per_second)

    def _finish_epoch(self, epoch: int, *, seconds: float, tokens_per_second: float) -> None:
        evaluation = self.config.evaluation
        done = epoch + 1
        line = f"Epoch {done}: {seconds:.0f} s, {tokens_per_second:,.0f} real tokens/s"
        if done % evaluation.every_epochs == 0 or done == self.config.epochs:
            loss = self._validation_loss()
            self._append("validation", epoch, nll_per_token=loss.per_token, nll_per_character=loss.per_character)
            line += f", validation {loss.per_token:.4f} nats a piece, {loss.per_character:.4f} a character"
        if evaluation.bleu_every_epochs and done % evaluation.bleu_every_epochs == 0 and done < self.config.epochs:
            scores = self._scores(self.data.corpus.validation)
            self._append("validation_bleu", epoch, **dataclasses.asdict(scores))
            line += f", BLEU {scores.bleu:.2f} cased, {scores.bleu_lowercased:.2f} lowercased"
        self.console.print(line)
        self.position = dataclasses.replace(self.position, epoch=done, batch=0)
        self.checkpoints.save(self.state, self.position)

    def finish(self) -> RunResult:
        """Scores the trained model on both held-out splits and shows some translations."""
        loss = self._validation_loss()
        corpus = self.data.corpus
        validation_scores, test_scores = self._scores(corpus.validation), self._scores(corpus.test)
        baselines = {}
        if self.config.corpus.kind == "demo":
            baselines = {
                "copying the source": copy_exact_match(corpus.test),
                "the nearest training pair": nearest_pair_exact_match(ParallelText.of(list(corpus.train)), corpus.test),
            }
        per_unit = {"nll_per_token": loss.per_token, "nll_per_character": loss.per_character}
        self._append("final_validation", self.position.epoch, **dataclasses.asdict(validation_scores), **per_unit)
        self._append("final_test", self.position.epoch, **dataclasses.asdict(test_scores))
        show_scores(self.console, loss=loss, validation=validation_scores, test=test_scores, baselines=baselines)
        shown = ParallelText(source=corpus.test.source[:6], target=corpus.test.target[:6])
        show_translations(self.console, shown, self.translator.translate(self.state.params, shown.source).lines)
        self.console.print(
            f"Compilations of decoding: {self.translator.compilations} (at most {self.translator.max_compilations})."
        )
        self.console.print(f"The run is in {self.run_dir.path}.")
        return RunResult(step=self.step, validation=loss, validation_scores=validation_scores, test_scores=test_scores)

    def _record(self, metrics: StepMetrics, epoch: int) -> StepMetrics:
        host: StepMetrics = to_host(metrics)
        if not math.isfinite(float(host.loss)) or not math.isfinite(float(host.grad_norm)):
            raise TrainingDivergedError(
                f"{self.run_dir.path}: loss {float(host.loss)}, gradient norm {float(host.grad_norm)} in epoch "
                f"{epoch + 1}; the last good checkpoint is step {self.checkpoints.latest_step()}"
            )
        step = int(host.step)
        if step % self.config.log_every_steps == 0:
            values = {name: float(value) for name, value in host._asdict().items() if name != "step"}
            self.run_dir.append_metrics({"kind": "train", "step": step, "epoch": epoch, **values})
        return host

    def _append(self, kind: str, epoch: int, **values: Any) -> None:
        self.run_dir.append_metrics({"kind": kind, "step": self.step, "epoch": epoch, **values})

    def _validation_loss(self) -> HeldOutLoss:
        plan = evaluation_batches(self.data.validation, self.data.buckets)
        return held_out_loss(
            self.evaluation_step,
            self.state.params,
            plan,
            target=self.data.corpus.validation.target,
            vocab_size=self.config.model.tgt_vocab_size,
        )

    def _scores(self, text: ParallelText) -> Scores:
        return score(self.translator.translate(self.state.params, text.source).lines, text.target)

    def _save_is_due(self, *, epoch_ends: bool) -> bool:
        # The end of an epoch is saved when it has been evaluated, so that no evaluation is lost or done twice.
        due = self.step % self.config.checkpoint.every_steps == 0 or self._steps_are_up()
        return due and not epoch_ends

    def _steps_are_up(self) -> bool:
        return self.config.max_steps is not None and self.step >= self.config.max_steps
