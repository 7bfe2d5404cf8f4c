"""Models in files: which format they have, what they are, and how they are written in another one."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parity.weights.checkpoint import Checkpoint, StoreError
from parity.weights.ctranslate2_export import write_ctranslate2
from parity.weights.damaged_json import parse_json
from parity.weights.fairseq_files import is_fairseq, read_fairseq, write_fairseq
from parity.weights.foreign import DEFAULTS, Model, read_folder, read_json
from parity.weights.formats import FORMATS, FieldError, Fields, StateDict
from parity.weights.formats.ctranslate2 import CTranslate2
from parity.weights.formats.express import Expressed, Sinusoids, express
from parity.weights.formats.format import Format
from parity.weights.formats.generation import otherwise_in_generation, write_generation
from parity.weights.lazy import Converted, Overlay
from parity.weights.piece_names import piece_names
from parity.weights.problems import MappingError, TensorSpec, spec_of
from parity.weights.sharded import write_shards
from parity.weights.store import read_tensors, write_tensors
from parity.weights.twins import reference_shapes
from transformer_config import BeamConfig, LengthConfig, TransformerConfig

CONFIG = "transformer_config"
"""Entry of a file's free text: our config as JSON."""
MAX_SHARD_BYTES = 5_000_000_000


def detect(path: Path) -> str:
    """The name of the format. Raises FieldError or StoreError that says what was looked for."""
    if is_run(path):
        return "flax"
    if (path / "config.json").is_file() and (path / "model.bin").is_file():
        return "ctranslate2"
    if (path / "config.json").is_file():
        kind = str(read_json(path / "config.json").get("model_type"))
        if kind not in DEFAULTS:
            raise FieldError(f"{path / 'config.json'}: model_type: expected one of {', '.join(DEFAULTS)}, got {kind!r}")
        return kind
    if path.is_file() and path.suffix in (".pt", ".pth") and is_fairseq(path):
        return "fairseq"
    names = read_tensors(path, mapped=True).with_aliases().keys()
    fitting = [name for name, format_ in FORMATS.items() if isinstance(format_, StateDict) and format_.takes(names)]
    if len(fitting) != 1:
        among = ", ".join(fitting) or "none"
        raise StoreError(f"{path}: expected names of one layout, got names that fit {among}: say which with --from")
    return fitting[0]


def is_run(path: Path) -> bool:
    """Whether it is the folder of a training run."""
    return (path / "checkpoints").is_dir() and (path / "config.json").is_file()


def newest_params(run: Path) -> Path:
    """What `train translate` decodes with: in the newest checkpoint of a training run, `<run>/checkpoints/<step>`, the
    moving average `ema` if there is one, or `params`.

    Raises FileNotFoundError if there is none.
    """
    # Orbax gives a checkpoint its bare number as a name when it is whole, and not before.
    steps = [int(folder.name) for folder in (run / "checkpoints").iterdir() if folder.name.isdecimal()]
    if not steps:
        raise FileNotFoundError(f"{run / 'checkpoints'}: expected a finished checkpoint, found none")
    newest = run / "checkpoints" / str(max(steps))
    return newest / ("ema" if (newest / "ema").is_dir() else "params")


def read_model(path: Path, format_name: str | None = None, settings: Mapping[str, Any] | None = None) -> Model:
    """The model in `path`. `settings` are fields of our config that files of this format do not say.

    Raises FileNotFoundError, FieldError, StoreError or MappingError that names the file.
    """
    format_ = FORMATS[format_name or detect(path)]
    if not format_.can_be_read:
        raise FieldError(f"{path}: expected a format that can be read, got {format_.name}, which is only written")
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
    checkpoint = read_tensors(newest_params(path) if of_run else path, mapped=True)
    values = _fields_of_a_state_dict(path, format_, checkpoint)
    config = format_.config_of(Fields({**values, **settings}, file=str(path)))
    mapping = format_.mapping(config)
    # What the mapping and the file both say to be one tensor need not be read twice and compared.
    known = [alias for alias, name in checkpoint.aliases.items() if mapping.source_aliases.get(alias) == name]
    stored = checkpoint.with_aliases()
    search = _search_of_run(path / "config.json") if of_run else None
    try:
        weights = Converted(mapping, Overlay(stored, without=known, more={}))
    except MappingError as error:
        raise MappingError([f"{path}: {problem}" for problem in error.problems]) from error
    return Model(format_=format_, config=config, weights=weights, stored=stored, search=search)


def _search_of_run(file: Path) -> LengthConfig | None:
    """How a run decodes, where its config says it. Runs of older versions do not."""
    values = read_json(file)
    if "search" not in values:
        return None
    try:
        search: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values["search"].items()
        }
        search["max_len"] = values["evaluation"]["max_decode_len"]
        kind = BeamConfig if search["beam_size"] > 1 else LengthConfig
        known = {field.name for field in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in search.items() if name in known})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FieldError(f"{file}: search: expected how translations are looked for, got {error!r}") from error


def _fields_of_a_state_dict(path: Path, format_: StateDict, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Of the run that it belongs to, of the config in the file, or as names and shapes have them."""
    if is_run(path):
        given = read_json(path / "config.json").get("model")
        if not isinstance(given, Mapping):
            raise FieldError(f"{path / 'config.json'}: model: expected the fields of a model, got {given!r}")
        measured = _measured(path, format_, checkpoint)
        # Its vocabulary is the tokenizer's, which the config does not know.
        return {**given, **{name: measured[name] for name in ("src_vocab_size", "tgt_vocab_size")}}
    text = checkpoint.metadata.get(CONFIG)
    if text is None:
        return _measured(path, format_, checkpoint)
    try:
        values = parse_json(text)
    except ValueError as error:
        raise FieldError(f"{path}: {CONFIG}: expected JSON, got {error}") from error
    if not isinstance(values, dict):
        raise FieldError(f"{path}: {CONFIG}: expected fields, got a {type(values).__name__}")
    return values


def _measured(path: Path, format_: StateDict, checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        return format_.measure(checkpoint)
    except StoreError:
        raise  # of a tensor in the file, which it names
    except MappingError as error:
        raise MappingError([f"{path}: {problem}" for problem in error.problems]) from error
    except ValueError as error:
        raise FieldError(f"{path}: {error}") from error


def _expect_sizes(path: Path, model: Model) -> None:
    """Before anything is made of the sizes that a damaged config claims."""
    layers, count = model.config.num_encoder_layers + model.config.num_decoder_layers, len(model.stored)
    if layers > count:
        raise FieldError(f"{path}: expected at most as many layers as there are tensors, {count}, got {layers}")
    width = model.config.d_model
    if not any(width in spec_of(model.stored, name).shape for name in model.stored):
        raise FieldError(f"{path}: expected the width of a tensor, got {width}")


def _check(path: Path, model: Model) -> None:
    """Names now; shapes when a tensor is read, by `WholeTensors`."""
    _expect_sizes(path, model)
    shapes = reference_shapes(model.config)
    given = {name for name in model.weights if name in shapes or name != "tgt_embedding.weight"}
    problems = [f"{path}: missing our {name!r} {shapes[name]}" for name in shapes if name not in given]
    problems += [f"{path}: unexpected {name!r}, which this model does not have" for name in given - shapes.keys()]
    if problems:
        raise MappingError(problems)


class WholeTensors(Mapping[str, np.ndarray]):
    """Tensors of which each is looked at when it is read: floating-point numbers of the model's shape, and no NaN.

    Raises StoreError that names tensor and file.
    """

    def __init__(self, path: Path, tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._path, self._tensors, self._shapes = path, tensors, shapes

    def spec(self, name: str) -> TensorSpec:
        """The shape that it has to have, and the dtype that it has; read only where nothing else says so."""
        tensors = self._tensors
        if name in self._shapes and isinstance(tensors, Converted):
            return TensorSpec(self._shapes[name], tensors.dtype(name))
        return spec_of(tensors, name)

    def __getitem__(self, name: str) -> np.ndarray:
        try:
            array = self._tensors[name]
        except StoreError:
            raise
        except ValueError as error:  # of an operation that refuses, or a tied tensor that has two values
            raise StoreError(f"{self._path}: {error}") from error
        expected = self._shapes.get(name, array.shape)
        if array.shape != expected:
            raise StoreError(f"{self._path}: expected our {name!r} of shape {expected}, got {array.shape}")
        if array.dtype.kind not in "fV":  # V: bfloat16 and the like
            raise StoreError(f"{self._path}: expected floating-point numbers in our {name!r}, got {array.dtype}")
        # The least of them is NaN if any is, and takes no memory to find.
        if array.size and np.isnan(np.asarray(array.min(), np.float64)):
            raise StoreError(f"{self._path}: expected numbers in our {name!r}, got NaN")
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """What became of a model."""

    format_: Format
    config: TransformerConfig
    """As it is read back, where it can be read."""
    tensors: int
    nbytes: int
    changed: Mapping[str, str]
    """Fields that are otherwise in this format, with the reason why that does no harm."""
    notes: tuple[str, ...] = ()
    """What else there is to say."""


def write_model(
    model: Model,
    path: Path,
    format_name: str,
    *,
    source: Path,
    sinusoids: Sinusoids,
    max_shard_bytes: int | None = None,
    workers: int | None = None,
    progress: Callable[[str, int], None] = lambda name, nbytes: None,
) -> Written:
    """Writes the model, which was read from `source`, in another format, to a path where nothing is yet.

    With `max_shard_bytes` a path without a suffix becomes a folder of safetensors, more than so many bytes in several
    files with an index; the formats of transformers always are such folders. CTranslate2 takes the names of pieces
    from a tokenizer beside the source.

    Raises FieldError for a model that the format cannot express, StoreError for damaged tensors, for shards of a path
    with a suffix, or where CTranslate2 is to be written and not installed.
    """
    format_ = FORMATS[format_name]
    expressed, tensors, sizes = _in_its_words(format_, model, source=source, sinusoids=sinusoids)
    shards = functools.partial(
        write_shards, path, tensors, nbytes=sizes.__getitem__, workers=workers, progress=progress
    )
    aliases = format_.mapping(expressed.config).source_aliases
    named = {alias: name for alias, name in aliases.items() if name in tensors}
    notes: tuple[str, ...] = ()
    if max_shard_bytes is not None and format_.name in ("ctranslate2", "fairseq"):
        raise StoreError(f"{path}: expected no shards (--max-shard-bytes) of {format_.name}, which has one file")
    if isinstance(format_, CTranslate2):
        notes = _write_translator(path, expressed, tensors, source=source, sinusoids=sinusoids)
    elif format_.name == "fairseq":
        write_fairseq(path, tensors, aliases=named, values=expressed.values)
    elif isinstance(format_, StateDict):
        checkpoint = Checkpoint(
            tensors=tensors, aliases=named, metadata={CONFIG: json.dumps(expressed.config.to_dict())}
        )
        if max_shard_bytes is None:
            write_tensors(path, checkpoint)
        else:
            _expect_folder(path)
            shards(max_bytes=max_shard_bytes, aliases=checkpoint.aliases, metadata=checkpoint.metadata)
    else:
        shards(max_bytes=MAX_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes)
        _write_json(path / "config.json", expressed.values)
        _write_json(path / "generation_config.json", write_generation(model.search, expressed.config))
        notes = otherwise_in_generation(model.search)
    facts = {"tensors": len(tensors), "nbytes": sum(sizes.values())}
    return Written(format_=format_, config=expressed.config, changed=expressed.changed, notes=notes, **facts)


def _expect_folder(path: Path) -> None:
    if path.suffix:
        raise StoreError(f"{path}: expected a name without a suffix, for a folder of shards, got {path.suffix!r}")


def _in_its_words(
    format_: Format, model: Model, *, source: Path, sinusoids: Sinusoids
) -> tuple[Expressed, Mapping[str, np.ndarray], dict[str, int]]:
    """The model in a format, the tensors of its files by their names there, and their bytes."""
    whole = WholeTensors(source, model.weights, reference_shapes(model.config))
    expressed = express(format_, model.config, whole, sinusoids=sinusoids)
    mapping = format_.mapping(expressed.config)
    out = Converted(mapping.inverse(), expressed.weights)
    computed = _computed_there(format_, expressed.config, out, exact=model.config.has_position_table)
    tensors = Overlay(out, without={*mapping.source_aliases, *computed}, more={})
    return expressed, tensors, {name: out.nbytes(name) for name in tensors}


def _write_translator(
    path: Path, expressed: Expressed, tensors: Mapping[str, np.ndarray], *, source: Path, sinusoids: Sinusoids
) -> tuple[str, ...]:
    """For CTranslate2; what there is to say of it."""
    count = max(expressed.config.src_vocab_size, expressed.config.tgt_vocab_size)
    pieces = piece_names(source, count)
    names = [str(number) for number in range(count)] if pieces is None else pieces
    write_ctranslate2(path, expressed.config, tensors, pieces=names, sinusoids=sinusoids)
    return () if pieces else ("pieces are named by their ids: no tokenizer.json or vocab.json names them all",)


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
