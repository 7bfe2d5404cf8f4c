"""Averages of parameters, for inference only: of the newest checkpoints (paper 6.1), or moving along with a run."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from train.checkpoint import Checkpoints
from train.run_dir import RunDir


def average_run(run: Path, output: Path, *, last: int = 5, ema: bool = False) -> str:
    """Writes a folder that `translate` and `parity check` take like any run, and that training refuses (T11).

    Returns what was averaged, in words. Raises ValueError if there are too few checkpoints or no moving average, and
    FileExistsError if `output` exists.
    """
    if output.exists():
        raise FileExistsError(f"{output}: expected a folder that does not exist yet")
    if last < 1:
        raise ValueError(f"--last: expected at least 1, got {last}")
    source = RunDir(run)
    config, tokenizer = source.read_config(), source.tokenizer()
    model = config.with_vocabulary(tokenizer.size).model
    checkpoints = Checkpoints(source.checkpoints, keep=1, read_only=True)
    try:
        steps = checkpoints.steps()
        if len(steps) < (1 if ema else last):
            raise ValueError(f"{run}: expected at least {1 if ema else last} checkpoints to average, got {steps}")
        chosen = steps[-1:] if ema else steps[-last:]
        record = checkpoints.record(chosen[-1])
        if record.inference_only is not None:
            raise ValueError(
                f"{run}: expected a run that was trained, got one for inference only: {record.inference_only}"
            )
        if ema:
            params = checkpoints.restore_params(model, chosen[-1], item="ema")
            what = f"the moving average at step {chosen[-1]} of {run}"
        else:
            params = _mean([checkpoints.restore_params(model, step, item="params") for step in chosen])
            what = f"the average of steps {', '.join(map(str, chosen))} of {run}"
    finally:
        checkpoints.close()
    target = RunDir(output)
    target.write_config(config.replace(run_dir=output))
    tokenizer.save(target.tokenizer_file)
    averaged = Checkpoints(target.checkpoints, keep=1)
    try:
        averaged.save_params(chosen[-1], params, dataclasses.replace(record, inference_only=what))
    finally:
        averaged.close()
    return f"{output}: {what}, for inference only"


def _mean(every: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Added up in float64 and rounded once."""
    return {
        name: np.mean([params[name] for params in every], axis=0, dtype=np.float64).astype(first.dtype)
        for name, first in every[0].items()
    }
