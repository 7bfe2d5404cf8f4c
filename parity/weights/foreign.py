"""Folders as `transformers` writes them: config.json, weights in one file or several, generation_config.json."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parity.weights.damaged_json import parse_json
from parity.weights.formats import FORMATS, FieldError, Fields, fsmt, m2m100, marian
from parity.weights.formats.format import Format
from parity.weights.formats.generation import DEFAULTS as GENERATION_DEFAULTS
from parity.weights.formats.generation import read_generation, read_generation_file
from parity.weights.lazy import Converted, Joined, Overlay
from parity.weights.problems import MappingError
from parity.weights.sharded import read_weights, weights_file
from transformer_config import LengthConfig, TransformerConfig

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "marian": marian.DEFAULTS,
    "fsmt": fsmt.DEFAULTS,
    "m2m_100": m2m100.DEFAULTS,
}
"""By model_type, which is also the format's name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model, wherever it was found."""

    format_: Format
    config: TransformerConfig
    weights: Mapping[str, np.ndarray]
    """By the names of the torch reference; lazy."""
    stored: Mapping[str, np.ndarray]
    """As the files have it."""
    ignored: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Fields of the source's config that do not matter, with the reason."""
    search: LengthConfig | None = None
    """How it is usually decoded, if that is said."""

    def nbytes(self, name: str) -> int:
        """Bytes of one of the weights."""
        return self.weights.nbytes(name) if isinstance(self.weights, Converted) else self.weights[name].nbytes


def read_folder(folder: Path) -> Model:
    """The model of a folder. Raises FileNotFoundError, FieldError, StoreError or MappingError that names the file."""
    file = folder / "config.json"
    values = read_json(file)
    kind = str(values.get("model_type"))
    if kind not in DEFAULTS:
        raise FieldError(f"{file}: model_type: expected one of {', '.join(DEFAULTS)}, got {kind!r}")
    format_ = FORMATS[kind]
    fields = Fields(values, file=str(file), defaults=DEFAULTS[kind])
    config = format_.config_of(fields)
    checkpoint = read_weights(weights_file(folder))
    named = checkpoint.with_aliases()
    computed = Overlay(format_.computed(config), without=named, more={})
    try:
        weights = Converted(format_.mapping(config), Joined(named, computed))
    except MappingError as error:
        raise MappingError([f"{folder}: {problem}" for problem in error.problems]) from error
    return Model(
        format_=format_,
        config=config,
        weights=weights,
        stored=named,
        ignored=fields.ignored,
        search=_search(folder, values, config),
    )


def _search(folder: Path, values: Mapping[str, Any], config: TransformerConfig) -> LengthConfig:
    """Of generation_config.json, or of an old folder's config.json."""
    file = folder / "generation_config.json"
    if file.exists():
        return read_generation_file(Fields(read_json(file), file=str(file), defaults=GENERATION_DEFAULTS), config)
    return read_generation(Fields(values, file=str(folder / "config.json"), defaults=GENERATION_DEFAULTS), config)


def read_json(file: Path) -> dict[str, Any]:
    """The fields of a JSON file. Raises FileNotFoundError, or FieldError that names it."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: expected the config of a model, found no such file")
    try:
        values = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FieldError(f"{file}: expected JSON, got {error}") from error
    if not isinstance(values, dict):
        raise FieldError(f"{file}: expected fields, got a {type(values).__name__}")
    return values
