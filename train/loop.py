"""A training run from config to scores: prepares the data, trains, evaluates, saves, continues."""

import contextlib
import dataclasses
import json
import math
import time
from functools import partial
from typing import Any, NamedTuple

import jax
from rich.console import Console

from train.baselines import copy_exact_match, nearest_pair_exact_match
from train.batching import evaluation_batches
from train.checkpoint import Checkpoints, RunRecord
from train.config import TrainConfig
from train.corpus import ParallelText
from train.display import TrainingProgress, compiling, show_run, show_scores, show_translations
from train.evaluate import HeldOutLoss, Scores, held_out_loss, score
from train.flops import matmul_flops
from train.init_from import adopted, first_state
from train.journal import Journal, evaluations_since_best
from train.parallel import Devices, any_process, is_main_process
from train.prefetch import prefetched
from train.prepare import PreparedData, prepare, restore_tokenizer
from train.run_dir import RunDir
from train.signals import StoppedError, StopRequest
from train.state import TrainState
from train.step import Arrays, StepMetrics
from train.throughput import Throughput
from train.timetable import Timetable
from train.translator import Translator

ASK_EVERY = 10
"""Steps after which several processes ask each other whether one was told to stop."""


class TrainingDivergedError(RuntimeError):
    """The loss is no longer a number; what was saved before is still there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished run has to show."""

    step: int
    validation: HeldOutLoss
    validation_scores: Scores
    test_scores: Scores


class Made(NamedTuple):
    """A batch that is ready for its step."""

    number: int
    """Counted from 0, over all epochs: the position in the plan."""
    tokens: int
    """Real ones, both sides."""
    positions: int
    """Padding included, and the rows that fill up devices and micro-batches."""
    flops: int
    arrays: Arrays


def run(config: TrainConfig, *, console: Console) -> RunResult:
    """Trains, or continues, the run in `config.run_dir` until its last step; then scores it on held-out text.

    Raises ValueError for a config, corpus or folder that does not fit, TrainingDivergedError if the loss is not finite,
    StoppedError when a signal asked it to stop and it has saved.
    """
    console = console if is_main_process() else Console(quiet=True)
    config = adopted(config)
    devices = Devices(config.parallel)
    run_dir = RunDir(config.run_dir)
    with contextlib.ExitStack() as stack:
        if is_main_process():
            stack.enter_context(run_dir.locked())
            run_dir.write_config(config)
            run_dir.write_start({"devices": str(devices)})
        stop = stack.enter_context(StopRequest())
        checkpoints = Checkpoints(run_dir.checkpoints, keep=config.checkpoint.keep, metric=config.evaluation.metric)
        stack.callback(checkpoints.close)
        restore_tokenizer(run_dir, checkpoints)
        data = prepare(config, run_dir, console=console)
        config = config.with_vocabulary(data.tokenizer.size)
        if config.init_from is not None:
            console.print(f"Parameters, model and tokenizer are those of {config.init_from}.")
        show_run(console, config=config, data=data, devices=devices)
        trainer = Trainer(
            config, data=data, run_dir=run_dir, checkpoints=checkpoints, console=console, devices=devices, stop=stop
        )
        stack.callback(trainer.close)
        trainer.train()
        return trainer.finish()


class Trainer:
    """One run. `step` counts its steps, and is the number of the next batch."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        data: PreparedData,
        run_dir: RunDir,
        checkpoints: Checkpoints,
        console: Console,
        devices: Devices,
        stop: StopRequest,
    ):
        self.config, self.data, self.run_dir, self.checkpoints = config, data, run_dir, checkpoints
        self.console, self.devices, self.stop = console, devices, stop
        self.evaluation_devices = devices.for_evaluation()
        self.train_step = devices.compile_train_step(config)
        self.evaluation_step = self.evaluation_devices.compile_evaluation_step(config.model)
        self.translator = Translator(config, data.tokenizer, self.evaluation_devices)
        self.steps_per_epoch = len(data.epoch(0))
        self.last_step = self.steps_per_epoch * config.epochs
        if config.max_steps is not None:
            self.last_step = min(self.last_step, config.max_steps)
        self.timetable = Timetable(
            config=config.evaluation, steps_per_epoch=self.steps_per_epoch, last_step=self.last_step
        )
        self.evaluated_step: int | None = None
        self.state = devices.place_state(self._start())
        self.throughput = Throughput(devices.devices, config.model)
        self.journal = Journal(config, run_dir, step=self.step)
        self._pending: tuple[Made, StepMetrics] | None = None

    def close(self) -> None:
        """Ends what writes files."""
        self.journal.close()

    def _start(self) -> TrainState:
        latest = self.checkpoints.latest_step()
        if latest is None:
            self.step = 0
            self._set_metrics("")
            return first_state(self.config)
        record = self.checkpoints.record(latest)
        self._check(record, latest)
        state = self.checkpoints.restore(self.config, latest)
        self.step, self.evaluated_step = latest, record.evaluated_step
        self._set_metrics(self._rewound(record.metrics))
        epoch, batch = divmod(latest, self.steps_per_epoch)
        self.console.print(f"Continuing from step {latest:,}, epoch {epoch + 1}, batch {batch}.")
        return state

    def _check(self, record: RunRecord, step: int) -> None:
        where = self.checkpoints.folder / str(step)
        if record.inference_only is not None:
            raise ValueError(
                f"{where}: expected a checkpoint to train on, got one for inference only: {record.inference_only}"
            )
        if record.tokenizer != self.data.tokenizer.to_json():
            raise ValueError(f"{where}: expected the tokenizer that it was trained with, got another in tokenizer.json")
        if record.corpus_sha256 != self.data.corpus.train.sha256:
            raise ValueError(f"{where}: expected the training text that it was trained on, got another one")

    def _rewound(self, metrics: str) -> str:
        """Without what was measured only because the run was to end here, if it now goes on."""
        if self.step >= self.last_step:
            return metrics
        regular = {
            "validation": self.timetable.is_regular(self.step),
            "validation_scores": self.timetable.has_regular_bleu(self.step),
        }
        records = ((line, json.loads(line)) for line in metrics.splitlines(keepends=True))
        return "".join(line for line, it in records if it["step"] != self.step or regular.get(it["kind"], True))

    def _set_metrics(self, text: str) -> None:
        if is_main_process():
            self.run_dir.set_metrics(text)

    # Training.

    def train(self) -> None:
        """All steps that are left, unless the validation has stopped getting better before."""
        if not self._evaluation_is_due() and self._is_over():
            return
        self.compile()
        with self.progress() as progress:
            while True:
                if self._evaluation_is_due():
                    self._evaluate()
                if self._is_over():
                    break
                self.take_steps(self.timetable.next(self.step + 1), progress)
        self.console.print(
            f"Compilations: training step {self.train_step.compilations} of {len(self.data.shapes)}, evaluation step "
            f"{self.evaluation_step.compilations} of {len(self.data.buckets)}."
        )

    def take_steps(self, until: int, progress: TrainingProgress) -> None:
        """The steps before step `until`, saved in between when that is due."""
        with contextlib.closing(prefetched(self.made, range(self.step, until))) as batches:
            for made in batches:
                self._take(made, progress)
                if self._asked_to_stop():
                    self._stop(progress)
                if self.step % self.config.checkpoint.every_steps == 0 and self.step < until:
                    self._read_pending(progress)
                    self._save()
        self._read_pending(progress)

    def progress(self) -> TrainingProgress:
        """A bar over all steps."""
        return TrainingProgress(
            self.console,
            step=self.step,
            steps=self.last_step,
            epochs=self.config.epochs,
            per_epoch=self.steps_per_epoch,
        )

    def made(self, number: int) -> Made:
        """Batch `number` of the run, on the devices."""
        epoch, i = divmod(number, self.steps_per_epoch)
        plan = self.data.epoch(epoch)
        shape, model = plan.shape(i), self.config.model
        rows = self.devices.padded_rows(shape.batch_size)
        return Made(
            number=number,
            tokens=int(plan.encoded.lengths[plan.pairs(i)].sum()),
            positions=rows * (shape.src_len + shape.tgt_len),
            flops=matmul_flops(model, src_len=shape.src_len, tgt_len=shape.tgt_len, rows=shape.batch_size),
            arrays=self.devices.place_batch(shape, partial(plan.rows, i), vocab_sizes=model.vocab_sizes),
        )

    def compile(self) -> None:
        """Every program of training and validation, ahead of the first step."""
        arguments = [
            (self.state, self.devices.batch_shapes(shape, packed=self.data.packed)) for shape in self.data.shapes
        ]
        params = self.devices.inference_params(self.state)
        held_out = [(params, self.evaluation_devices.batch_shapes(shape, packed=False)) for shape in self.data.buckets]
        with compiling(self.console, total=len(arguments) + len(held_out)) as done:
            for compiled, every in ((self.train_step, arguments), (self.evaluation_step, held_out)):
                for args in every:
                    compiled.prepare(*args)
                    done()
        self.throughput = Throughput(self.devices.devices, self.config.model)  # the clock starts when all is ready

    def _take(self, made: Made, progress: TrainingProgress) -> None:
        """One step. The metrics of the step before are read only now, so that the device never waits for the host."""
        self.journal.profile(made.number)
        self.state, metrics = self.train_step(self.state, made.arrays)
        self._read_pending(progress)
        self._pending = made, metrics
        self.step += 1

    def _read_pending(self, progress: TrainingProgress) -> None:
        if self._pending is None:
            return
        (made, metrics), self._pending = self._pending, None
        host: StepMetrics = self.devices.metrics(metrics)
        self._check_finite(made, host)
        self.throughput.count(tokens=made.tokens, positions=made.positions, flops=made.flops)
        progress.update(made.number + 1, host, self.throughput)
        if (made.number + 1) % self.config.report.log_every_steps == 0:
            values = {name: float(value) for name, value in host._asdict().items() if value is not None}
            del values["step"], values["applied"]
            self._append("train", made.number + 1, **values, **self.throughput.lap())

    def _check_finite(self, made: Made, host: StepMetrics) -> None:
        # With float16 a gradient may overflow; the scale is halved then, unless the loss itself is none.
        overflow = host.loss_scale is not None and math.isfinite(host.loss) and host.loss_scale > 1.0
        if host.applied or overflow:
            return
        epoch, i = divmod(made.number, self.steps_per_epoch)
        pairs = self.data.epoch(epoch).pairs(i)
        file = self.run_dir.write_batch(
            made.number + 1, pairs=pairs, data=self.data.train, tokenizer=self.data.tokenizer
        )
        good = self.checkpoints.latest_step()
        left = "nothing had been saved yet" if good is None else f"the last good checkpoint is step {good}"
        raise TrainingDivergedError(
            f"{self.run_dir.path}: loss {float(host.loss)}, gradient norm {float(host.grad_norm)} at step "
            f"{made.number + 1}, epoch {epoch + 1}, batch {i}, which was not applied. Its pairs are in {file}; {left}"
        )

    def _asked_to_stop(self) -> bool:
        if jax.process_count() > 1 and self.step % ASK_EVERY:
            return False
        return any_process(self.stop.requested is not None)

    def _stop(self, progress: TrainingProgress) -> None:
        self._read_pending(progress)
        self._save()
        self.checkpoints.wait()
        raise StoppedError(f"{self.run_dir.path}: stopped and saved at step {self.step}; the same command continues")

    # Evaluation.

    def _evaluation_is_due(self) -> bool:
        return self.step not in (0, self.evaluated_step) and self.timetable.next(self.step) == self.step

    def _evaluate(self) -> None:
        """Measures, writes down and saves: a run that is killed here does all of it again."""
        started = time.perf_counter()
        loss = self._validation_loss()
        measured = {"loss": loss.per_token}
        line = (
            f"Step {self.step:,}, epoch {self.step / self.steps_per_epoch:.2f}: {self.throughput.since_evaluation()}, "
            f"validation {loss.per_token:.4f} nats a piece (perplexity {loss.perplexity:.2f}), "
            f"{loss.per_character:.4f} a character"
        )
        self._append(
            "validation",
            self.step,
            nll_per_token=loss.per_token,
            perplexity=loss.perplexity,
            nll_per_character=loss.per_character,
        )
        if self.timetable.has_bleu(self.step):
            scores = self._scores(self.data.corpus.validation)
            measured["bleu"] = scores.bleu
            self._append("validation_scores", self.step, **dataclasses.asdict(scores))
            line += f", BLEU {scores.bleu:.2f} cased, {scores.bleu_lowercased:.2f} lowercased, chrF {scores.chrf:.2f}"
        self.console.print(line)
        self.evaluated_step = self.step
        self._save(measured)
        self.throughput.pause(time.perf_counter() - started)

    def _is_over(self) -> bool:
        """Whether no step is left, or the last `patience` evaluations have brought nothing better."""
        if self.step >= self.last_step:
            return True
        patience, metric = self.config.evaluation.patience, self.config.evaluation.metric
        if patience is None:
            return False
        waited = evaluations_since_best(self.run_dir.metrics(), metric)
        # The main process decides: another may see an older file.
        if not any_process(is_main_process() and waited >= patience):
            return False
        self.console.print(f"Stopping: the last {waited} evaluations have brought no better {metric}.")
        return True

    def finish(self) -> RunResult:
        """Scores the trained model on both held-out splits and shows some translations."""
        self.checkpoints.wait()
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
        self._append("final_validation", self.step, **dataclasses.asdict(validation_scores), **per_unit)
        self._append("final_test", self.step, **dataclasses.asdict(test_scores))
        show_scores(self.console, loss=loss, validation=validation_scores, test=test_scores, baselines=baselines)
        shown = ParallelText(source=corpus.test.source[:6], target=corpus.test.target[:6])
        params = self.devices.inference_params(self.state)
        show_translations(self.console, shown, self.translator.translate(params, shown.source).lines)
        self.console.print(
            f"Compilations of decoding: {self.translator.compilations} (at most {self.translator.max_compilations})."
        )
        self.console.print(f"The run is in {self.run_dir.path}.")
        return RunResult(step=self.step, validation=loss, validation_scores=validation_scores, test_scores=test_scores)

    def _validation_loss(self) -> HeldOutLoss:
        return held_out_loss(
            self.evaluation_step,
            self.devices.inference_params(self.state),
            evaluation_batches(self.data.validation, self.data.buckets),
            target=self.data.corpus.validation.target,
            vocab_sizes=self.config.model.vocab_sizes,
            devices=self.evaluation_devices,
        )

    def _scores(self, text: ParallelText) -> Scores:
        lines = self.translator.translate(self.devices.inference_params(self.state), text.source).lines
        return score(lines, text.target)

    # Writing down.

    def _append(self, kind: str, step: int, **values: Any) -> None:
        self.journal.append({"kind": kind, "step": step, "epoch": (step - 1) // self.steps_per_epoch, **values})

    def _save(self, measured: dict[str, float] | None = None) -> None:
        record = RunRecord(
            config=self.config.to_dict(),
            tokenizer=self.data.tokenizer.to_json(),
            metrics=self.run_dir.metrics(),
            evaluated_step=self.evaluated_step,
            corpus_sha256=self.data.corpus.train.sha256,
        )
        self.checkpoints.save(self.devices.to_save(self.state), record, measured=measured)
