"""`python -m parity check-trainer`: the training of a preset, step by step beside the reference's."""

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from parity.usage import UsageError
from train.config import TrainConfig
from train.presets import PRESETS

# Only light modules above: `--help` must not wait for jax and torch.

if TYPE_CHECKING:
    Preset = TrainConfig
else:
    Preset = tyro.extras.subcommand_type_from_defaults(
        {name: preset() for name, preset in PRESETS.items()},
        {name: inspect.getdoc(preset) for name, preset in PRESETS.items()},
        prefix_names=False,
    )


@tyro.conf.configure(tyro.conf.CascadeSubcommandArgs)
def check_trainer(
    config: Annotated[Preset, tyro.conf.arg(name="")],
    *,
    steps: int = 50,
    keep: Path | None = None,
) -> int:
    """Train a preset for some steps in float64, beside the PyTorch reference: the same batches, the same dropout.

    The trainer is the real one: its data, its compiled step, its own dropout. Exit status 0: every loss is equal to
    1e-9; 1: one is not.

    Args:
        config: A preset of `python -m train run`, and any of its fields, such as `multi30k-de-en --corpus.path DIR`.
        steps: So many of the run's first steps.
        keep: Folder for the tokenizer and the text as ids, instead of a temporary one.
    """
    if steps < 1:
        raise UsageError(f"--steps: expected at least 1, got {steps}")
    try:
        from rich.console import Console

        from parity import twins_trainer
    except ImportError as error:
        raise UsageError(f"expected torch and jax to be installed, got {error}") from error
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        return 0 if twins_trainer.check(config, steps=steps, folder=keep, console=console) else 1
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
