"""A run that begins with the parameters of another, such as an imported model that is to be fine-tuned."""

import dataclasses
from typing import Any

import numpy as np

from flax_transformer.parameters import fixed_shapes
from train.checkpoint import Checkpoints
from train.config import TrainConfig
from train.run_dir import RunDir
from train.search import SearchConfig
from train.state import TrainState, initial_state

OF_TRAINING = (
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "attention",
    "attention_block_size",
    "dtype",
    "gradient_checkpointing",
)
"""Fields of a model that say how it is trained, not what it is: the new run's own."""


def adopted(config: TrainConfig) -> TrainConfig:
    """The config with model, tokenizer and search of the run that it begins with, if it begins with one.

    Of the search what the config says otherwise than usual is kept.

    A run that has begun keeps what it adopted then, so that it can be continued where the other has gone. Raises
    FileNotFoundError or ValueError that names the folder of the other.
    """
    if config.init_from is None:
        return config
    own = RunDir(config.run_dir)
    source = own if own.config_file.exists() else RunDir(config.init_from)
    if source is not own and not source.path.is_dir():
        raise FileNotFoundError(f"init_from: expected the folder of a run, found no {source.path}")
    found = source.read_config()
    of_training = {name: getattr(config.model, name) for name in OF_TRAINING}
    usual = SearchConfig()
    asked_for = {name: value for name, value in vars(config.search).items() if value != getattr(usual, name)}
    search = dataclasses.replace(found.search, **asked_for)
    try:
        return config.replace(model=found.model.replace(**of_training), tokenizer=found.tokenizer, search=search)
    except ValueError as error:
        raise ValueError(f"init_from: expected a model for this run, got that of {source.path}: {error}") from error


def first_state(config: TrainConfig) -> TrainState:
    """The state before the first step: drawn by the seed, or with the parameters of the run in `init_from`.

    Of that run the moving average is taken if it has one; moments and steps begin anew. Raises ValueError or
    FileNotFoundError that names its folder.
    """
    state = initial_state(config)
    if config.init_from is None:
        return state
    folder = RunDir(config.init_from).checkpoints
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected the checkpoints of the run to begin with, found no such folder")
    checkpoints = Checkpoints(folder, keep=1, read_only=True)
    try:
        step = checkpoints.latest_step()
        if step is None:
            raise FileNotFoundError(f"{folder}: expected a finished checkpoint to begin with, found none")
        restored = checkpoints.restore_params(config.model, step)
    finally:
        checkpoints.close()
    arrays: dict[str, Any] = {name: array.astype(config.model.param_dtype) for name, array in restored.items()}
    fixed = {name: arrays.pop(name) for name in fixed_shapes(config.model)}
    ema: Any = None if state.ema is None else {name: np.copy(array) for name, array in arrays.items()}
    return state._replace(params=arrays, ema=ema, fixed=fixed or None)


def tokenizer_text(config: TrainConfig) -> str | None:
    """The tokenizer of the run that this one begins with, as its file has it; None if it begins with none."""
    if config.init_from is None:
        return None
    return RunDir(config.init_from).tokenizer().to_json()
