"""What a run writes down as it goes: metrics.jsonl, event files of TensorBoard, a trace of the profiler."""

import json
from typing import Any, Literal

import jax

from train.config import TrainConfig
from train.parallel import is_main_process
from train.run_dir import RunDir

SETTLING_STEPS = 2
"""Steps that are not profiled: the first ones wait for this and that."""


class Journal:
    """The writing side of a run folder; of several processes only the main one writes."""

    def __init__(self, config: TrainConfig, run_dir: RunDir, *, step: int):
        """`step` is where the run stands."""
        self._run_dir = run_dir
        self._tensorboard = None
        if config.report.tensorboard and is_main_process():
            from train.tensorboard import TensorBoard  # needs an extra

            self._tensorboard = TensorBoard(run_dir.path / "tensorboard", step=step)
        first = step + SETTLING_STEPS
        self._profiled = range(first, first + config.report.profile_steps)
        self._tracing = False

    def append(self, record: dict[str, Any]) -> None:
        """Adds a record: {"kind": ..., "step": ..., "epoch": ..., and its figures}."""
        if not is_main_process():
            return
        with self._run_dir.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if self._tensorboard is not None:
            self._tensorboard.write(record)

    def profile(self, number: int) -> None:
        """Traces the steps that are to be profiled. Called before step `number`."""
        if self._profiled and number == self._profiled.start:
            jax.profiler.start_trace(self._run_dir.path / "profile")
            self._tracing = True
        elif self._tracing and number == self._profiled.stop:
            self._end_trace()

    def _end_trace(self) -> None:
        jax.profiler.stop_trace()
        self._tracing = False

    def close(self) -> None:
        """Writes what is still to be written."""
        if self._tracing:
            self._end_trace()
        if self._tensorboard is not None:
            self._tensorboard.close()


def evaluations_since_best(metrics: str, metric: Literal["loss", "bleu"]) -> int:
    """How many evaluations in a row, in the text of a metrics.jsonl, have brought nothing better."""
    kind, field, sign = ("validation_scores", "bleu", 1) if metric == "bleu" else ("validation", "nll_per_token", -1)
    records = map(json.loads, metrics.splitlines())
    values = [sign * record[field] for record in records if record["kind"] == kind]
    return len(values) - 1 - values.index(max(values)) if values else 0
