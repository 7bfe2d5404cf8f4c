"""A model of ours as another format can hold it, or the reason why it cannot."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from parity.weights.formats.fields import FieldError, Fields
from parity.weights.formats.format import Format
from parity.weights.lazy import Overlay
from transformer_config import TransformerConfig

TABLES = ("src_positions.table", "tgt_positions.table")
BIASES = ("output_bias", "output_projection.bias")
NORM = "encoder.layers.0.norm1.weight"
"""A small tensor, of the dtype that a model's weights have."""

Sinusoids = Callable[[TransformerConfig, int], np.ndarray]
"""The positions that a config computes, so many of them: (positions, d_model), float64."""

_IN_TRAINING = "changes training alone"
_HOW = "says how it is computed"
_HARMLESS = {
    "dropout": _IN_TRAINING,
    "attention_dropout": _IN_TRAINING,
    "activation_dropout": _IN_TRAINING,
    "freeze_padding": _IN_TRAINING,
    "attention": _HOW,
    "attention_block_size": _HOW,
    "gradient_checkpointing": _HOW,
    "dtype": _HOW,
    "param_dtype": _HOW,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expressed:
    """The model on the other side."""

    values: dict[str, Any]
    """Its config in the format's own words."""
    config: TransformerConfig
    """That config read back."""
    weights: Mapping[str, np.ndarray]
    """By the names of the torch reference; with what the format stores and our model computes."""
    changed: dict[str, str]
    """Fields of ours that are otherwise there, and why that does no harm."""


def express(
    format_: Format, config: TransformerConfig, weights: Mapping[str, np.ndarray], *, sinusoids: Sinusoids
) -> Expressed:
    """What `format_` makes of a model.

    Raises FieldError that names every field that the format lacks, or weights that its class computes otherwise.
    """
    values = format_.write(config)
    theirs = format_.read(Fields(values, file=f"a config of {format_.name}"))
    lost, changed = [], dict[str, str]()
    for field in dataclasses.fields(TransformerConfig):
        name = field.name
        if getattr(config, name) == getattr(theirs, name):
            continue
        why = _HARMLESS.get(name) or _other_bias(name, config, theirs) or _other_positions(name, config, theirs)
        if why is None:
            lost.append(f"{name}={getattr(config, name)!r}, where it has {getattr(theirs, name)!r}")
        else:
            changed[name] = why
    if lost:
        raise FieldError(f"{format_.name}: expected a model that it can express, got {'; '.join(lost)}")
    more: dict[str, np.ndarray] = {}
    if theirs.output_bias == "fixed" and config.output_bias != "fixed":
        biases = [weights[name] for name in BIASES if name in weights]
        more["output_bias"] = biases[0] if biases else np.zeros(config.tgt_vocab_size, weights[NORM].dtype)
    if theirs.has_position_table and not config.has_position_table:
        table = np.zeros((theirs.position_offset + theirs.max_len, theirs.d_model))
        table[theirs.position_offset :] = sinusoids(config, theirs.max_len)
        more |= dict.fromkeys(TABLES, table.astype(np.float32))
    held = Overlay(weights, without=BIASES if "output_bias" in more else (), more=more)
    return Expressed(values=values, config=theirs, weights=held, changed=changed)


def _other_bias(name: str, config: TransformerConfig, theirs: TransformerConfig) -> str | None:
    """A bias of the logits, where the format has one that is not trained."""
    if name != "output_bias" or theirs.output_bias != "fixed":
        return None
    return "a bias that is not trained takes its place" if config.trains_output_bias else "a bias of zeros is added"


def _other_positions(name: str, config: TransformerConfig, theirs: TransformerConfig) -> str | None:
    """Sinusoids, where the format has a table."""
    if not theirs.has_position_table or config.has_position_table:
        return None
    return {
        "positions": "a table of the same sinusoids, rounded to float32",
        "position_offset": "the table begins there",
        "positions_skip_padding": "the same where padding comes last",
    }.get(name)
