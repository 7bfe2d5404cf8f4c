"""Files of our own two models' weights, from one twin's layout to the other's: `python -m parity convert`."""

import dataclasses
from pathlib import Path
from typing import Literal, get_args

from parity.weights.problems import MappingError
from parity.weights.store import Checkpoint, read_tensors, write_tensors
from parity.weights.twins import twin_mapping

Format = Literal["torch-reference", "flax"]

_SUFFIXES = {"torch-reference": (".pt", ".pth", ".safetensors"), "flax": ("", ".safetensors")}
_SOURCE, _TARGET = "src_embedding.weight", "tgt_embedding.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What was converted; `str` of it is a line for the terminal."""

    src: Path
    dst: Path
    source_format: Format
    target_format: Format
    tensors: int
    elements: int
    tied: bool
    """Whether source and target embedding are one tensor."""

    def __str__(self) -> str:
        embeddings = "one embedding for source and target" if self.tied else "separate embeddings"
        return (
            f"{self.src} ({self.source_format}) -> {self.dst} ({self.target_format}): "
            f"{self.tensors} tensors, {self.elements:,} elements, {embeddings}"
        )


def convert(src: Path, dst: Path, *, source_format: Format, target_format: Format, overwrite: bool = False) -> Summary:
    """Reads `src`, moves every tensor to its place in the other layout, writes `dst`; metadata goes along.

    torch-reference lives in `.pt`, `.pth` or `.safetensors`, flax in an Orbax directory or `.safetensors`. With the
    same format on both sides, names are checked and only the kind of file changes. Whether embeddings are tied is
    read from names (an alias, or no target embedding), never guessed from equal values.

    Raises FileNotFoundError without `src`, FileExistsError if `dst` exists and is not to be overwritten, ValueError on
    paths that do not fit, and its subclasses StoreError and MappingError.
    """
    src, dst = Path(src), Path(dst)
    _check_paths(src, dst, source_format, target_format, overwrite)
    checkpoint = read_tensors(src)
    tied = _is_tied(src, checkpoint)
    mapping = twin_mapping(tied=tied)
    if source_format == "flax":
        mapping = mapping.inverse()
    named = checkpoint.with_aliases()
    if source_format == target_format:
        mapping.plan(named)
        tensors = named
    else:
        tensors = mapping.apply(named)
    aliases = {}
    if tied:
        tensors.pop(_TARGET, None)
        if target_format == "torch-reference":
            aliases = {_TARGET: _SOURCE}
    write_tensors(dst, Checkpoint(tensors=tensors, aliases=aliases, metadata=checkpoint.metadata))
    elements = sum(tensor.size for tensor in tensors.values())
    return Summary(
        src=src,
        dst=dst,
        source_format=source_format,
        target_format=target_format,
        tensors=len(tensors),
        elements=elements,
        tied=tied,
    )


def newest_params(run: Path) -> Path:
    """The parameters in the newest checkpoint of a training run: `<run>/checkpoints/<step>/params`.

    Raises FileNotFoundError if there is none.
    """
    # Orbax gives a checkpoint its bare number as a name when it is whole, and not before.
    steps = [int(folder.name) for folder in (run / "checkpoints").iterdir() if folder.name.isdecimal()]
    if not steps:
        raise FileNotFoundError(f"{run / 'checkpoints'}: expected a finished checkpoint, found none")
    return run / "checkpoints" / str(max(steps)) / "params"


def _check_paths(src: Path, dst: Path, source_format: Format, target_format: Format, overwrite: bool) -> None:
    for path, format_ in ((src, source_format), (dst, target_format)):
        if format_ not in get_args(Format):
            raise ValueError(f"expected a format out of {', '.join(get_args(Format))}, got {format_!r}")
        suffix = "" if path.is_dir() else path.suffix
        if suffix not in _SUFFIXES[format_]:
            places = " or ".join(known or "an Orbax directory" for known in _SUFFIXES[format_])
            raise ValueError(f"expected {format_} weights in {places}, got {path}")
    source, target = src.resolve(), dst.resolve()
    if target == source or target in source.parents:
        raise ValueError(f"expected a target apart from the source {src}, got {dst}, which would replace it")
    if dst.exists() and not overwrite:
        raise FileExistsError(f"expected a target that does not exist, got {dst}; overwriting must be asked for")


def _is_tied(src: Path, checkpoint: Checkpoint) -> bool:
    others = {alias: name for alias, name in checkpoint.aliases.items() if {alias, name} != {_SOURCE, _TARGET}}
    if others:
        # Converted, they would become separate tensors without a word.
        raise ValueError(f"{src}: expected {_TARGET!r} alone to be a second name of a tensor, got {others}")
    if _SOURCE not in checkpoint.tensors and _SOURCE not in checkpoint.aliases:
        raise MappingError([f"missing {_SOURCE!r} in {src}: not the weights of a twin"])
    return bool(checkpoint.aliases) or _TARGET not in checkpoint.tensors
