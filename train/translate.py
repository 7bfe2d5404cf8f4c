"""Translates a stream of lines with a trained run."""

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

import jax

from train.checkpoint import Checkpoints
from train.config import ParallelConfig, TrainConfig
from train.evaluate import Translator
from train.parallel import Devices
from train.run_dir import RunDir
from train.tokenizer import Tokenizer

LINES_AT_ONCE = 2_000
"""Lines read before any is translated, so that lines of like length can share a batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run as it is needed for inference."""

    config: TrainConfig
    """With the vocabulary sizes of the tokenizer."""
    tokenizer: Tokenizer
    params: dict[str, jax.Array]
    step: int
    devices: Devices


def load_run(path: Path) -> TrainedRun:
    """Reads config, tokenizer and the newest checkpoint of a run.

    Raises FileNotFoundError or ValueError that names what is missing or broken.
    """
    run_dir = RunDir(path)
    config, tokenizer = run_dir.read_config(), run_dir.tokenizer()
    config = config.with_vocabulary(tokenizer.size)
    if not run_dir.checkpoints.is_dir():
        raise FileNotFoundError(f"{run_dir.checkpoints}: expected the checkpoints of a run, found no such folder")
    devices = Devices(ParallelConfig(num_devices=1))
    checkpoints = Checkpoints(run_dir.checkpoints, keep=config.checkpoint.keep, read_only=True)
    try:
        step = checkpoints.latest_step()
        if step is None:
            raise FileNotFoundError(f"{run_dir.checkpoints}: expected a finished checkpoint, found none")
        params = devices.place_params(checkpoints.restore_params(config.model, step))
    finally:
        checkpoints.close()
    return TrainedRun(config=config, tokenizer=tokenizer, params=params, step=step, devices=devices)


def translate_stream(run: Path, source: Iterable[bytes], target: TextIO, *, batch_size: int | None = None) -> int:
    """Translates every line of `source` (UTF-8) into one line of `target`, in the same order; returns an exit status.

    Raises ValueError that names the line for bytes that are no UTF-8.
    """
    trained = load_run(run)
    config = trained.config
    if batch_size is not None:
        evaluation = dataclasses.replace(config.evaluation, batch_size=batch_size)
        config = config.replace(evaluation=evaluation)
    translator = Translator(config, trained.tokenizer, trained.devices)
    lines = _decoded(source)
    first = 1
    while chunk := list(itertools.islice(lines, LINES_AT_ONCE)):
        translations = translator.translate(trained.params, chunk)
        for line in translations.lines:
            # A line stays a line, whatever the model makes of it.
            target.write(line.replace("\n", " ").replace("\r", " ") + "\n")
        target.flush()
        for i in translations.unfinished:
            print(f"warning: line {first + i}: translation cut at the limit on length", file=sys.stderr)
        first += len(chunk)
    return 0


def _decoded(source: Iterable[bytes]) -> Iterator[str]:
    for number, line in enumerate(source, start=1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input, line {number}: expected UTF-8, got {error}") from error
