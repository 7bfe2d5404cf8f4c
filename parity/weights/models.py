"""Models in files: which format they have, what they are, and how they are written in another one."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parity.weights.checkpoint import Checkpoint, StoreError
from parity.weights.fairseq_files import is_fairseq, read_fairseq, write_fairseq
from parity.weights.foreign import DEFAULTS, Model, read_folder, read_json
from parity.weights.formats import FORMATS, FieldError, Fields, StateDict
from parity.weights.formats.express import Sinusoids, express
from parity.weights.formats.format import Format
from parity.weights.formats.generation import write_generation
from parity.weights.lazy import Converted, Overlay
from parity.weights.problems import MappingError
from parity.weights.sharded import write_shards
from parity.weights.store import read_tensors, write_tensors
from parity.weights.twins import reference_shapes
from transformer_config import TransformerConfig

CONFIG = "transformer_config"
"""Entry of a file's free text: our config as JSON."""
MAX_SHARD_BYTES = 5_000_000_000


def detect(path: Path) -> str:
    """The name of the format. Raises FieldError or StoreError that says what was looked for."""
    if is_run(path):
        return "flax"
    if (path / "config.json").is_file():
        kind = read_json(path / "config.json").get("model_type")
        if kind not in DEFAULTS:
            raise FieldError(f"{path / 'config.json'}: model_type: expected one of {', '.join(DEFAULTS)}, got {kind!r}")
        return str(kind)
    if path.is_file() and path.suffix in (".pt", ".pth") and is_fairseq(path):
        return "fairseq"
    names = read_tensors(path).with_aliases().keys()
    fitting = [name for name, format_ in FORMATS.items() if isinstance(format_, StateDict) and format_.takes(names)]
    if len(fitting) != 1:
        among = ", ".join(fitting) or "none"
        raise StoreError(f"{path}: expected names of one layout, got names that fit {among}: say which with --from")
    return fitting[0]


def is_run(path: Path) -> bool:
    """Whether it is the folder of a training run."""
    return (path / "checkpoints").is_dir() and (path / "config.json").is_file()


def newest_params(run: Path) -> Path:
    """The parameters in the newest checkpoint of a training run: `<run>/checkpoints/<step>/params`.

    Raises FileNotFoundError if there is none.
    """
    # Orbax gives a checkpoint its bare number as a name when it is whole, and not before.
    steps = [int(folder.name) for folder in (run / "checkpoints").iterdir() if folder.name.isdecimal()]
    if not steps:
        raise FileNotFoundError(f"{run / 'checkpoints'}: expected a finished checkpoint, found none")
    return run / "checkpoints" / str(max(steps)) / "params"


def read_model(path: Path, format_name: str | None = None, settings: Mapping[str, Any] | None = None) -> Model:
    """The model in `path`. `settings` are fields of our config that files of this format do not say.

    Raises FileNotFoundError, FieldError, StoreError or MappingError that names the file.
    """
    format_ = FORMATS[format_name or detect(path)]
    if not isinstance(format_, StateDict):
        if settings:
            raise FieldError(f"{path}: expected no fields besides those of its config.json, got {', '.join(settings)}")
        model = read_fairseq(path) if format_.name == "fairseq" else read_folder(path)
    else:
        model = _read_state_dict(path, format_, settings or {})
    _check(path, model)
    return model


def _read_state_dict(path: Path, format_: StateDict, settings: Mapping[str, Any]) -> Model:
    of_run = is_run(path)
    checkpoint = read_tensors(newest_params(path) if of_run else path)
    text = checkpoint.metadata.get(CONFIG)
    if of_run:
        measured = format_.measure(checkpoint)  # its vocabulary is the tokenizer's, which the config does not know
        sizes = {name: measured[name] for name in ("src_vocab_size", "tgt_vocab_size")}
        values = {**read_json(path / "config.json")["model"], **sizes}
    else:
        values = json.loads(text) if text is not None else format_.measure(checkpoint)
    config = format_.read(Fields({**values, **settings}, file=str(path)))
    stored = checkpoint.with_aliases()
    try:
        weights = Converted(format_.mapping(config), stored)
    except MappingError as error:
        raise MappingError([f"{path}: {problem}" for problem in error.problems]) from error
    return Model(format_=format_, config=config, weights=weights, stored=stored)


def _check(path: Path, model: Model) -> None:
    """Names now; shapes when a tensor is read, by `WholeTensors`."""
    shapes = reference_shapes(model.config)
    given = {name for name in model.weights if name in shapes or name != "tgt_embedding.weight"}
    problems = [f"{path}: missing our {name!r} {shapes[name]}" for name in shapes if name not in given]
    problems += [f"{path}: unexpected {name!r}, which this model does not have" for name in given - shapes.keys()]
    if problems:
        raise MappingError(problems)


class WholeTensors(Mapping[str, np.ndarray]):
    """Tensors of which each is looked at when it is read: it has the model's shape, and no NaN.

    Raises StoreError that names tensor and file.
    """

    def __init__(self, path: Path, tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._path, self._tensors, self._shapes = path, tensors, shapes

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._tensors[name]
        expected = self._shapes.get(name, array.shape)
        if array.shape != expected:
            raise StoreError(f"{self._path}: expected our {name!r} of shape {expected}, got {array.shape}")
        # The least of them is NaN if any is, and takes no memory to find.
        if array.dtype.kind in "fV" and array.size and np.isnan(np.asarray(array.min(), np.float64)):
            raise StoreError(f"{self._path}: expected numbers in our {name!r}, got NaN")
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """What became of a model."""

    format_: Format
    config: TransformerConfig
    """As it is read back."""
    tensors: int
    nbytes: int
    changed: Mapping[str, str]
    """Fields that are otherwise in this format, with the reason why that does no harm."""


def write_model(
    model: Model,
    path: Path,
    format_name: str,
    *,
    source: Path,
    sinusoids: Sinusoids,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    workers: int | None = None,
    progress: Callable[[str, int], None] = lambda name, nbytes: None,
) -> Written:
    """Writes the model, which was read from `source`, in another format, to a path where nothing is yet.

    Raises FieldError for a model that the format cannot express, StoreError for damaged tensors.
    """
    format_ = FORMATS[format_name]
    whole = WholeTensors(source, model.weights, reference_shapes(model.config))
    expressed = express(format_, model.config, whole, sinusoids=sinusoids)
    out = Converted(format_.mapping(expressed.config).inverse(), expressed.weights)
    aliases = format_.mapping(expressed.config).source_aliases
    left_out = set(aliases) | _computed_there(format_, expressed.config, out, exact=model.config.has_position_table)
    tensors = Overlay(out, without=left_out, more={})
    sizes = {name: out.nbytes(name) for name in tensors}
    named = {alias: name for alias, name in aliases.items() if name in tensors}
    if isinstance(format_, StateDict):
        metadata = {CONFIG: json.dumps(expressed.config.to_dict())}
        write_tensors(path, Checkpoint(tensors=tensors, aliases=named, metadata=metadata))
    elif format_.name == "fairseq":
        write_fairseq(path, tensors, aliases=named, values=expressed.values)
    else:
        path.mkdir()
        write_shards(
            path, tensors, nbytes=sizes.__getitem__, max_bytes=max_shard_bytes, workers=workers, progress=progress
        )
        _write_json(path / "config.json", expressed.values)
        _write_json(path / "generation_config.json", write_generation(model.search, expressed.config))
    return Written(
        format_=format_,
        config=expressed.config,
        tensors=len(tensors),
        nbytes=sum(sizes.values()),
        changed=expressed.changed,
    )


def _computed_there(
    format_: Format, config: TransformerConfig, out: Mapping[str, np.ndarray], *, exact: bool
) -> set[str]:
    """What the format's class computes instead of reading it. Raises FieldError if it computes something else.

    Where ours computes it too, the two may differ by the rounding of angles to float32, and in the rows of no position.
    """
    if format_.stores_computed:
        return set()
    computed = format_.computed(config)
    for name, array in computed.items():
        bound, first = (0.0, 0) if exact else (len(array) * 2.0**-22, config.position_offset)
        if not np.allclose(out[name][first:].astype(np.float64), array[first:], rtol=0.0, atol=bound):
            raise FieldError(
                f"{format_.name}: expected the positions that this format's class computes, got another table ({name})"
            )
    return set(computed)


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
