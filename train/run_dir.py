"""The folder of a run: config.json, corpus.sha256, tokenizer.json, metrics.jsonl, checkpoints/."""

import json
import os
from pathlib import Path
from typing import Any

from train.config import TrainConfig
from train.tokenizer import Tokenizer

FREE_TO_CHANGE = (
    "run_dir",
    "epochs",
    "max_steps",
    "log_every_steps",
    "evaluation",
    "checkpoint",
    "corpus.path",
    "corpus.cache",
)
"""Fields that say how far and how visibly a run goes, not what it computes; a continued run may change them."""


class RunDir:
    """Opens the folder of a run, new or existing."""

    def __init__(self, path: Path):
        self.path = path
        self.config_file = path / "config.json"
        self.corpus_file = path / "corpus.sha256"
        self.tokenizer_file = path / "tokenizer.json"
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"

    def write_config(self, config: TrainConfig) -> None:
        """Writes the config, after a check that it is the one the run was started with.

        Raises ValueError that names every field that differs and must not.
        """
        if self.config_file.exists():
            old, new = _flat(self.read_config().to_dict()), _flat(config.to_dict())
            differing = [
                f"{name}: {old[name]!r} before, {new[name]!r} now"
                for name in sorted(old)
                if old[name] != new[name] and not name.startswith(FREE_TO_CHANGE)
            ]
            if differing:
                raise ValueError(
                    f"{self.path}: expected the config that this run was started with (or another run_dir), got "
                    + "; ".join(differing)
                )
        write_whole(self.config_file, json.dumps(config.to_dict(), indent=2) + "\n")

    def read_config(self) -> TrainConfig:
        """The run's config. Raises FileNotFoundError or ValueError that names the file."""
        if not self.config_file.exists():
            raise FileNotFoundError(f"{self.config_file}: expected the config of a run, found no such file")
        try:
            return TrainConfig.from_dict(json.loads(self.config_file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.config_file}: {error}") from error

    def pin_corpus(self, sha256: str) -> None:
        """Notes the sha256 of the training text, or raises ValueError if the run was started on another one."""
        if not self.corpus_file.exists():
            write_whole(self.corpus_file, sha256 + "\n")
            return
        pinned = self.corpus_file.read_text(encoding="utf-8").strip()
        if pinned != sha256:
            raise ValueError(
                f"{self.path}: expected the training text that this run was started with (sha256 {pinned[:12]}...), "
                f"got another one ({sha256[:12]}...)"
            )

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that was saved with the run."""
        return Tokenizer.load(self.tokenizer_file)

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl."""
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def rewind_metrics(self, step: int) -> None:
        """Removes what a run continued at `step` writes again, and a line that a kill cut short."""
        if not self.metrics_file.exists():
            return
        kept = []
        for line in self.metrics_file.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break
            if record["step"] <= step and not record["kind"].startswith("final"):
                kept.append(line + "\n")
        write_whole(self.metrics_file, "".join(kept))


def write_whole(path: Path, text: str) -> None:
    """Writes beside the target and renames, so that a reader sees the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".partial")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
