"""What the tests of training runs share: a made-up corpus in files, a tiny run, and one such run that has ended."""

import dataclasses
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from train.checkpoint import Checkpoints
from train.config import (
    BatchConfig,
    CheckpointConfig,
    CorpusConfig,
    EvaluationConfig,
    OptimizerConfig,
    ParallelConfig,
    ReportConfig,
    TokenizerConfig,
    TrainConfig,
)
from train.loop import RunResult, run
from train.parallel import Devices
from train.run_dir import RunDir
from transformer_config import TransformerConfig

GERMAN = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
ENGLISH = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def write_corpus(folder: Path, *, seed: int = 0) -> Path:
    """Numbers in words. One validation pair is longer than any training pair (T5), one has an empty source."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for split, lengths in {"train": rng.integers(1, 5, 48), "val": [2, 3, 9, 0, 1], "test": [1, 2, 3]}.items():
        pairs = [rng.integers(0, 9, length) for length in lengths]
        for language, words in (("de", GERMAN), ("en", ENGLISH)):
            lines = [" ".join(words[i] for i in pair) for pair in pairs]
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def train(config: TrainConfig) -> tuple[RunResult, str]:
    """The result, and what the terminal showed. Programs that an earlier run has compiled here are taken again."""
    console = Console(record=True, width=160, file=io.StringIO())
    with pytest.MonkeyPatch.context() as patch:
        for name in ("compile_train_step", "compile_evaluation_step", "compile_decoding"):
            patch.setattr(Devices, name, _remembering(getattr(Devices, name)))
        return run(config, console=console), console.export_text()


_compiled: dict[Any, Any] = {}


def _remembering(compile_step: Callable[..., Any]) -> Callable[..., Any]:
    def remembered(devices: Devices, config: Any, *others: Any, **options: Any) -> Any:
        facts = config
        if isinstance(config, TrainConfig):
            facts = (config.model, config.optimizer, config.label_smoothing, config.seed)
        where = (str(devices), tuple(devices.devices), devices.micro_batches)
        key = (compile_step.__name__, where, facts, others, tuple(options.items()))
        if key not in _compiled:
            _compiled[key] = compile_step(devices, config, *others, **options)
        return _compiled[key]

    return remembered


def metrics(run_dir: Path, *, timed: bool = False) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, without what depends on the clock."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in record.items() if timed or k != "tokens_per_second"} for record in records]


def bits(tree: Any) -> list:
    """Every array, bit for bit."""
    return [(str(path), x.dtype, x.shape, np.asarray(x).tobytes()) for path, x in jax.tree.leaves_with_path(tree)]


def steps_saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit())


def saved(config: TrainConfig, step: int | None = None) -> tuple:
    """Of a checkpoint, the newest if no other: its step, the step evaluated last, every array bit for bit."""
    config = config.with_vocabulary(RunDir(config.run_dir).tokenizer().size)
    checkpoints = Checkpoints(config.run_dir / "checkpoints", keep=1, read_only=True)
    try:
        step = checkpoints.latest_step() if step is None else step
        assert step is not None
        return step, checkpoints.record(step).evaluated_step, bits(checkpoints.restore(config, step))
    finally:
        checkpoints.close()


COMMAND = """
import json, sys, time
from train import presets
from train.config import TrainConfig

config = TrainConfig.from_dict(json.loads(sys.argv[1]))
presets.PRESETS["tiny"] = lambda: config
from train.__main__ import main
{before}
sys.exit(main(["run", "tiny"]))
"""


def start(config: TrainConfig, log: Path, *, before: str = "") -> subprocess.Popen[bytes]:
    """`python -m train run` with a preset that is `config`, after some Python; what it prints goes into `log`."""
    with log.open("wb") as file:
        command = [sys.executable, "-c", COMMAND.format(before=before), json.dumps(config.to_dict())]
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "NO_COLOR": "1"})


def listing(folder: Path) -> dict[str, str]:
    """Every file under a folder, with a digest of its content; folders too."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="session", autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Programs that are compiled once for all tests here, in this process and in those that tests start."""
    folder = tmp_path_factory.mktemp("programs")
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def corpus_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def tiny_run(corpus_dir: Path, programs: Path) -> Callable[..., TrainConfig]:
    """The config of a run of seconds, with some fields changed: 2 epochs of 5 to 7 steps, saved every 3 steps."""

    def tiny_run(run_dir: Path, **changes: object) -> TrainConfig:
        config = TrainConfig(
            run_dir=run_dir,
            corpus=CorpusConfig(kind="files", path=corpus_dir, test_split="test", cache=corpus_dir.parent / "cache"),
            tokenizer=TokenizerConfig(vocab_size=280),
            model=TransformerConfig.tiny(
                d_model=18,
                d_ff=26,
                num_heads=3,
                num_encoder_layers=1,
                num_decoder_layers=1,
                dropout=0.1,
                tie_embeddings="all",
                tgt_vocab_size=71,
            ),
            batch=BatchConfig(max_tokens=160, num_buckets=1, max_len=30),
            optimizer=OptimizerConfig(warmup_steps=10),
            evaluation=EvaluationConfig(batch_size=4, max_decode_len=8),
            checkpoint=CheckpointConfig(every_steps=3, keep=2),
            epochs=2,
            parallel=ParallelConfig(num_devices=1, compile_cache=programs),
            report=ReportConfig(log_every_steps=1),
        )
        return dataclasses.replace(config, **changes)

    return tiny_run


@dataclasses.dataclass(frozen=True)
class Ended:
    """A run of two epochs that was never stopped. Nobody changes its folder."""

    config: TrainConfig
    result: RunResult
    shown: str

    def copy(self, folder: Path) -> TrainConfig:
        """The same run in another folder, to be continued or spoilt."""
        shutil.copytree(self.config.run_dir, folder, dirs_exist_ok=True)
        config = self.config.replace(run_dir=folder)
        RunDir(folder).write_config(config)
        return config


@pytest.fixture(scope="session")
def whole(tiny_run: Callable[..., TrainConfig], tmp_path_factory: pytest.TempPathFactory) -> Ended:
    config = tiny_run(tmp_path_factory.mktemp("whole"))
    return Ended(config, *train(config))


@pytest.fixture
def folder(whole: Ended, tmp_path: Path) -> Path:
    """The run in a folder that may be written to."""
    whole.copy(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def corpus(corpus_dir: Path, tmp_path: Path) -> Path:
    """The corpus in another folder, with a split more."""
    shutil.copytree(corpus_dir, tmp_path / "elsewhere")
    text = {"de": "zwei\nneun acht sieben\neins zwei drei vier\n", "en": "two\nnine eight seven\none two three four\n"}
    for language, lines in text.items():
        (tmp_path / "elsewhere" / f"extra.{language}").write_text(lines, encoding="utf-8")
    return tmp_path / "elsewhere"
