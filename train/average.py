"""Averages of parameters, for inference only: of the newest checkpoints (paper 6.1), or moving along with a run."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from train.checkpoint import Checkpoints, RunRecord
from train.run_dir import RunDir
from transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Averaged:
    """An average, and where it comes from."""

    params: dict[str, np.ndarray]
    step: int
    """Of the newest checkpoint in it."""
    record: RunRecord
    what: str
    """In words."""


def average_run(run: Path, output: Path, *, last: int = 5, ema: bool = False) -> str:
    """Writes a folder that `translate` and `parity check` take like any run, and that training refuses (T11).

    Returns what was averaged, in words. Raises ValueError if there are too few checkpoints or no moving average, and
    FileExistsError if `output` exists.
    """
    if output.exists():
        raise FileExistsError(f"{output}: expected a folder that does not exist yet")
    source = RunDir(run)
    config, tokenizer = source.read_config(), source.tokenizer()
    model = config.with_vocabulary(tokenizer.size).model
    checkpoints = Checkpoints(source.checkpoints, keep=1, read_only=True)
    try:
        averaged = averaged_parameters(run, checkpoints, model, last=last, ema=ema)
    finally:
        checkpoints.close()
    target = RunDir(output)
    target.write_config(config.replace(run_dir=output))
    tokenizer.save(target.tokenizer_file)
    written = Checkpoints(target.checkpoints, keep=1)
    try:
        record = dataclasses.replace(averaged.record, inference_only=averaged.what)
        written.save_params(averaged.step, averaged.params, record)
    finally:
        written.close()
    return f"{output}: {averaged.what}, for inference only"


def averaged_parameters(
    run: Path, checkpoints: Checkpoints, model: TransformerConfig, *, last: int, ema: bool
) -> Averaged:
    """Of the run's `last` newest checkpoints, or of its newest one the moving average.

    Raises ValueError if there are too few checkpoints, no moving average, or an average already.
    """
    if last < 1:
        raise ValueError(f"--last: expected at least 1, got {last}")
    steps = checkpoints.steps()
    if len(steps) < (1 if ema else last):
        raise ValueError(f"{run}: expected at least {1 if ema else last} checkpoints to average, got {steps}")
    chosen = steps[-1:] if ema else steps[-last:]
    record = checkpoints.record(chosen[-1])
    if record.inference_only is not None:
        raise ValueError(f"{run}: expected a run that was trained, got one for inference only: {record.inference_only}")
    if ema:
        params = checkpoints.restore_params(model, chosen[-1], item="ema")
        what = f"the moving average at step {chosen[-1]} of {run}"
    else:
        params = _mean([checkpoints.restore_params(model, step, item="params") for step in chosen])
        what = f"the average of steps {', '.join(map(str, chosen))} of {run}"
    return Averaged(params=params, step=chosen[-1], record=record, what=what)


def _mean(every: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Added up in float64 and rounded once."""
    return {
        name: np.mean([params[name] for params in every], axis=0, dtype=np.float64).astype(first.dtype)
        for name, first in every[0].items()
    }
