"""A training carried in the middle of it, between a run of ours and PyTorch: parameters, Adam's moments, steps taken.

The torch side is one file of tensors and plain Python: {"model": state dict of the torch reference, "optimizer": state
dict of `torch.optim.Adam` (or AdamW), "step": steps taken, "metadata": our config}. Needs torch.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

import torch_reference
from flax_transformer.parameters import fixed_shapes, parameter_shapes
from parity.weights.checkpoint import StoreError
from parity.weights.lazy import Converted
from parity.weights.models import CONFIG, WholeTensors
from parity.weights.optimizer_state import AdamState, from_optax, from_torch, to_optax, to_torch
from parity.weights.problems import MappingError
from parity.weights.rules import bits_equal
from parity.weights.sharded import Beside
from parity.weights.store_torch import checkpoint_of, load_plain, save_plain, tensor_of
from parity.weights.twins import reference_shapes, twin_mapping
from train.checkpoint import Checkpoints, RunRecord
from train.config import OptimizerConfig, TrainConfig
from train.run_dir import RunDir
from train.schedule import make_schedule
from train.state import TrainState, make_optimizer
from transformer_config import TransformerConfig

Arrays = Mapping[str, np.ndarray]
SUFFIXES = (".pt", ".pth")


def run_to_torch(run: Path, path: Path, *, overwrite: bool = False) -> str:
    """Writes the run's newest checkpoint as a file for torch, reads it back, and returns in words what was carried.

    Raises FileNotFoundError or ValueError that names the folder for a run without a checkpoint, FileExistsError if
    `path` exists, and ValueError for an optimizer other than Adam and AdamW.
    """
    if path.suffix not in SUFFIXES:
        raise StoreError(f"{path}: expected one of the suffixes {', '.join(SUFFIXES)}, got {path.suffix!r}")
    config, state, _ = _newest(run)
    back = twin_mapping(tied=config.model.tie_embeddings == "all").inverse()
    model = torch_reference.Transformer(config.model, generator=torch.Generator())
    weights = back.apply(state.with_fixed(state.params))
    model.load_state_dict({name: tensor_of(weights[name]) for name in model.state_dict()})
    adam = from_optax(state.opt_state)
    optimizer = _optimizer(model, config.optimizer, d_model=config.model.d_model, step=adam.step)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    carried = adam.carried(back)
    moments = AdamState(
        step=adam.step,
        first={name: carried.first[name] for name in names},
        second={name: carried.second[name] for name in names},
    )
    checkpoint = {
        "model": dict(model.state_dict()),
        "optimizer": to_torch(moments, optimizer.state_dict(), names=names),
        "step": adam.step,
        "metadata": {CONFIG: json.dumps(config.model.to_dict())},
    }
    with Beside(path, overwrite=overwrite) as part:
        save_plain(part, checkpoint)
        _same(path, (state.with_fixed(state.params), adam), _of_torch(part, config.model))
    left = " Its moving average stays behind: torch's Adam has none." if state.ema is not None else ""
    return f"{adam.step:,} steps, {len(names)} parameters and their moments, read back bit for bit.{left}"


def torch_to_run(source: Path, output: Path, *, like: Path, overwrite: bool = False) -> str:
    """Writes a new run that training continues, with the config, tokenizer and training text of the run `like`.

    Its next batch is the one after as many steps as Adam has taken. Raises StoreError, MappingError or ValueError that
    names the file for one that is damaged or of another model, FileExistsError if `output` exists, ValueError if
    `output` would replace what is read.
    """
    for given in (source.resolve(), like.resolve()):
        if output.resolve() in (given, *given.parents):
            raise ValueError(f"expected a new run apart from {given}, got {output}, which would replace it")
    config, _, record = _newest(like)
    if config.model.dtype == "float16" or config.optimizer.ema_decay is not None:
        raise ValueError(
            f"{like}: expected a run without float16 and without a moving average (optimizer.ema_decay), whose state "
            "torch.optim.Adam does not keep"
        )
    every, adam = _of_torch(source, config.model)
    state = _state(config, every, adam)
    lines = record.metrics.splitlines(keepends=True)
    evaluated = record.evaluated_step
    record = dataclasses.replace(
        record,
        config=config.replace(run_dir=output).to_dict(),
        metrics="".join(line for line in lines if json.loads(line)["step"] <= adam.step),
        evaluated_step=evaluated if evaluated is not None and evaluated <= adam.step else None,
    )
    with Beside(output, overwrite=overwrite) as part:
        _write_run(part, RunDir(like), config.replace(run_dir=output), state, record)
        _, found, _ = _newest(part)
        _same(output, (every, adam), (found.with_fixed(found.params), from_optax(found.opt_state)))
    return f"{adam.step:,} steps, {len(state.params)} parameters and their moments, read back bit for bit."


def _state(config: TrainConfig, every: Mapping[str, Any], adam: AdamState) -> TrainState:
    """What the trainer continues from, after as many steps as Adam has taken."""
    params = {name: every[name] for name in parameter_shapes(config.model)}
    fixed = {name: every[name] for name in fixed_shapes(config.model)}
    with jax.enable_x64(True):
        empty = make_optimizer(config.optimizer, d_model=config.model.d_model).init(params)
    step: Any = np.int32(adam.step)
    opt_state = to_optax(adam, jax.tree.map(np.asarray, empty))
    return TrainState(step=step, params=params, opt_state=opt_state, fixed=fixed or None)


def _write_run(folder: Path, like: RunDir, config: TrainConfig, state: TrainState, record: RunRecord) -> None:
    target = RunDir(folder)
    # What the tokenizer makes of the vocabulary's size stands in no config of a run.
    target.write_config(like.read_config().replace(run_dir=config.run_dir))
    like.tokenizer().save(target.tokenizer_file)
    target.pin_corpus(record.corpus_sha256)
    checkpoints = Checkpoints(target.checkpoints, keep=config.checkpoint.keep, metric=config.evaluation.metric)
    try:
        checkpoints.save(state, record)
        checkpoints.wait()
    finally:
        checkpoints.close()


def _newest(run: Path) -> tuple[TrainConfig, TrainState, RunRecord]:
    """Of a run that is trained with Adam: its config, and what its newest checkpoint holds."""
    folder = RunDir(run)
    config = folder.read_config()
    if config.optimizer.name not in ("adam", "adamw"):
        raise ValueError(f"{run}: optimizer.name: expected adam or adamw, got {config.optimizer.name!r}")
    config = config.with_vocabulary(folder.tokenizer().size)
    checkpoints = Checkpoints(folder.checkpoints, keep=1, read_only=True)
    try:
        step = checkpoints.latest_step()
        if step is None:
            raise FileNotFoundError(f"{folder.checkpoints}: expected a finished checkpoint, found none")
        record = checkpoints.record(step)
        if record.inference_only is not None:
            raise ValueError(f"{run}: expected a run to train on, got one for inference only: {record.inference_only}")
        return config, checkpoints.restore(config, step), record
    finally:
        checkpoints.close()


def _optimizer(
    model: torch.nn.Module, config: OptimizerConfig, *, d_model: int, step: int
) -> torch.optim.Adam | torch.optim.AdamW:
    """With the rate of the next step; of AdamW two groups, as weight decay is for matrices alone."""
    rate = float(make_schedule(config, d_model=d_model)(step))
    named = list(model.named_parameters())
    if config.name == "adam":
        return torch.optim.Adam(named, lr=rate, betas=(config.b1, config.b2), eps=config.eps)
    groups = [
        {"params": [(name, each) for name, each in named if each.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [(name, each) for name, each in named if each.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(config.b1, config.b2), eps=config.eps)


def _of_torch(path: Path, config: TransformerConfig) -> tuple[dict[str, np.ndarray], AdamState]:
    """What the file holds, by the names of the Flax twin: all that the model is made of, and Adam's state."""
    loaded = load_plain(path)
    if not isinstance(loaded, Mapping) or not all(isinstance(loaded.get(key), Mapping) for key in _ENTRIES):
        raise StoreError(f"{path}: expected a checkpoint with {' and '.join(_ENTRIES)}, got other entries")
    mapping = twin_mapping(tied=config.tie_embeddings == "all")
    stored = checkpoint_of(path, loaded["model"], {}).with_aliases()
    try:
        params = dict(Converted(mapping, WholeTensors(path, stored, reference_shapes(config))))
        adam = _adam(path, loaded["optimizer"], config).carried(mapping)
    except MappingError as error:
        raise MappingError([f"{path}: {problem}" for problem in error.problems]) from error
    said = loaded.get("step", adam.step)
    if said != adam.step:
        raise StoreError(f"{path}: expected as many steps as Adam has taken, {adam.step}, got step {said!r}")
    shapes = parameter_shapes(config)
    _check(f"{path}: model", params, shapes | fixed_shapes(config))
    for what, moments in (("first moments", adam.first), ("second moments", adam.second)):
        _check(f"{path}: {what}", moments, shapes)
    return params, adam


_ENTRIES = ("model", "optimizer")


def _adam(path: Path, state: Mapping[str, Any], config: TransformerConfig) -> AdamState:
    """Raises StoreError for what is no state of Adam."""
    try:
        named = all("param_names" in group for group in state["param_groups"])
        with torch.device("meta"):
            model = torch_reference.Transformer(config, generator=torch.Generator())
        names = None if named else [name for name, _ in model.named_parameters()]
        return from_torch(state, names=names)
    except ValueError as error:
        raise StoreError(f"{path}: optimizer: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path}: optimizer: expected the state dict of Adam, got {error!r}") from error


def _check(what: str, arrays: Arrays, shapes: Mapping[str, Any]) -> None:
    if arrays.keys() != shapes.keys():
        odd = sorted(arrays.keys() ^ shapes.keys())
        raise StoreError(f"{what}: expected those of the model, got a difference in {', '.join(odd)}")
    for name, expected in shapes.items():
        found = arrays[name]
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            raise StoreError(
                f"{what}: expected our {name!r} {expected.shape} {expected.dtype}, got {found.shape} {found.dtype}"
            )
        if np.isnan(np.asarray(found.min(), np.float64)):
            raise StoreError(f"{what}: expected numbers in our {name!r}, got NaN")


def _same(path: Path, first: tuple[Arrays, AdamState], second: tuple[Arrays, AdamState]) -> None:
    """Raises StoreError if what is read back is not what was written."""
    (params, adam), (again, adam_again) = first, second
    pairs = ((params, again), (adam.first, adam_again.first), (adam.second, adam_again.second))
    odd = [name for one, other in pairs for name in one if not bits_equal(np.asarray(one[name]), other[name])]
    if odd or adam.step != adam_again.step:
        raise StoreError(f"{path}: expected to read back what was written, got a difference in {odd[:3] or 'steps'}")
