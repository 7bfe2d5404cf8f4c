"""The command line: `python -m parity check`, `python -m parity convert`.

Exit status of check: 0 equal, 1 not equal, 2 wrong usage; of convert: 0 done, 1 it failed, 2 wrong usage.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

# Only light modules above: `--help` must not wait for jax and torch.

Preset = Literal["tiny", "base", "big"]
Format = Literal["torch-reference", "flax"]


class UsageError(Exception):
    """The command line asks for something that cannot be meant."""


def check(
    *,
    preset: Preset | None = None,
    checkpoint: Path | None = None,
    seed: int = 0,
    json: Path | None = None,
) -> int:
    """Check that the torch reference and the Flax twin compute the same.

    Args:
        preset: Random weights for this config.
        checkpoint: Folder of a training run: its trained weights, on its own validation text.
        seed: Of random weights and ids.
        json: Write the report to this file too.
    """
    if (preset is None) == (checkpoint is None):
        raise UsageError("expected either --preset or --checkpoint")
    from rich.console import Console

    from parity import ladder, report, twins
    from transformer_config import TransformerConfig

    if checkpoint is not None:
        pair = twins.checkpoint_pair(checkpoint)
    else:
        assert preset is not None
        config: TransformerConfig = getattr(TransformerConfig, preset)()
        pair = twins.preset_pair(config, seed=seed, name=f"preset {preset}")
    console = Console()
    with console.status("Comparing ..."):
        outcome = ladder.check(pair)
    report.show(outcome, console=console)
    if json is not None:
        report.write_json(outcome, json)
        console.print(f"Written to {json}.")
    return 0 if outcome.passed else 1


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
    try:
        return tyro.extras.subcommand_cli_from_dict(
            {"check": check, "convert": convert}, prog="python -m parity", args=arguments
        )
    except UsageError as error:
        print(f"usage: {error}; see python -m parity check --help", file=sys.stderr)
        return 2
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
