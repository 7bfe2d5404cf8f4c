"""A checkpoint of a billion parameters in shards, converted to shards and back: memory, and seconds beside a copy's.

    python benchmarks/large_checkpoint.py [--layers 19] [--rounds 3] [--folder FOLDER] [--json FILE]

Makes up a Marian checkpoint (19+19 layers, d_model 1024, d_ff 8192, a vocabulary of 128,000: 1.01 billion float32
numbers, 4 GB in shards of half a gigabyte) in a new folder inside of FOLDER, which then goes again, and runs the
command line on it without the proof: to the Flax twin's layout, in which every matrix of a layer is the other way
round, and back. Hashes of tensors are checked and written. A copy reads and writes the same files, and waits for the
disk as the conversion does.

Memory is anonymous and shared memory of the process (RssAnon and RssShmem of /proc/PID/status), at its highest of ten
looks a second; "above the start" is above that of the same command on a checkpoint of a few kilobytes. Seconds are
those of the whole command, start-up included, in turns with copies; of a busy machine its seconds of CPU say more.
"""

import argparse
import dataclasses
import json
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from large_corpus import watched
from safetensors import safe_open

from parity.weights.foreign import Model
from parity.weights.formats import FORMATS, Fields, marian
from parity.weights.hashes import BESIDE, HASHES
from parity.weights.models import write_model
from parity.weights.problems import TensorSpec
from parity.weights.twins import reference_shapes
from transformer_config import TransformerConfig

WAYS = {"marian to flax": "flax", "flax to marian": "marian"}


class MadeUp(Mapping[str, np.ndarray]):
    """A tensor of random numbers for each name of the torch reference, made when it is asked for."""

    def __init__(self, config: TransformerConfig) -> None:
        self._shapes = reference_shapes(config)
        # A prime number of them: where they start over, no row is another one's repetition.
        self._numbers = np.random.default_rng(0).random(4_000_037, np.float32) - np.float32(0.5)
        self._starts = {name: 7919 * number for number, name in enumerate(self._shapes)}

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(self._shapes[name], np.dtype(np.float32))

    def __getitem__(self, name: str) -> np.ndarray:
        return np.resize(np.roll(self._numbers, -self._starts[name]), self._shapes[name])

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def make(folder: Path, *, layers: int, d_model: int, vocab_size: int, shard: int) -> int:
    """Writes the checkpoint; returns its parameters."""
    values = {
        **marian.DEFAULTS,
        "model_type": "marian",
        "d_model": d_model,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_ffn_dim": 8 * d_model,
        "decoder_ffn_dim": 8 * d_model,
        "vocab_size": vocab_size,
        "pad_token_id": vocab_size - 1,
        "decoder_start_token_id": vocab_size - 1,
    }
    config = FORMATS["marian"].read(Fields(values, file="the benchmark's config"))
    weights = MadeUp(config)
    model = Model(format_=FORMATS["torch-reference"], config=config, weights=weights, stored=weights)
    write_model(model, folder, "marian", source=folder, sinusoids=_no_sinusoids, max_shard_bytes=shard)
    return sum(int(np.prod(weights.spec(name).shape)) for name in weights)


def _no_sinusoids(config: TransformerConfig, length: int) -> np.ndarray:
    raise AssertionError("Marian's table is one of its tensors")


@dataclasses.dataclass(frozen=True)
class Taken:
    seconds: float
    cpu_seconds: float
    memory: int = 0


def convert(source: Path, target: Path, format_name: str, *, shard: int) -> Taken:
    """What the command takes. Raises RuntimeError with what it says if it fails."""
    command = [sys.executable, "-m", "parity", "convert", str(source), str(target), "--to", format_name, "--no-verify"]
    log = target.with_suffix(".log")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    status, seconds, most = watched([*command, "--max-shard-bytes", str(shard)], log)
    if status:
        raise RuntimeError(log.read_text(encoding="utf-8"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Taken(seconds, cpu, most)


def copy(source: Path, target: Path) -> Taken:
    """What it takes to copy all files and to wait until they are on the disk."""
    started, cpu = time.perf_counter(), time.process_time()
    target.mkdir()
    for file in sorted(source.iterdir()):
        shutil.copyfile(file, target / file.name)
        with (target / file.name).open("rb") as opened:
            os.fsync(opened.fileno())
    return Taken(time.perf_counter() - started, time.process_time() - cpu)


def hashes(folder: Path) -> dict[str, str]:
    """Of every tensor, as the files note them."""
    every: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            every |= json.loads(opened.metadata()[HASHES])
    every.pop(BESIDE, None)  # of each file's header, and shards are cut elsewhere on the way back
    return every


def measure(work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    small, shard = {"layers": 1, "d_model": 16, "vocab_size": 20}, arguments.shard_bytes
    make(work / "small", **small, shard=shard)
    parameters = make(
        work / "marian", layers=arguments.layers, d_model=1024, vocab_size=arguments.vocab_size, shard=shard
    )
    nbytes = sum(file.stat().st_size for file in (work / "marian").iterdir())
    places = {"marian to flax": ("marian", "flax"), "flax to marian": ("flax", "back")}
    starts: dict[str, Taken] = {}
    for way, (source, target) in places.items():
        first = work / ("small" if source == "marian" else f"small-{source}")
        starts[way] = convert(first, work / f"small-{target}", WAYS[way], shard=shard)
    taken: dict[str, list[Taken]] = {"copy": [], **{way: [] for way in WAYS}}
    same = True
    for _ in range(arguments.rounds):
        taken["copy"].append(copy(work / "marian", work / "copied"))
        shutil.rmtree(work / "copied")
        for way, (source, target) in places.items():
            taken[way].append(convert(work / source, work / target, WAYS[way], shard=shard))
        same = same and hashes(work / "back") == hashes(work / "marian")
        shutil.rmtree(work / "flax")
        shutil.rmtree(work / "back")
        print({name: round(each[-1].seconds, 1) for name, each in taken.items()}, flush=True)
    most = {way: max(each.memory for each in taken[way]) for way in WAYS}
    copying = [each.seconds for each in taken["copy"]]
    return {
        "parameters": parameters,
        "bytes": nbytes,
        "files": len(list((work / "marian").glob("*.safetensors"))),
        "there and back: the same bits": same,
        "seconds": {name: [round(one.seconds, 1) for one in each] for name, each in taken.items()},
        "of them before the first tensor": {way: round(start.seconds, 1) for way, start in starts.items()},
        "CPU seconds": {name: [round(one.cpu_seconds, 1) for one in each] for name, each in taken.items()},
        "copy, GB/s": round(nbytes / statistics.median(copying) / 1e9, 2),
        "rate over the copy's": {
            way: round(statistics.median(a / b.seconds for a, b in zip(copying, taken[way], strict=True)), 2)
            for way in WAYS
        },
        "most memory, MiB": {way: most[way] >> 20 for way in WAYS},
        "most memory above the start, MiB": {way: (most[way] - starts[way].memory) >> 20 for way in WAYS},
        "cpus": os.cpu_count(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
    }


def main() -> None:
    """Makes, measures, prints, writes; exit status 1 if the bits are not the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=19, help="of each stack")
    parser.add_argument("--vocab-size", type=int, default=128_000)
    parser.add_argument("--shard-bytes", type=int, default=500_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="large-checkpoint-", dir=arguments.folder) as folder:
        figures = measure(Path(folder), arguments)
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    raise SystemExit(0 if figures["there and back: the same bits"] else 1)


if __name__ == "__main__":
    main()
