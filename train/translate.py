"""Translation with a finished or running run: lines in, lines out."""

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

import jax
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from train.average import averaged_parameters
from train.checkpoint import Checkpoints
from train.config import ParallelConfig, TrainConfig
from train.parallel import Devices
from train.run_dir import RunDir
from train.search import DEFAULT_SEARCH, SearchOptions
from train.tokenizer import Tokenizer
from train.translator import Translation, Translator

LINES_AT_ONCE = 2_000
"""Lines read before any is translated, so that lines of like length can share a batch."""
LONGEST_SOURCE = 1_024
"""Pieces of a line, at most, where the model itself sets no limit: attention's memory grows with their square."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run as it is needed for inference."""

    config: TrainConfig
    """With the vocabulary sizes of the tokenizer."""
    tokenizer: Tokenizer
    params: dict[str, jax.Array]
    step: int
    devices: Devices

    def with_batch_size(self, batch_size: int | None) -> "TrainedRun":
        """With so many sentences decoded together, if a number is given."""
        if batch_size is None:
            return self
        evaluation = dataclasses.replace(self.config.evaluation, batch_size=batch_size)
        return dataclasses.replace(self, config=self.config.replace(evaluation=evaluation))


def load_run(
    path: Path, *, average_last: int | None = None, ema: bool = False, num_devices: int | None = 1
) -> TrainedRun:
    """Reads config, tokenizer and parameters of a run: of its newest checkpoint, the moving average if it has one.

    With `average_last` the average of so many of the newest checkpoints is taken instead, with `ema` the moving average
    must be there. Raises FileNotFoundError or ValueError that names what is missing or broken.
    """
    run_dir = RunDir(path)
    config, tokenizer = run_dir.read_config(), run_dir.tokenizer()
    tokenizer.expect_model(config.model)
    config = config.with_vocabulary(tokenizer.size)
    if not run_dir.checkpoints.is_dir():
        raise FileNotFoundError(f"{run_dir.checkpoints}: expected the checkpoints of a run, found no such folder")
    devices = Devices(ParallelConfig(num_devices=num_devices))
    checkpoints = Checkpoints(run_dir.checkpoints, keep=config.checkpoint.keep, read_only=True)
    try:
        step = checkpoints.latest_step()
        if step is None:
            raise FileNotFoundError(f"{run_dir.checkpoints}: expected a finished checkpoint, found none")
        if average_last is None and not ema:
            params = checkpoints.restore_params(config.model, step)
        else:
            params = averaged_parameters(path, checkpoints, config.model, last=average_last or 1, ema=ema).params
    finally:
        checkpoints.close()
    return TrainedRun(
        config=config, tokenizer=tokenizer, params=devices.place_params(params), step=step, devices=devices
    )


def translate_stream(
    trained: TrainedRun, source: Iterable[bytes], target: TextIO, *, options: SearchOptions = DEFAULT_SEARCH
) -> int:
    """Translates every line of `source` (UTF-8) into one line of `target`, in the same order; returns an exit status.

    With more than one translation a line, each is written as Moses does: number of the line from 0, translation and
    score between `|||`. A line too long for the model becomes an empty one, said on standard error, and the status is
    1. Raises ValueError that names the line for bytes that are no UTF-8.
    """
    config = trained.config
    longest = config.model.sequence_limit or LONGEST_SOURCE
    search = options.search(max_len=min(config.evaluation.max_decode_len, longest), run=config.search)
    console = Console(stderr=True)
    columns = (TextColumn("translating"), MofNCompleteColumn(), TextColumn("lines"), TimeElapsedColumn())
    skipped = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        translator = Translator(
            config,
            trained.tokenizer,
            trained.devices,
            search=search,
            seed=options.seed,
            progress=lambda lines: progress.advance(task, lines),
        )
        lines = _decoded(source)
        first = 0
        while chunk := list(itertools.islice(lines, LINES_AT_ONCE)):
            translations = translator.translate(trained.params, chunk, first=first, longest=longest)
            for number, of_line in enumerate(translations.of_lines, start=first):
                target.writelines(_written(number, of_line))
            target.flush()
            for i in translations.unfinished:
                print(f"warning: line {first + i + 1}: translation cut at the limit on length", file=sys.stderr)
            for i in translations.too_long:
                print(
                    f"warning: line {first + i + 1}: not translated, expected at most {longest} pieces",
                    file=sys.stderr,
                )
            skipped += len(translations.too_long)
            first += len(chunk)
    compiled = f"{translator.compilations} shapes compiled (at most {translator.max_compilations})"
    print(f"{first:,} lines translated with {compiled}.", file=sys.stderr)
    return 1 if skipped else 0


def _written(number: int, translations: tuple[Translation, ...]) -> Iterator[str]:
    for translation in translations:
        # A line stays a line, whatever the model makes of it.
        text = translation.text.replace("\n", " ").replace("\r", " ")
        yield f"{text}\n" if len(translations) == 1 else f"{number} ||| {text} ||| {translation.score:.6f}\n"


def _decoded(source: Iterable[bytes]) -> Iterator[str]:
    for number, line in enumerate(source, start=1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input, line {number}: expected UTF-8, got {error}") from error
