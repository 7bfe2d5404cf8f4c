"""Saves and restores a run with Orbax: all that it takes to go on as if it had never stopped.

Saves run beside the training and are committed by a rename, so a process that is killed leaves whole checkpoints only.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from flax_transformer.parameters import fixed_shapes, parameter_shapes
from train.config import TrainConfig
from train.state import LossScale, TrainState, make_optimizer
from transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a checkpoint holds besides arrays: where the run stands, and what it was made with.

    The step of the state is the position in the plan of batches, and with the seed of `config` it gives the dropout:
    there is no other random state.
    """

    config: dict[str, Any]
    """`TrainConfig.to_dict`."""
    tokenizer: str
    """The whole tokenizer, as its file has it."""
    metrics: str = ""
    """metrics.jsonl up to here."""
    evaluated_step: int | None = None
    """The last step that was evaluated, so that none is evaluated twice or not at all."""
    corpus_sha256: str = ""
    inference_only: str | None = None
    """Why these parameters must not be trained on, if they must not (T11)."""


class Checkpoints:
    """The checkpoints of a run, `<folder>/<step>/{params,opt_state,ema,run}`; only committed ones are seen.

    Each `params` is an Orbax checkpoint of its own, a flat dictionary from dotted names to arrays. The newest `keep`
    are kept, and the best by `metric`. To open them raises ValueError that names the folder if one of them cannot be
    read at all.
    """

    def __init__(self, folder: Path, *, keep: int, metric: Literal["loss", "bleu"] = "loss", read_only: bool = False):
        self.folder, self._metric = folder, metric
        if read_only:
            # Inference must not tidy up after a training that may be running.
            options = ocp.CheckpointManagerOptions(read_only=True)
        else:
            sign = 1.0 if metric == "bleu" else -1.0

            def goodness(measured: dict[str, float]) -> float:
                return sign * measured[metric]

            best = BestN(get_metric_fn=goodness, n=1, keep_checkpoints_without_metrics=False)
            options = ocp.CheckpointManagerOptions(
                create=True,
                preservation_policy=AnyPreservationPolicy([LatestN(keep), best]),
                best_fn=goodness,  # without it what was measured is not written, and forgotten by the next process
            )
        try:
            self._manager = ocp.CheckpointManager(folder.resolve(), options=options)
        except ValueError as error:  # of a file of figures that is no JSON
            raise ValueError(f"{folder}: expected checkpoints, got one that cannot be read ({error})") from error

    def latest_step(self) -> int | None:
        """The newest committed checkpoint, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Every committed checkpoint, the newest last."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, record: RunRecord, *, measured: dict[str, float] | None = None) -> None:
        """Begins to save, at the state's step; the state may be given up as soon as this returns.

        `measured` is what the best one is chosen by. Raises what went wrong with this save or the one before, such as
        a full disk; the checkpoints that were there still are.
        """
        step = int(state.step)
        if step == self.latest_step():
            return
        extra = dataclasses.asdict(record)
        if state.loss_scale is not None:
            extra["loss_scale"] = [np.asarray(value).item() for value in state.loss_scale]
        items: dict[str, Any] = {
            "params": ocp.args.PyTreeSave(state.with_fixed(state.params)),
            "opt_state": ocp.args.PyTreeSave(state.opt_state),
            "run": ocp.args.JsonSave(extra),
        }
        if state.ema is not None:
            items["ema"] = ocp.args.PyTreeSave(state.with_fixed(state.ema))
        comparable = measured if measured is not None and self._metric in measured else None
        self._manager.save(step, args=ocp.args.Composite(**items), metrics=comparable)

    def save_params(self, step: int, params: dict[str, np.ndarray], record: RunRecord) -> None:
        """Saves parameters alone, for inference, and waits until they are committed."""
        extra = ocp.args.JsonSave(dataclasses.asdict(record))
        self._manager.save(step, args=ocp.args.Composite(params=ocp.args.PyTreeSave(params), run=extra))
        self.wait()

    def wait(self) -> None:
        """Until what was begun to be saved is committed. Raises what went wrong with it."""
        self._manager.wait_until_finished()

    def record(self, step: int) -> RunRecord:
        """What the checkpoint at `step` holds besides arrays. Raises ValueError that names it if it cannot be read."""
        values = self._restore(step, run=ocp.args.JsonRestore())["run"]
        fields = {field.name for field in dataclasses.fields(RunRecord)}
        missing = {"config", "tokenizer"} - values.keys()
        if missing:
            raise ValueError(
                f"{self.folder / str(step)}: expected a checkpoint of `train`, got none of {missing} in it"
            )
        return RunRecord(**{name: value for name, value in values.items() if name in fields})

    def restore(self, config: TrainConfig, step: int) -> TrainState:
        """The state at `step`, as numpy arrays of the dtypes they were saved in: for any number of devices.

        Raises ValueError that names the checkpoint if it cannot be read, or holds another model or optimizer.
        """
        params, fixed = parameter_shapes(config.model), fixed_shapes(config.model)
        optimizer = make_optimizer(config.optimizer, d_model=config.model.d_model)
        wanted = {"params": params | fixed, "opt_state": jax.eval_shape(optimizer.init, params)}
        if config.optimizer.ema_decay is not None:
            wanted["ema"] = params | fixed
        items = {name: _as_numpy(tree) for name, tree in wanted.items()}
        restored = self._restore(step, run=ocp.args.JsonRestore(), **items)
        for name, tree in wanted.items():
            self._check_shapes(step, name, tree, restored[name])
        values: dict[str, Any] = {"step": np.int32(step), "opt_state": restored["opt_state"]}
        values |= {item: _only(params, restored[item]) for item in ("params", "ema") if item in wanted}
        values["fixed"] = _only(fixed, restored["params"]) or None
        scale = restored["run"].get("loss_scale")
        if (scale is not None) != (config.model.dtype == "float16"):
            raise ValueError(
                f"{self.folder / str(step)}: expected a loss scale with float16 and none without, got {scale} with "
                f"{config.model.dtype}"
            )
        if scale is not None:
            now: list[Any] = [np.float32(scale[0]), np.int32(scale[1]), np.int32(scale[2])]
            values["loss_scale"] = LossScale(*now)
        return TrainState(**values)

    def restore_params(
        self, config: TransformerConfig, step: int, *, item: Literal["params", "ema"] | None = None
    ) -> dict[str, np.ndarray]:
        """All that the model is made of at `step`; by default the moving average if there is one."""
        shapes = parameter_shapes(config) | fixed_shapes(config)
        if item is None:
            item = "ema" if (self.folder / str(step) / "ema").is_dir() else "params"
        restored = self._restore(step, **{item: _as_numpy(shapes)})[item]
        self._check_shapes(step, item, shapes, restored)
        return restored

    def close(self) -> None:
        """Ends Orbax's threads, when they have finished."""
        self._manager.close()

    def _restore(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # tensorstore and Orbax have many ways of saying that a file is not as it was
            said = str(error).splitlines()[0] if str(error) else ""
            raise ValueError(
                f"{self.folder / str(step)}: expected a checkpoint with {', '.join(items)}, got one that cannot be "
                f"read ({type(error).__name__}: {said}). Nothing was changed; move that folder away to go on from the "
                "checkpoint before it"
            ) from error

    def _check_shapes(self, step: int, item: str, wanted: Any, got: Any) -> None:
        for (path, leaf), value in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(got), strict=True):
            if np.shape(value) != leaf.shape:
                name = jax.tree_util.keystr(path)
                raise ValueError(
                    f"{self.folder / str(step)}: expected {item}{name} of shape {leaf.shape}, got {np.shape(value)}"
                )


def _only(names: Iterable[str], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: arrays[name] for name in names}


def _as_numpy(like: Any) -> ocp.args.PyTreeRestore:
    # Into numpy: with x64 off, Orbax would hand back a float64 as a float32 without a word.
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
    return ocp.args.PyTreeRestore(item=like, restore_args=as_numpy)
