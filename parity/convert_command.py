"""`python -m parity convert`, `convert-state`, `inspect` and `formats`."""

import contextlib
import dataclasses
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from parity.usage import UsageError
from transformer_config import TransformerConfig

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from parity.convert import Prove, Write

# Only light modules above: `--help` must not wait for jax and torch.

_DEFAULTS = TransformerConfig().to_dict()

Settings = Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="FIELD=VALUE ...")]


def convert(
    src: tyro.conf.Positional[Path],
    dst: tyro.conf.Positional[Path],
    *,
    target_format: Annotated[str, tyro.conf.arg(name="to", metavar="FORMAT")],
    source_format: Annotated[str | None, tyro.conf.arg(name="from", metavar="FORMAT")] = None,
    settings: Settings = (),
    tokenizer: Path | None = None,
    languages: tuple[str, str] | None = None,
    verify: bool = True,
    overwrite: bool = False,
    max_shard_bytes: int | None = None,
    workers: int | None = None,
) -> int:
    """Carry a model's weights into another format, and prove that it computes the same there.

    Args:
        src: A folder as transformers writes it, .pt, .safetensors, .msgpack, an Orbax folder, or a training run.
        dst: A new folder or file (fairseq: .pt). Of our own and of tutorials' layouts the suffix says how it is stored.
        target_format: One of `python -m parity formats`, or `run`: a folder that `python -m train translate --run` and
            `train run --init-from` take, with the model's tokenizer.
        source_format: Found out by itself, where names say it.
        settings: Fields of our config that a file without a config does not say, such as `--set num_heads=8`.
        tokenizer: Of `--to run`: folder with the tokenizer's files, where it is not SRC.
        languages: Of `--to run`: source and target, for models of many languages, such as `--languages de en`.
        verify: Compare the logits of both sides, and of their own classes where these are installed.
        overwrite: Replace what is there.
        max_shard_bytes: More than so many bytes become several safetensors files and an index, in a folder; by default
            5 GB in the formats of transformers. In the other formats a folder is Orbax's without this option.
        workers: Files written side by side; by default one more than there are cores.
    """
    from rich.console import Console

    from parity import convert as conversion

    _expect_formats({"--from": source_format, "--to": None if target_format == "run" else target_format})
    console = Console(width=None if sys.stdout.isatty() else 120)
    with _progress(console) as progress:
        done = conversion.convert(
            src,
            dst,
            source_format=source_format,
            target_format=target_format,
            settings=fields_of(settings),
            sinusoids=_sinusoids,
            prove=_proof() if verify else None,
            write=_writer(src, dst, target_format, tokenizer=tokenizer, languages=languages),
            overwrite=overwrite,
            max_shard_bytes=max_shard_bytes,
            workers=workers,
            progress=progress,
        )
    _tell(console, src, dst, done)
    return 0


def _expect_formats(given: Mapping[str, str | None]) -> None:
    from parity.weights.formats import FORMATS

    for option, name in given.items():
        if name is not None and name not in FORMATS:
            known = [*FORMATS, "run"] if option == "--to" else FORMATS
            raise UsageError(f"{option}: expected one of {', '.join(known)}, got {name!r}")


def _sinusoids(config: TransformerConfig, length: int) -> "np.ndarray":
    from parity.twins_proof import sinusoids  # with jax, which whoever only moves tensors need not wait for

    return sinusoids(config, length)


def _proof() -> "Prove":
    from parity.twins_proof import prove

    return prove


def _writer(
    src: Path, dst: Path, target_format: str, *, tokenizer: Path | None, languages: tuple[str, str] | None
) -> "Write":
    from parity.weights.models import is_run, write_model

    if target_format != "run" and not is_run(src) and (tokenizer, languages) == (None, None):
        return write_model
    from parity.twins_run import Writer

    return Writer(run_dir=dst, tokenizer=tokenizer, languages=languages)


def _tell(console: "Console", src: Path, dst: Path, done: Any) -> None:
    read, written = done.read, done.written
    say = _say(console)
    say(f"{src} ({read.format_.name}) -> {dst} ({written.format_.name})")
    say(f"{written.tensors:,} tensors, {written.nbytes:,} bytes")
    _tell_ignored(say, read.ignored)
    for name, reason in written.changed.items():
        say(f"{name} is otherwise there: {reason}")
    for note in written.notes:
        say(f"note: {note}")
    if done.proof is None:
        say("Not verified.")
        return
    for link in done.proof.links:
        say(f"equal: {link}")
    for note in done.proof.notes:
        say(f"note: {note}")


def _tell_ignored(say: Callable[[str], None], ignored: Mapping[str, str]) -> None:
    """A line a reason."""
    names: dict[str, list[str]] = {}
    for name, reason in ignored.items():
        names.setdefault(reason, []).append(name)
    for reason, every in names.items():
        say(f"ignored {', '.join(every)}: {reason}")


def convert_state(
    src: tyro.conf.Positional[Path],
    dst: tyro.conf.Positional[Path],
    *,
    like: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None,
    overwrite: bool = False,
) -> int:
    """Carry a training in the middle of it: stop in one framework, go on in the other.

    A run becomes a file for torch: {"model": ..., "optimizer": Adam's state dict, "step": ...}. Such a file becomes a
    new run, which `python -m train run` continues.

    Args:
        src: A training run, of which the newest checkpoint is taken, or such a file.
        dst: A new .pt file, or the folder of the new run.
        like: For a new run: the run whose config, tokenizer and training text it has.
        overwrite: Replace what is there.
    """
    from parity.weights.models import is_run

    if not src.exists():
        raise FileNotFoundError(f"expected a training run or a file of torch, got {src}, which does not exist")
    if is_run(src) != (like is None):
        expected = "no --like with a run" if is_run(src) else "--like RUN with a file of torch"
        raise UsageError(f"expected {expected}, got {src} and {like}")
    try:
        from parity.twins_state import run_to_torch, torch_to_run
    except ImportError as error:
        raise UsageError(f"expected torch and jax to be installed, got {error}") from error
    if like is None:
        said = run_to_torch(src, dst, overwrite=overwrite)
    else:
        said = torch_to_run(src, dst, like=like, overwrite=overwrite)
    print(f"{src} -> {dst}: {said}")
    return 0


def inspect(
    path: tyro.conf.Positional[Path],
    *,
    source_format: Annotated[str | None, tyro.conf.arg(name="from", metavar="FORMAT")] = None,
    settings: Settings = (),
) -> int:
    """Show what a file or folder of weights holds: format, config, tensors with shapes, dtypes and sizes.

    Args:
        path: As `convert` takes it.
        source_format: Found out by itself, where names say it.
        settings: Fields of our config that the file does not say.
    """
    from rich.console import Console
    from rich.table import Table

    from parity.weights.models import read_model
    from parity.weights.problems import spec_of

    model = read_model(path, source_format, fields_of(settings))
    console = Console(width=None if sys.stdout.isatty() else 120)
    say = _say(console)
    say(f"{path}: {model.format_.name}, {model.format_.title}")
    changed = {name: value for name, value in model.config.to_dict().items() if value != _DEFAULTS[name]}
    say("config, where it is not the paper's: " + ", ".join(f"{name}={value}" for name, value in changed.items()))
    if model.search is not None:
        say(f"decoded with {model.search}")
    _tell_ignored(say, model.ignored)
    table = Table("tensor", "shape", "dtype", "bytes", box=None, pad_edge=False)
    total = 0
    for name in model.stored:
        spec = spec_of(model.stored, name)
        nbytes = spec.dtype.itemsize
        for size in spec.shape:
            nbytes *= size
        total += nbytes
        table.add_row(name, "x".join(map(str, spec.shape)), str(spec.dtype), f"{nbytes:,}")
    console.print(table)
    say(f"{len(model.stored):,} tensors, {total:,} bytes")
    return 0


def formats() -> int:
    """List the formats that can be read and written."""
    from rich.console import Console
    from rich.table import Table

    from parity.weights.formats import FORMATS

    table = Table("format", "read", "written", "whose", box=None, pad_edge=False)
    for name, format_ in FORMATS.items():
        table.add_row(name, "yes" if format_.can_be_read else "no", "yes", format_.title)
    table.add_row("run", "yes", "yes", "a run of `python -m train`, with its tokenizer; read as flax")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0


def fields_of(assignments: Sequence[str]) -> dict[str, Any]:
    """`name=value` each; a value is read as JSON where it is JSON, and as text where it is not."""
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    fields: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or name not in known:
            raise UsageError(f"expected FIELD=VALUE with a field of TransformerConfig, got {assignment!r}")
        try:
            fields[name] = json.loads(text.replace("None", "null").replace("True", "true").replace("False", "false"))
        except json.JSONDecodeError:
            fields[name] = text
    return fields


def _say(console: "Console") -> Callable[[str], None]:
    return lambda text: console.print(text, soft_wrap=True, highlight=False, markup=False)


@contextlib.contextmanager
def _progress(console: "Console") -> Iterator[Callable[[str, int], None]]:
    """How much is written; nothing where no terminal shows it."""
    from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn())
    lock = threading.Lock()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("converting", total=None)

        def tell(name: str, nbytes: int) -> None:
            with lock:
                bar.update(task, advance=nbytes, description=name)

        yield tell
