"""fairseq's checkpoints: weights beside the arguments they were trained with."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parity.weights.checkpoint import Checkpoint, StoreError
from parity.weights.foreign import Model
from parity.weights.formats import FORMATS, FieldError, Fields
from parity.weights.formats import fairseq as layout
from parity.weights.lazy import Converted, Joined, Overlay
from parity.weights.mapping import Rule, WeightMapping
from parity.weights.problems import MappingError
from parity.weights.rules import Split
from parity.weights.store_torch import checkpoint_of, load_plain, save_plain, state_dict_of

_OLD_ATTENTION = [
    Rule(f"{{path*}}.in_proj_{kind}", f"{{path*}}.{{q,k,v}}_proj.{kind}", (Split(3),)) for kind in ("weight", "bias")
]
"""Of files from before 2020: the projections of queries, keys and values in one matrix."""
_SUFFIXES = (".pt", ".pth")
_HISTORY = {
    "criterion_name": "LabelSmoothedCrossEntropyCriterion",
    "optimizer_name": "FairseqAdam",
    "lr_scheduler_state": {},
    "num_updates": 0,
}
"""What fairseq wants to know of the training so far. No optimizer's state stands beside it."""
_SETTINGS: dict[str, Any] = {
    "task": {"_name": "translation", "data": None, "source_lang": None, "target_lang": None},
    "dataset": {
        "train_subset": "train",
        "dataset_impl": None,
        "required_seq_len_multiple": 8,
        "max_tokens": None,
        "batch_size": None,
    },
    "generation": {"beam": 5, "replace_unk": None, "print_alignment": None},
    "tokenizer": None,
    "bpe": None,
}
"""Of `cfg` besides the model's: what fairseq looks up there when it loads and translates."""


def is_fairseq(path: Path) -> bool:
    """Whether a file of torch is such a checkpoint."""
    return _is_checkpoint(load_plain(path, plain_classes=(argparse.Namespace,)))


def _is_checkpoint(loaded: Any) -> bool:
    return isinstance(loaded, Mapping) and "model" in loaded and bool({"args", "cfg"} & loaded.keys())


def read_fairseq(path: Path) -> Model:
    """The model of a checkpoint. Raises StoreError, FieldError or MappingError that names the file."""
    loaded = load_plain(path, plain_classes=(argparse.Namespace,))
    if not _is_checkpoint(loaded) or not isinstance(loaded["model"], Mapping):
        raise StoreError(f"{path}: expected a checkpoint of fairseq, with args (or cfg) and model, got other entries")
    checkpoint = checkpoint_of(path, loaded["model"], {})
    try:
        stored = _todays_names(checkpoint.with_aliases())
    except MappingError as error:
        raise MappingError([f"{path}: {problem}" for problem in error.problems]) from error
    values = dict(_arguments(path, loaded))
    for side, stack in (("src", "encoder"), ("tgt", "decoder")):
        name = f"{stack}.embed_tokens.weight"
        if name not in stored:
            raise MappingError([f"{path}: missing {name!r}"])
        if stored[name].ndim != 2:
            raise StoreError(f"{path}: expected {name!r} of two axes, got shape {stored[name].shape}")
        values[f"{side}_vocab_size"] = stored[name].shape[0]
    format_ = FORMATS["fairseq"]
    fields = Fields(values, file=str(path), defaults=layout.DEFAULTS)
    config = format_.config_of(fields)
    try:
        weights = Converted(format_.mapping(config), Joined(stored, format_.computed(config)))
    except MappingError as error:
        raise MappingError([f"{path}: {problem}" for problem in error.problems]) from error
    return Model(format_=format_, config=config, weights=weights, stored=stored, ignored=fields.ignored)


def write_fairseq(
    path: Path, tensors: Mapping[str, np.ndarray], *, aliases: Mapping[str, str], values: Mapping[str, Any]
) -> None:
    """A checkpoint as fairseq's trainer has written it since 2020, `args` in `cfg.model`, of plain containers alone.

    `values` are those of the format's `write`. Raises StoreError for a path without the suffix .pt.
    """
    if path.suffix not in _SUFFIXES:
        raise StoreError(f"{path}: expected one of the suffixes {', '.join(_SUFFIXES)}, got {path.suffix!r}")
    beside = {name: np.array([3.0], np.float32) for name in layout.VERSIONS}
    if not values["encoder_learned_pos"]:
        beside |= {name: np.zeros(1, np.float32) for name in layout.DUMMIES}
    every = Checkpoint(tensors=Overlay(tensors, more=beside), aliases=aliases)
    arguments = {name: value for name, value in values.items() if name not in layout.SIZES}
    positions = {name: values[name] for name in ("max_source_positions", "max_target_positions")}
    settings = {**_SETTINGS, "task": {**_SETTINGS["task"], **positions}}
    checkpoint = {
        "args": None,
        "cfg": {"_name": None, **settings, "model": {"_name": "transformer", **arguments}},
        "model": state_dict_of(path, every),
        "criterion": None,
        "optimizer_history": [_HISTORY],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
    }
    save_plain(path, checkpoint)


def _arguments(path: Path, loaded: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of old checkpoints `args`, of newer ones `cfg.model`."""
    given = loaded.get("args")
    if given is None and isinstance(loaded.get("cfg"), Mapping):
        given = loaded["cfg"].get("model")
    if isinstance(given, argparse.Namespace):
        given = vars(given)
    if not isinstance(given, Mapping):
        raise FieldError(f"{path}: expected the arguments of the model in args or cfg, found none")
    odd = next((name for name in given if not isinstance(name, str)), None)
    if odd is not None:
        raise FieldError(f"{path}: expected named arguments of the model, got one named {odd!r}")
    return given


def _todays_names(tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    fused = {name: array for name, array in tensors.items() if name.rpartition(".")[2].startswith("in_proj_")}
    separate = WeightMapping(_OLD_ATTENTION).apply(fused)
    return Overlay(tensors, without={*layout.UNUSED, *fused}, more=separate)
