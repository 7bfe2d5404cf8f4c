"""The command line: `python -m train run PRESET`, `translate`, `evaluate`, `average`, `plot`, `attention`.

Exit status 0: done; 1: it failed; 2: wrong usage; 3: a signal stopped a run, which has saved, so that the same command
continues it; 130: interrupted before it could.
"""

import inspect
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from train.config import TrainConfig
from train.presets import PRESETS
from train.search import DEFAULT_SEARCH, SearchOptions

# Only light modules above: `--help` must not wait for jax.

if TYPE_CHECKING:
    Preset = TrainConfig
else:
    Preset = tyro.extras.subcommand_type_from_defaults(
        {name: preset() for name, preset in PRESETS.items()},
        {name: inspect.getdoc(preset) for name, preset in PRESETS.items()},
        prefix_names=False,
    )


def run(config: Annotated[Preset, tyro.conf.arg(name="")]) -> int:
    """Train, or continue, a run: a preset and any of its fields, such as `demo --epochs 3`."""
    from train.host_memory import keep_freed_memory

    keep_freed_memory()  # before jax begins its threads

    from rich.console import Console

    from train.compilation import keep_programs
    from train.loop import run
    from train.parallel import start_processes
    from train.signals import StoppedError

    cluster = start_processes(config.parallel)
    # In a log file there is no terminal to ask, and room for a line.
    console = Console(width=None if sys.stdout.isatty() else 120)
    if cluster is not None:
        console.print(f"One of several processes: {cluster}.")
    if config.parallel.compile_cache is not None:
        keep_programs(config.parallel.compile_cache)
    try:
        run(config, console=console)
    except StoppedError as stopped:
        print(stopped, file=sys.stderr)
        return 3
    return 0


def translate(
    *,
    run: Path,
    options: Annotated[SearchOptions, tyro.conf.arg(name="")] = DEFAULT_SEARCH,
    batch_size: int | None = None,
    average_last: int | None = None,
    ema: bool = False,
    num_devices: int | None = None,
) -> int:
    """Read lines from standard input, write their translations to standard output, one a line.

    With --nbest above 1: number of the line from 0 ||| translation ||| score. Exit status 1 if a line was too long.

    Args:
        run: Folder of a training run.
        options: How translations are looked for.
        batch_size: Sentences decoded together; by default the run's evaluation.batch_size.
        average_last: Translate with the average of so many of the newest checkpoints.
        ema: Translate with the moving average, which a run with optimizer.ema_decay has; this is also the default.
        num_devices: Devices to share out the sentences to; by default all there are.
    """
    _prepare_for_decoding()

    from train.translate import load_run, translate_stream

    trained = load_run(run, average_last=average_last, ema=ema, num_devices=num_devices)
    return translate_stream(trained.with_batch_size(batch_size), sys.stdin.buffer, sys.stdout, options=options)


def evaluate(
    *,
    run: Path,
    split: str = "test",
    options: Annotated[SearchOptions, tyro.conf.arg(name="")] = DEFAULT_SEARCH,
    batch_size: int | None = None,
    average_last: int | None = None,
    ema: bool = False,
    against: Path | None = None,
    output: Path | None = None,
    data: Path | None = None,
    json: bool = False,
) -> int:
    """Translate a split of a run's corpus, score it with sacreBLEU, and compare it with another run.

    Args:
        run: Folder of a training run.
        split: Name of a split of its corpus, also of one that the run has not read; or validation, test: the run's own.
        options: How translations are looked for.
        batch_size: Sentences decoded together; by default the run's evaluation.batch_size.
        average_last: Evaluate the average of so many of the newest checkpoints.
        ema: Evaluate the moving average, which a run with optimizer.ema_decay has; this is also the default.
        against: Folder of another run, evaluated in the same way; the difference is tested by paired bootstrap.
        output: File for the translations, one a line; beside it FILE.json with the scores. By default
            hypotheses/SPLIT.LANGUAGE.txt in the run's folder.
        data: Folder to read the corpus from, where it is not where the run's config says.
        json: Print the scores as JSON, and nothing else.
    """
    _prepare_for_decoding()

    from rich.console import Console

    from train.evaluate_run import evaluate_run

    console = Console(width=None if sys.stdout.isatty() else 120, quiet=json)
    report = evaluate_run(
        run,
        split=split,
        options=options,
        batch_size=batch_size,
        average_last=average_last,
        ema=ema,
        num_devices=None,
        against=against,
        output=output,
        data=data,
        console=console,
    )
    if json:
        print(report.to_json())
    return 0


def average(run: tyro.conf.Positional[Path], /, *, output: Path, last: int = 5, ema: bool = False) -> int:
    """Write the average of a run's newest checkpoints as a run of its own, for inference only.

    Args:
        run: Folder of a training run.
        output: Folder to write; it must not exist.
        last: How many checkpoints, the newest ones.
        ema: Write the moving average of the newest checkpoint instead (of a run with optimizer.ema_decay).
    """
    from train.average import average_run

    print(average_run(run, output, last=last, ema=ema))
    return 0


def plot(runs: tyro.conf.Positional[tuple[Path, ...]], /, *, output: Path | None = None) -> int:
    """Draw loss, BLEU, learning rate and throughput of one or several runs.

    Args:
        runs: Folders of training runs.
        output: A .png, .svg or .pdf; by default metrics.png in the first folder.
    """
    from train.plot import plot_runs

    if not runs:
        raise ValueError("expected the folder of at least one run, got none")
    print(plot_runs(runs, output or runs[0] / "metrics.png"))
    return 0


def attention(
    sentence: tyro.conf.Positional[str], /, *, run: Path, translation: str | None = None, output: Path | None = None
) -> int:
    """Draw which pieces a run's model attends to in a sentence: every layer and head, as figures and as a page.

    Args:
        sentence: In the language that the run translates from.
        run: Folder of a training run.
        translation: What the decoder reads; by default what the model itself writes, greedily.
        output: Folder to write; it must not exist. By default `attention` in the run's folder.
    """
    from train.attention_page import write_attention

    print(write_attention(run, sentence, translation=translation, output=output))
    return 0


def _prepare_for_decoding() -> None:
    """Before jax begins."""
    from train.cpu_devices import one_device_a_core
    from train.host_memory import keep_freed_memory

    keep_freed_memory()
    one_device_a_core()


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs the command."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        # Threads of XLA's pool, one a core by default: with fewer than devices, collectives can wait for each other.
        os.environ.setdefault("PJRT_NPROC", "32")
    # Orbax tells of every save that takes a second; what fails, it raises, after pages about each of its threads.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        return tyro.extras.subcommand_cli_from_dict(
            {
                "run": run,
                "translate": translate,
                "evaluate": evaluate,
                "average": average,
                "plot": plot,
                "attention": attention,
            },
            prog="python -m train",
            args=arguments,
        )
    except KeyboardInterrupt:
        print("Interrupted. The same command continues from the last checkpoint.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; what is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
