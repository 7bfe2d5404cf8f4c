"""A corpus of millions of pairs: memory of all processes, and seconds, until the first step has been taken.

    python benchmarks/large_corpus.py [--pairs 5000000] [--folder FOLDER] [--json FILE]

Writes made-up text (words of a Zipf distribution, lengths log-normal around 20) into FOLDER unless it is there, and
runs the command line on it for one step, with nothing cached. Memory is that of the process and its children without
the pages of mapped files, which the kernel can take back at any time (RssAnon and RssShmem of /proc/PID/status), at
its highest of ten looks a second. Then plans an epoch from the files that the run has made.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

WORDS = 60_000
AT_ONCE = 50_000
HELD_OUT = 20


def write(folder: Path, pairs: int) -> None:
    """`train.de`, `train.en` and small held-out splits."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    for language in ("de", "en"):
        words = np.array(["".join(rng.choice(letters, rng.integers(2, 11))) for _ in range(WORDS)])
        share = 1.0 / np.arange(1, WORDS + 1)
        cumulated = np.cumsum(share / share.sum())
        for split, number in (("train", pairs), ("val", HELD_OUT), ("test", HELD_OUT)):
            lengths = np.random.default_rng([1, len(split)])  # the same for both languages, nearly
            with (folder / f"{split}.{language}").open("w", encoding="utf-8") as file:
                for start in range(0, number, AT_ONCE):
                    sizes = np.clip(lengths.lognormal(3.0, 0.5, min(AT_ONCE, number - start)), 1, 90).astype(int)
                    chosen = words[np.searchsorted(cumulated, rng.random(sizes.sum()))]
                    ends = np.cumsum(sizes)
                    lines = (" ".join(chosen[end - size : end]) for size, end in zip(sizes, ends, strict=True))
                    file.write("\n".join(lines) + "\n")


def resident(process: int) -> int:
    """Bytes of anonymous and shared memory of a process and its descendants."""
    total, waiting = 0, [process]
    while waiting:
        one = waiting.pop()
        try:
            status = Path(f"/proc/{one}/status").read_text(encoding="utf-8")
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting += map(int, (task / "children").read_text(encoding="utf-8").split())
        except OSError:
            continue  # it has ended
        fields = dict(line.split(":", 1) for line in status.splitlines())
        total += sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem") if name in fields)
    return total


def watched(command: list[str], log: Path) -> tuple[int, float, int]:
    """Exit status, seconds, and the most memory there was."""
    most = 0
    started = time.perf_counter()
    with log.open("w", encoding="utf-8") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        ended = threading.Event()

        def look() -> None:
            nonlocal most
            while not ended.wait(0.1):
                most = max(most, resident(process.pid))

        looking = threading.Thread(target=look)
        looking.start()
        process.wait()
        ended.set()
        looking.join()
    return process.returncode, time.perf_counter() - started, most


def plan(cache: Path) -> dict[str, float]:
    """Seconds of planning an epoch, in buckets and packed."""
    from train.batching import drop_long, epoch_batches, plan_buckets
    from train.packing import packed_epoch, plan_packing
    from train.presets import PRESETS
    from train.sentences import read_encoded

    (folder,) = (entry for entry in cache.iterdir() if (entry / "facts.json").exists())
    config = PRESETS["multi30k-de-en"]().batch
    encoded, _ = drop_long(read_encoded(folder), max_len=config.max_len)
    seconds = {}
    started = time.perf_counter()
    buckets = plan_buckets(encoded, config=config)
    shapes = time.perf_counter()
    batches = epoch_batches(encoded, buckets, seed=0, epoch=1)
    seconds["shapes of buckets"] = shapes - started
    seconds["an epoch in buckets"] = time.perf_counter() - shapes
    started = time.perf_counter()
    packing = plan_packing(encoded, config=config)
    rows = time.perf_counter()
    packed = packed_epoch(encoded, packing, seed=0, epoch=1)
    seconds["rows of packing"] = rows - started
    seconds["an epoch packed"] = time.perf_counter() - rows
    print(f"batches: {len(batches):,} in buckets ({batches.padding_efficiency:.1%}), {len(packed):,} packed")
    return {name: round(value, 2) for name, value in seconds.items()}


def main() -> int:
    """Writes, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--pairs", type=int, default=5_000_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="large-corpus-"))
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "train.en").exists():
        write(folder, arguments.pairs)
    work = Path(tempfile.mkdtemp(prefix="large-corpus-run-"))
    options = {
        "run-dir": work / "run",
        "corpus.path": folder,
        "corpus.cache": work / "cache",
        "corpus.test-split": "test",
        "parallel.compile-cache": work / "xla",
        "max-steps": 1,
        "evaluation.max-decode-len": 4,
        "evaluation.batch-size": 4,
    }
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    log = work / "log"
    status, seconds, most = watched([sys.executable, "-m", "train", "run", "multi30k-de-en", *given], log)
    print(log.read_text(encoding="utf-8"))
    figures = {
        "pairs": arguments.pairs,
        "bytes of text": sum((folder / f"train.{language}").stat().st_size for language in ("de", "en")),
        "exit status": status,
        "seconds to the end of a run of one step": round(seconds),
        "most resident memory, GiB": round(most / 2**30, 2),
        "planning, seconds": plan(work / "cache") if status == 0 else {},
        "planning, peak resident GiB, mapped pages too": round(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2
        ),
        "cpus": os.cpu_count(),
    }
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
