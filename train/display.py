"""What a training run shows in the terminal."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from train.config import TrainConfig
from train.corpus import ParallelText
from train.evaluate import HeldOutLoss, Scores
from train.parallel import Devices
from train.step import StepMetrics
from train.throughput import Throughput

if TYPE_CHECKING:
    from train.prepare import PreparedData  # which shows its progress


class TrainingProgress:
    """A bar over all steps of a run: epoch, loss, rate, real tokens a second, padding, MFU, time left."""

    def __init__(self, console: Console, *, step: int, steps: int, epochs: int, per_epoch: int):
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._epochs, self._per_epoch = epochs, per_epoch
        self._task = self._progress.add_task("", total=steps, completed=step, epoch=self._epoch(step), status="")

    def __enter__(self) -> "TrainingProgress":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def _epoch(self, step: int) -> str:
        return f"{min(step // self._per_epoch + 1, self._epochs)}/{self._epochs}"

    def update(self, step: int, metrics: StepMetrics, throughput: Throughput) -> None:
        """Shows the metrics of `step`, the newest that is finished."""
        if not self._progress.console.is_terminal:
            return  # nobody looks at a bar in a file
        status = f"loss {float(metrics.loss):.3f}  rate {float(metrics.learning_rate):.2e}  {throughput.status()}"
        self._progress.update(self._task, completed=step, epoch=self._epoch(step), status=status)


@contextlib.contextmanager
def compiling(console: Console, *, total: int) -> Iterator[Callable[[], None]]:
    """A bar over programs that are compiled ahead of the first step; told after each of them."""
    started = time.perf_counter()
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)
    console.print(f"Compiled {total} programs in {time.perf_counter() - started:.0f} s.")


@contextlib.contextmanager
def encoding(console: Console, *, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over the pairs of a text that become piece ids; gone when it is done. Told how many more there are."""
    columns = (TextColumn("pieces of the training text"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)


def show_run(console: Console, *, config: TrainConfig, data: "PreparedData", devices: Devices) -> None:
    """What will be trained on what, and how many programs there are to compile."""
    corpus, model = data.corpus, config.model
    sizes = f"{len(corpus.train):,} training pairs, {len(corpus.validation):,} validation, {len(corpus.test):,} test"
    console.print(f"Corpus: {sizes}.")
    for note in data.notes:
        console.print(Text(f"Note: {note}.", style="yellow"))
    console.print(
        f"Model: {model.num_encoder_layers}+{model.num_decoder_layers} layers, d_model {model.d_model}, "
        f"vocabulary {model.src_vocab_size:,}."
    )
    console.print(f"Devices: {devices}.")
    shapes = ", ".join(f"{shape.batch_size}x{shape.src_len}/{shape.tgt_len}" for shape in data.shapes)
    plan = data.epoch(0)
    how = "several pairs a row" if data.packed else "a pair a row"
    console.print(
        f"Batches: {len(plan):,} an epoch, {how}, {plan.padding_efficiency:.1%} of their positions real; "
        f"{len(data.shapes)} shapes (rows x source/target pieces): {shapes}."
    )
    steps = min(len(plan) * config.epochs, config.max_steps or math.inf)
    if config.optimizer.decay_steps not in (None, steps):
        decay = f"the learning rate reaches its end at step {config.optimizer.decay_steps:,}, the run at step {steps:,}"
        console.print(Text(f"Note: {decay}.", style="yellow"))
    console.print(
        f"To compile: {len(data.shapes)} training steps, {len(data.buckets)} evaluation steps, "
        "and one decoder for each length of sources."
    )


def show_scores(
    console: Console, *, loss: HeldOutLoss, validation: Scores, test: Scores, baselines: Mapping[str, float]
) -> None:
    """The final scores, and what trivial answers would have scored."""
    console.print(
        f"Validation loss: {loss.per_token:.4f} nats a piece (perplexity {loss.perplexity:.2f}), "
        f"{loss.per_character:.4f} nats a character ({loss.num_tokens:,} pieces, {loss.num_characters:,} characters)."
    )
    table = Table(title="Greedy translations of held-out text")
    table.add_column("")
    for heading in ("exact match", "BLEU cased", "BLEU lowercased", "chrF"):
        table.add_column(heading, justify="right")
    for name, scores in (("validation", validation), ("test", test)):
        table.add_row(
            name,
            f"{scores.exact_match:.1%}",
            f"{scores.bleu:.2f}",
            f"{scores.bleu_lowercased:.2f}",
            f"{scores.chrf:.2f}",
        )
    for name, exact_match in baselines.items():
        table.add_row(f"test, {name}", f"{exact_match:.1%}", "", "", "")
    console.print(table)
    signatures = {
        "cased": test.bleu_signature,
        "lowercased": test.bleu_lowercased_signature,
        "chrF": test.chrf_signature,
    }
    console.print(Text("\n".join(f"{name + ':':<12}{signature}" for name, signature in signatures.items())))


def show_translations(console: Console, text: ParallelText, hypotheses: Sequence[str]) -> None:
    """A few sentences with their translations."""
    table = Table(title="Some of them")
    for heading in ("source", "translation", "reference"):
        table.add_column(heading, overflow="fold")
    for source, hypothesis, reference in zip(text.source, hypotheses, text.target, strict=True):
        table.add_row(Text(source), Text(hypothesis), Text(reference))
    console.print(table)
