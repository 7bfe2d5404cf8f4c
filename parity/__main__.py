"""The command line: `python -m parity check`, `python -m parity convert`.

Exit status of check: 0 equal, 1 not equal, 2 wrong usage, 3 a model failed while it ran;
of convert: 0 done, 1 it failed, 2 wrong usage.
"""

import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from transformer_config import TransformerConfig

if TYPE_CHECKING:
    from parity.pair import Pair

# Only light modules above: `--help` must not wait for jax and torch.

Preset = Literal["tiny", "base", "big"]
Format = Literal["torch-reference", "flax"]


PRECISION = "the check runs in float64 and in float32, whatever the config says"
DROPOUT = "the check runs without dropout"
NOT_CHECKED = {
    "dtype": PRECISION,
    "param_dtype": PRECISION,
    "dropout": DROPOUT,
    "attention_dropout": DROPOUT,
    "activation_dropout": DROPOUT,
}


class UsageError(Exception):
    """The command line asks for something that cannot be meant."""


def check(
    *,
    preset: Preset | None = None,
    checkpoint: Path | None = None,
    assignments: Annotated[tuple[str, ...], tyro.conf.arg(name="set")] = (),
    seed: int = 0,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Check that the torch reference and the Flax twin compute the same.

    Args:
        preset: Random weights for this config.
        checkpoint: Folder of a training run: its own config, trained weights and validation text, whatever the preset.
        assignments: Fields of the preset's config to change, such as `--set norm_order=pre window=4`.
        seed: Of random weights and ids.
        json_file: Write the report to this file too.
    """
    pair = _pair(preset=preset, checkpoint=checkpoint, assignments=assignments, seed=seed, json_file=json_file)
    from rich.console import Console

    from parity import ladder, report
    from parity.weights.problems import MappingError

    # In a log file there is no terminal to ask, and room for the names.
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        with console.status("Comparing ..."):
            outcome = ladder.check(pair)
    except MappingError:
        raise
    except Exception:
        console.print_exception()
        print("error: a model failed while it ran; nothing was compared", file=sys.stderr)
        return 3
    report.show(outcome, console=console)
    if json_file is not None:
        report.write_json(outcome, json_file)
        console.print(f"Written to {json_file}.")
    return 0 if outcome.passed else 1


def _pair(
    *, preset: Preset | None, checkpoint: Path | None, assignments: Sequence[str], seed: int, json_file: Path | None
) -> "Pair":
    """What the command line asks to compare. Raises UsageError if that cannot be: nothing compared is not unequal."""
    if preset is None and checkpoint is None:
        raise UsageError("expected --preset or --checkpoint")
    if assignments and checkpoint is not None:
        raise UsageError("expected --set without --checkpoint, which has its own config")
    if seed < 0:
        raise UsageError(f"--seed: expected at least 0, got {seed}")
    fields = _fields(assignments)
    try:
        from parity import twins

        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
        if checkpoint is not None:
            return twins.checkpoint_pair(checkpoint)
        assert preset is not None
        config: TransformerConfig = getattr(TransformerConfig, preset)(**fields)
        return twins.preset_pair(config, seed=seed, name=f"preset {preset}")
    except ImportError as error:
        raise UsageError(f"expected torch and jax to be installed, got {error}") from error
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def _fields(assignments: Sequence[str]) -> dict[str, object]:
    """`name=value` each; a value is read as JSON where it is JSON, and as text where it is not."""
    fields: dict[str, object] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or name not in {field.name for field in dataclasses.fields(TransformerConfig)}:
            raise UsageError(f"expected FIELD=VALUE with a field of TransformerConfig, got {assignment!r}")
        if name in NOT_CHECKED:
            raise UsageError(f"expected a field that the check depends on, got {assignment!r}: {NOT_CHECKED[name]}")
        try:
            fields[name] = json.loads(text.replace("None", "null").replace("True", "true").replace("False", "false"))
        except json.JSONDecodeError:
            fields[name] = text
    return fields


def convert(
    src: tyro.conf.Positional[Path],
    dst: tyro.conf.Positional[Path],
    *,
    source_format: Annotated[Format, tyro.conf.arg(name="from")],
    target_format: Annotated[Format, tyro.conf.arg(name="to")],
    overwrite: bool = False,
) -> int:
    """Convert a file or folder of weights.

    Args:
        src: .pt, .safetensors, an Orbax folder, or the folder of a training run: its newest checkpoint.
        dst: Its suffix decides how it is stored; none means an Orbax folder.
        source_format: Layout of the source.
        target_format: Layout of the target.
        overwrite: Replace what is there.
    """
    from parity.convert import convert as convert_weights
    from parity.convert import newest_params

    if (src / "checkpoints").is_dir():
        src = newest_params(src)
    print(convert_weights(src, dst, source_format=source_format, target_format=target_format, overwrite=overwrite))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs the command."""
    # Orbax remarks on every params folder that is read by itself; what fails, it raises.
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        return tyro.extras.subcommand_cli_from_dict(
            {"check": check, "convert": convert}, prog="python -m parity", args=arguments
        )
    except UsageError as error:
        print(f"error: {error}; see python -m parity check --help", file=sys.stderr)
        return 2
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
