"""What a training run shows in the terminal."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from train.batching import Batch, Bucket
from train.config import TrainConfig
from train.corpus import Corpus, ParallelText
from train.evaluate import HeldOutLoss, Scores
from train.step import StepMetrics
from transformer_config import PAD_ID


class TrainingProgress:
    """A progress bar over one epoch: loss, rate, real tokens a second, time left."""

    def __init__(self, console: Console, *, epoch: int, epochs: int, total: int):
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("", total=total, epoch=f"{epoch + 1}/{epochs}", status="compiling")
        self._tokens = 0
        self._started = time.perf_counter()

    def __enter__(self) -> "TrainingProgress":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def count(self, batch: Batch) -> None:
        """Adds the tokens of `batch`, both sides, padding not counted."""
        self._tokens += batch.num_tokens + int(np.count_nonzero(batch.src != PAD_ID))

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of both sides a second since the epoch began."""
        return self._tokens / (time.perf_counter() - self._started)

    def update(self, done: int, metrics: StepMetrics) -> None:
        """Shows `done` batches, and the metrics of the newest step that is finished."""
        status = (
            f"loss {float(metrics.loss):.3f}  rate {float(metrics.learning_rate):.2e}  "
            f"{self.tokens_per_second:,.0f} tokens/s"
        )
        self._progress.update(self._task, completed=done, status=status)


@contextlib.contextmanager
def encoding(console: Console, *, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over the pairs of a text that become piece ids; gone when it is done. Told how many more there are."""
    columns = (TextColumn("pieces of the training text"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)


def show_corpus(
    console: Console, *, config: TrainConfig, corpus: Corpus, buckets: Sequence[Bucket], notes: Sequence[str]
) -> None:
    """What will be trained on what, and how many shapes there are to compile."""
    sizes = f"{len(corpus.train):,} training pairs, {len(corpus.validation):,} validation, {len(corpus.test):,} test"
    console.print(f"Corpus: {sizes}.")
    for note in notes:
        console.print(Text(f"Note: {note}.", style="yellow"))
    model = config.model
    console.print(
        f"Model: {model.num_encoder_layers}+{model.num_decoder_layers} layers, d_model {model.d_model}, "
        f"vocabulary {model.src_vocab_size:,}."
    )
    shapes = ", ".join(f"{bucket.batch_size}x{bucket.src_len}/{bucket.tgt_len}" for bucket in buckets)
    console.print(f"Batches: {len(buckets)} shapes (rows x source/target pieces), as many compilations: {shapes}.")


def show_scores(
    console: Console, *, loss: HeldOutLoss, validation: Scores, test: Scores, baselines: Mapping[str, float]
) -> None:
    """The final scores, and what trivial answers would have scored."""
    console.print(
        f"Validation loss: {loss.per_token:.4f} nats a piece, {loss.per_character:.4f} nats a character "
        f"({loss.num_tokens:,} pieces, {loss.num_characters:,} characters)."
    )
    table = Table(title="Greedy translations of held-out text")
    table.add_column("")
    for heading in ("exact match", "BLEU cased", "BLEU lowercased"):
        table.add_column(heading, justify="right")
    for name, scores in (("validation", validation), ("test", test)):
        table.add_row(name, f"{scores.exact_match:.1%}", f"{scores.bleu:.2f}", f"{scores.bleu_lowercased:.2f}")
    for name, exact_match in baselines.items():
        table.add_row(f"test, {name}", f"{exact_match:.1%}", "", "")
    console.print(table)
    console.print(Text(f"cased:      {test.bleu_signature}\nlowercased: {test.bleu_lowercased_signature}"))


def show_translations(console: Console, text: ParallelText, hypotheses: Sequence[str]) -> None:
    """A few sentences with their translations."""
    table = Table(title="Some of them")
    for heading in ("source", "translation", "reference"):
        table.add_column(heading, overflow="fold")
    for source, hypothesis, reference in zip(text.source, hypotheses, text.target, strict=True):
        table.add_row(Text(source), Text(hypothesis), Text(reference))
    console.print(table)
