"""Carries a model from one format to another: read, written beside its place, proven, and only then moved there."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parity.weights.checkpoint import StoreError
from parity.weights.foreign import Model
from parity.weights.formats.express import Sinusoids
from parity.weights.models import Written, read_model, write_model
from parity.weights.sharded import Beside

Prove = Callable[[Path, Model, Path, Model | None, Mapping[str, str]], Any]
"""`twins_proof.prove`, which gives a proof with `passed`, `links` and `notes`."""


Write = Callable[..., Written]
"""`write_model`, or what has its arguments."""


class NotProvenError(ValueError):
    """The result computes something else. The message has the figures; nothing was written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converted:
    """What was done."""

    read: Model
    written: Written
    proof: Any = None
    """None if it was not asked for."""


def convert(
    src: Path,
    dst: Path,
    *,
    source_format: str | None,
    target_format: str,
    settings: Mapping[str, Any],
    sinusoids: Sinusoids,
    prove: Prove | None,
    write: Write = write_model,
    overwrite: bool = False,
    max_shard_bytes: int | None = None,
    workers: int | None = None,
    progress: Callable[[str, int], None] = lambda name, nbytes: None,
) -> Converted:
    """Raises FileNotFoundError, FileExistsError, and ValueErrors that name file, field or tensor; then nothing is left
    behind, and what was at `dst` is as it was."""
    source, target = src.resolve(), dst.resolve()
    if target == source or target in source.parents:
        raise ValueError(f"expected a target apart from the source {src}, got {dst}, which would replace it")
    with Beside(dst, overwrite=overwrite) as path:
        read = read_model(src, source_format, settings)
        try:
            written = write(
                read,
                path,
                target_format,
                source=src,
                sinusoids=sinusoids,
                max_shard_bytes=max_shard_bytes,
                workers=workers,
                progress=progress,
            )
        except StoreError as error:
            raise StoreError(str(error).replace(str(path), str(dst))) from error
        again = None
        if prove is not None and written.format_.can_be_read:
            again = read_model(path, written.format_.name)
        proof = None if prove is None else prove(src, read, path, again, written.changed)
        if proof is not None and not proof.passed:
            failed = "; ".join(str(link) for link in proof.links if not link.passed)
            raise NotProvenError(f"{dst}: not written, because it would compute something else: {failed}")
    return Converted(read=read, written=written, proof=proof)
