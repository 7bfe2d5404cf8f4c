"""The command line: `python -m train run PRESET`, `python -m train translate --run DIR`.

Exit status 0: done; 1: it failed; 2: wrong usage; 130: interrupted.
"""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from train.config import TrainConfig
from train.presets import PRESETS

# Only light modules above: `--help` must not wait for jax.

if TYPE_CHECKING:
    Preset = TrainConfig
else:
    Preset = tyro.extras.subcommand_type_from_defaults(
        {name: preset() for name, preset in PRESETS.items()},
        {name: preset.__doc__ for name, preset in PRESETS.items()},
        prefix_names=False,
    )


def run(config: Annotated[Preset, tyro.conf.arg(name="")]) -> int:
    """Train, or continue, a run: a preset and any of its fields, such as `demo --epochs 3`."""
    from rich.console import Console

    from train.loop import run

    # In a log file there is no terminal to ask, and room for a line.
    run(config, console=Console(width=None if sys.stdout.isatty() else 120))
    return 0


def translate(*, run: Path, batch_size: int | None = None) -> int:
    """Read lines from standard input, write their translations to standard output, one a line.

    Args:
        run: Folder of a training run.
        batch_size: Sentences decoded together; by default the run's evaluation.batch_size.
    """
    from train.translate import translate_stream

    return translate_stream(run, sys.stdin.buffer, sys.stdout, batch_size=batch_size)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs the command."""
    # Orbax tells of every save that takes a second; what fails, it raises.
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        return tyro.extras.subcommand_cli_from_dict(
            {"run": run, "translate": translate}, prog="python -m train", args=arguments
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
