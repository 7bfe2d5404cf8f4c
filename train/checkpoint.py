"""Saves and restores a run with Orbax: parameters, optimizer state, and where in the data it stands."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from flax_transformer.parameters import parameter_shapes
from train.config import TrainConfig
from train.state import TrainState, make_optimizer
from transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPosition:
    """Where a run stands: the next batch to take. Order and dropout depend on seed, epoch and step alone."""

    epoch: int = 0
    batch: int = 0


class Checkpoints:
    """The checkpoints of a run, `<folder>/<step>/{params,opt_state,position}`; only committed ones are seen.

    Each `params` is an Orbax checkpoint of its own, a flat dictionary from dotted names to arrays.
    """

    def __init__(self, folder: Path, *, keep: int, read_only: bool = False):
        if read_only:
            # Inference must not tidy up after a training that may be running.
            options = ocp.CheckpointManagerOptions(read_only=True)
        else:
            options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def latest_step(self) -> int | None:
        """The newest committed checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, state: TrainState, position: RunPosition) -> None:
        """Saves at the state's step and waits until it is committed; a failed save raises here."""
        step = int(state.step)
        if step == self.latest_step():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.PyTreeSave(state.params),
                opt_state=ocp.args.PyTreeSave(state.opt_state),
                position=ocp.args.JsonSave(dataclasses.asdict(position)),
            ),
        )
        self._manager.wait_until_finished()

    def restore(self, config: TrainConfig, step: int) -> tuple[TrainState, RunPosition]:
        """The state at `step`, as numpy arrays of the dtypes they were saved in."""
        params = parameter_shapes(config.model)
        optimizer = make_optimizer(config.optimizer, d_model=config.model.d_model)
        opt_state = jax.eval_shape(optimizer.init, params)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=_restore_as_numpy(params),
                opt_state=_restore_as_numpy(opt_state),
                position=ocp.args.JsonRestore(),
            ),
        )
        state = TrainState(jax.numpy.asarray(step, jax.numpy.int32), restored["params"], restored["opt_state"])
        return state, RunPosition(**restored["position"])

    def restore_params(self, config: TransformerConfig, step: int) -> dict[str, np.ndarray]:
        """The parameters at `step`, and nothing else."""
        params = _restore_as_numpy(parameter_shapes(config))
        return self._manager.restore(step, args=ocp.args.Composite(params=params))["params"]

    def close(self) -> None:
        """Ends Orbax's threads."""
        self._manager.close()


def _restore_as_numpy(like: Any) -> ocp.args.PyTreeRestore:
    # Into numpy: with x64 off, Orbax would hand back a float64 as a float32 without a word.
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
    return ocp.args.PyTreeRestore(item=like, restore_args=as_numpy)
