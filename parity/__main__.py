"""The command line: `python -m parity check`, `python -m parity convert`.

Exit status of check: 0 equal, 1 not equal, 2 nothing to compare; of convert: 0 done, 1 it failed, 2 wrong usage.
"""

import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from transformer_config import TransformerConfig

# Only light modules above: `--help` must not wait for jax and torch.

Preset = Literal["tiny", "base", "big"]
Format = Literal["torch-reference", "flax"]


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
    if preset is None and checkpoint is None:
        raise UsageError("expected --preset or --checkpoint")
    if assignments and checkpoint is not None:
        raise UsageError("expected --set without --checkpoint, which has its own config")
    from rich.console import Console

    from parity import ladder, report, twins

    try:
        if checkpoint is not None:
            pair = twins.checkpoint_pair(checkpoint)
        else:
            assert preset is not None
            config: TransformerConfig = getattr(TransformerConfig, preset)(**_fields(assignments))
            pair = twins.preset_pair(config, seed=seed, name=f"preset {preset}")
    except (ValueError, OSError) as error:
        # Nothing was compared, so nothing is unequal.
        raise UsageError(str(error)) from error
    # In a log file there is no terminal to ask, and room for the names.
    console = Console(width=None if sys.stdout.isatty() else 120)
    with console.status("Comparing ..."):
        outcome = ladder.check(pair)
    report.show(outcome, console=console)
    if json_file is not None:
        report.write_json(outcome, json_file)
        console.print(f"Written to {json_file}.")
    return 0 if outcome.passed else 1


def _fields(assignments: Sequence[str]) -> dict[str, object]:
    """`name=value` each; a value is read as JSON where it is JSON, and as text where it is not."""
    fields: dict[str, object] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or name not in {field.name for field in dataclasses.fields(TransformerConfig)}:
            raise UsageError(f"expected FIELD=VALUE with a field of TransformerConfig, got {assignment!r}")
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
