"""The folder of a run: config.json, corpus.sha256, tokenizer.json, metrics.jsonl, starts.jsonl, checkpoints/."""

import contextlib
import datetime
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from train.config import TrainConfig
from train.sentences import EncodedText
from train.tokenizer import Tokenizer

FREE_TO_CHANGE = (
    "run_dir",
    "epochs",
    "max_steps",
    "report",
    "parallel",
    "evaluation",
    "search",
    "checkpoint",
    "corpus.kind",
    "corpus.path",
    "corpus.hub",
    "corpus.cache",
)
"""Fields that say how far and how visibly a run goes, not what it computes; a continued run may change them."""

RECORDED_PACKAGES = (
    "twinformer",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "tokenizers",
    "sacrebleu",
)
"""Whose versions a run notes down."""
OPTIONAL_PACKAGES = ("transformers", "sentencepiece", "sacremoses")
"""Likewise, where they are installed: imported models' tokenizers need them."""


def recorded_versions() -> dict[str, str]:
    """Of what a run's results may depend on."""
    optional = (name for name in OPTIONAL_PACKAGES if importlib.util.find_spec(name) is not None)
    return {name: importlib.metadata.version(name) for name in (*RECORDED_PACKAGES, *optional)}


class RunDir:
    """Opens the folder of a run, new or existing."""

    def __init__(self, path: Path):
        self.path = path
        self.config_file = path / "config.json"
        self.corpus_file = path / "corpus.sha256"
        self.tokenizer_file = path / "tokenizer.json"
        self.metrics_file = path / "metrics.jsonl"
        self.starts_file = path / "starts.jsonl"
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
        """The tokenizer that was saved with the run. Raises FileNotFoundError or ValueError that names the file."""
        from train.bpe import BPETokenizer
        from train.transformers_tokenizer import TransformersTokenizer, is_transformers

        if self.tokenizer_file.is_file():
            text = self.tokenizer_file.read_text(encoding="utf-8", errors="replace")
            if is_transformers(text):
                try:
                    return TransformersTokenizer.from_json(text)
                except ValueError as error:
                    raise ValueError(f"{self.tokenizer_file}: {error}") from error
        return BPETokenizer.load(self.tokenizer_file)

    def write_batch(
        self, step: int, *, pairs: Int64[np.ndarray, "pairs"], data: EncodedText, tokenizer: Tokenizer
    ) -> Path:
        """Writes down the pairs of the batch of a step that failed: their numbers among the pairs that are trained on,
        counted from 0, and their text. Returns the file."""
        file = self.path / f"batch-of-step-{step}.json"
        sides = [tokenizer.decode([side[pair].tolist() for pair in pairs.tolist()]) for side in (data.src, data.tgt)]
        entries = [
            {"pair": pair, "source": source, "target": target}
            for pair, source, target in zip(pairs.tolist(), *sides, strict=True)
        ]
        write_whole(file, json.dumps({"step": step, "pairs": entries}, indent=1, ensure_ascii=False) + "\n")
        return file

    def metrics(self) -> str:
        """metrics.jsonl as it is now."""
        return self.metrics_file.read_text(encoding="utf-8") if self.metrics_file.exists() else ""

    def set_metrics(self, text: str) -> None:
        """metrics.jsonl as it was when the run stood where it continues: lines written since are written again."""
        # Compared as bytes: what a kill has left may be no text.
        if not self.metrics_file.exists() or self.metrics_file.read_bytes() != text.encode():
            write_whole(self.metrics_file, text)

    def write_start(self, facts: Mapping[str, Any]) -> None:
        """Adds a line to starts.jsonl: when and how the run was started or continued, with what versions."""
        about = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", "train", *sys.argv[1:]]),
            "python": sys.version.split()[0],
            "versions": recorded_versions(),
        }
        self.path.mkdir(parents=True, exist_ok=True)
        with self.starts_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(about | dict(facts)) + "\n")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes of this machine from training in the same folder. Raises ValueError if one does."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(f"{self.path}: expected a run that nobody else trains, but a process does") from error
            yield  # the lock ends with the file, and with the process if it is killed


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
