"""The command line: `python -m parity check`, `check-trainer`, `record`, `selftest`, `convert`, `convert-state`,
`inspect`, `formats`.

Exit status of check: 0 equal, 1 not equal, 2 wrong usage, 3 a model failed while it was built or ran;
of check-trainer: 0 equal, 1 not equal, 2 wrong usage;
of record: 0 written, 1 it could not be written, 2 wrong usage, 3 a model failed; of selftest: 0 every fault found and
no false alarm, 1 not; of the others: 0 done, 1 it failed, 2 wrong usage.
"""

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from parity.convert_command import convert, convert_state, fields_of, formats, inspect
from parity.twins_command import check_trainer
from parity.usage import UsageError
from parity.xla_flags import set_flags
from transformer_config import TransformerConfig

if TYPE_CHECKING:
    from rich.console import Console

    from parity.golden import Golden
    from parity.pair import Pair

# Only light modules above: `--help` must not wait for jax and torch.

Preset = Literal["tiny", "base", "big"]
PortFile = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="MY_PORT.PY")]
Assignments = Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="FIELD=VALUE ...")]

PRECISION = "the check runs in float64, float32 and bfloat16, whatever the config says"
NOT_CHECKED = {"dtype": PRECISION, "param_dtype": PRECISION}

MODELS_OF_TWO_DEVICES = ("base", "big")
"""Presets so large that each further device costs gigabytes. Others are given 8."""


def check(
    port_file: PortFile = None,
    *,
    preset: Preset | None = None,
    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None,
    assignments: Assignments = (),
    seed: int = 0,
    keep_going: bool = False,
    rungs: Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUNG ...")] = (),
    module: str = "",
    against: Annotated[Path | None, tyro.conf.arg(metavar="GOLDEN")] = None,
    report: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")] = None,
) -> int:
    """Check that a port computes what its reference computes.

    Args:
        port_file: A Python file with a function pair() that returns a parity.Pair.
        preset: Our own twins instead, with random weights for this config.
        checkpoint: Our own twins with the trained weights, config and validation text of a training run.
        assignments: Fields of the preset's config to change, such as `--set norm_order=pre window=4`.
        seed: Of random weights and inputs.
        keep_going: Climb on after the first broken rung.
        rungs: Only these, such as `--rungs weights forward`; the others are reported as not compared.
        module: The reference's submodule that the port is a port of, such as `encoder` (Pair.part).
        against: A golden file in the reference's place; torch need not be installed.
        report: Write report.json, junit.xml and index.html into this folder.
        json_file: Write the report as JSON to this file.
    """
    set_flags(devices=2 if preset in MODELS_OF_TWO_DEVICES else 8)
    known = _rungs(rungs)
    console = _console()
    with _failures(console) as failed:
        pair, golden = _asked(port_file, preset, checkpoint, assignments, seed=seed, module=module, against=against)
        _writable(report, json_file)
        from parity import ladder

        with _progress(console) as progress:
            outcome = ladder.check(
                pair, keep_going=keep_going, rungs=known, seed=seed, golden=golden, progress=progress
            )
    if failed:
        return 3
    from parity import report as reports

    reports.show(outcome, console=console)
    written: tuple[Path, ...] = ()
    if report is not None:
        written += reports.write_folder(outcome, report)
    if json_file is not None:
        reports.write_json(reports.to_json(outcome), json_file)
        written += (json_file,)
    for path in written:
        console.print(f"Written: {path}", soft_wrap=True, highlight=False)
    return 0 if outcome.passed else 1


def record(
    port_file: PortFile = None,
    golden: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="GOLDEN")] = None,
    *,
    preset: Preset | None = None,
    assignments: Assignments = (),
    seed: int = 0,
    modules: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATTERN ...")] = ("*",),
    draws: int | None = None,
    hard: bool = True,
    module: str = "",
    overwrite: bool = False,
) -> int:
    """Run the reference once and keep what `check --against` needs: inputs, weights, outputs, loss, gradients.

    Args:
        port_file: A Python file with a function pair() that returns a parity.Pair. With --preset, leave it out.
        golden: The file to write (.safetensors).
        preset: Our own twins instead, with random weights for this config.
        assignments: Fields of the preset's config to change.
        seed: Of random weights and inputs.
        modules: Modules whose inputs and outputs are kept, such as `--modules 'encoder.*'`. All by default.
        draws: Further float32 runs of the reference, by which a tensor beyond its bound is judged. 8 by default.
        hard: Keep the runs on hard inputs too. Each is as large as a batch's.
        module: The reference's submodule that the port is a port of (Pair.part).
        overwrite: Replace what is there.
    """
    if preset is not None and golden is None:
        port_file, golden = None, port_file
    if golden is None:
        raise UsageError("expected a file to write, got none: python -m parity record MY_PORT.PY GOLDEN")
    if draws is not None and draws < 0:
        raise UsageError(f"--draws: expected at least 0, got {draws}")
    console, sizes = _console(), dict[str, int]()
    with _failures(console) as failed:
        pair, _ = _asked(port_file, preset, None, assignments, seed=seed, module=module, against=None)
        from parity.golden import GoldenError
        from parity.record import record as record_pair
        from parity.tolerances import FLOAT32_DRAWS

        draws = FLOAT32_DRAWS if draws is None else draws
        try:
            sizes = record_pair(pair, golden, seed=seed, modules=modules, draws=draws, hard=hard, overwrite=overwrite)
        except (GoldenError, OSError) as error:
            raise UsageError(str(error)) from error
    if failed:
        return 3
    for part, size in sizes.items():
        console.print(f"{part:<48}{size:>16,} bytes", highlight=False)
    console.print(f"Written: {golden}, {golden.stat().st_size:,} bytes", soft_wrap=True, highlight=False)
    return 0


def selftest(
    *,
    quick: bool = False,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")] = None,
    markdown: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    seed: int = 0,
    workers: int | None = None,
) -> int:
    """Plant known porting bugs and blind mutations, and check clean pairs: does the harness find them, and only them?

    Args:
        quick: Fewer places, mutations and pairs: under ten minutes on two cores.
        json_file: Write the figures to this file.
        markdown: Write the matrix of faults to this file.
        seed: Of the sampled mutations and pairs.
        workers: Processes; one a core by default.
    """
    try:
        from parity import selftest as tests
    except ImportError as error:
        raise UsageError(f"expected torch and jax to be installed, got {error}") from error
    workers = os.cpu_count() or 1 if workers is None else workers
    return tests.run(quick=quick, json_file=json_file, markdown=markdown, seed=seed, workers=workers)


def _asked(
    port_file: Path | None,
    preset: Preset | None,
    checkpoint: Path | None,
    assignments: Sequence[str],
    *,
    seed: int,
    module: str,
    against: Path | None,
) -> "tuple[Pair, Golden | None]":
    """What the command line asks to compare. Raises UsageError if that cannot be: nothing compared is not unequal."""
    given = [name for name, x in (("a file", port_file), ("--preset", preset), ("--checkpoint", checkpoint)) if x]
    if len(given) != 1:
        raise UsageError(f"expected one of MY_PORT.PY, --preset and --checkpoint, got {' and '.join(given) or 'none'}")
    if assignments and preset is None:
        raise UsageError(f"expected --set with --preset alone, got it with {given[0]}, which has its own config")
    if module and port_file is None:
        raise UsageError(f"expected --module with a file whose port is a port of {module!r} alone, got {given[0]}")
    if seed < 0:
        raise UsageError(f"--seed: expected at least 0, got {seed}")
    fields = _fields(assignments)
    golden = None
    try:
        if against is not None:
            from parity.golden import Golden

            golden = Golden.read(against)
        elif not _installed("torch"):
            raise UsageError(
                "expected torch to be installed, to run the reference; without it, check --against a golden file"
            )
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    pair = _users_pair(port_file) if port_file is not None else _own_pair(preset, checkpoint, fields, seed=seed)
    return (dataclasses.replace(pair, part=module) if module else pair), golden


def _users_pair(path: Path) -> "Pair":
    from parity.user_file import PortFileError, load_pair

    try:
        return load_pair(path)
    except PortFileError as error:
        raise UsageError(str(error)) from error


def _own_pair(preset: Preset | None, checkpoint: Path | None, fields: dict[str, Any], *, seed: int) -> "Pair":
    try:
        from parity import twins

        if checkpoint is not None:
            return twins.checkpoint_pair(checkpoint)
        assert preset is not None
        config: TransformerConfig = getattr(TransformerConfig, preset)(**fields)
        return twins.preset_pair(config, seed=seed, name=f"preset {preset}")
    except ImportError as error:
        raise UsageError(f"expected torch and jax to be installed, got {error}") from error
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def _installed(package: str) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _rungs(asked: Sequence[str]) -> Sequence[str]:
    from parity import ladder

    unknown = sorted(set(asked) - set(ladder.NAMES))
    if unknown:
        raise UsageError(f"--rungs: expected some of {', '.join(ladder.NAMES)}, got {', '.join(unknown)}")
    return asked or ladder.NAMES


def _fields(assignments: Sequence[str]) -> dict[str, Any]:
    for assignment in assignments:
        name = assignment.partition("=")[0]
        if name in NOT_CHECKED:
            raise UsageError(f"expected a field that the check depends on, got {assignment!r}: {NOT_CHECKED[name]}")
    return fields_of(assignments)


def _writable(report: Path | None, json_file: Path | None) -> None:
    """Before minutes of work, not after."""
    try:
        if report is not None:
            report.mkdir(parents=True, exist_ok=True)
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(str(error)) from error


def _console() -> "Console":
    from rich.console import Console

    # In a log file there is no terminal to ask, and room for the names.
    return Console(width=None if sys.stdout.isatty() else 120)


@contextlib.contextmanager
def _failures(console: "Console") -> Iterator[list[Exception]]:
    """What a model raises is shown with its traceback and put into the list; wrong usage goes on up."""
    failed: list[Exception] = []
    try:
        yield failed
    except UsageError:
        raise
    except Exception as error:
        console.print_exception()
        print("error: a model failed while it was built or ran; nothing was proven", file=sys.stderr)
        failed.append(error)


@contextlib.contextmanager
def _progress(console: "Console") -> Iterator[Callable[[str], None]]:
    """Which rung is being climbed, on one line that goes away; nothing where no terminal shows it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from parity.ladder import RUNGS

    titles = [title for _, _, title in RUNGS]
    columns = (SpinnerColumn(), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("both models are built", total=len(titles))

        def tell(title: str) -> None:
            done = titles.index(title) if title in titles else 0
            bar.update(task, description=title, completed=done)

        yield tell


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs the command."""
    # Orbax remarks on every params folder that is read by itself; what fails, it raises.
    logging.getLogger("absl").setLevel(logging.ERROR)
    commands: dict[str, Callable[..., int]] = {
        "check": check,
        "check-trainer": check_trainer,
        "record": record,
        "selftest": selftest,
        "convert": convert,
        "convert-state": convert_state,
        "inspect": inspect,
        "formats": formats,
    }
    try:
        return tyro.extras.subcommand_cli_from_dict(commands, prog="python -m parity", args=arguments)
    except UsageError as error:
        print(f"error: {error}; see python -m parity --help", file=sys.stderr)
        return 2
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
