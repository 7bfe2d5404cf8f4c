"""The kill test: a run killed with SIGKILL at random moments in every phase ends as if it had never been killed.

    python benchmarks/kill_test.py --data FOLDER [--kills 20] [--steps 300] [--seed 0] [--json FILE]

FOLDER holds Multi30k. The run is the command line's own, with a small model, evaluations and saves. It is run once
undisturbed. Then it is killed `--kills` times, at least three in each phase (compilation, step, evaluation, save, the
commit of a save), each time started again by the same command; and let go on to its end. Parameters, optimizer state,
the losses of every step and the pairs of every batch must be identical to the last bit. Exit status 1 if not.

The moment of a kill is drawn: a phase, how often it has to be entered, and how long after that. What is logged is the
phase in which the run was when the signal was sent.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

PHASES = ("compilation", "step", "evaluation", "save", "commit")
LONGEST_WAIT = {"compilation": 3.0, "step": 0.1, "evaluation": 0.6, "save": 0.01, "commit": 0.002}
"""Seconds, at most, between entering a phase and the kill: about as long as a phase lasts."""
MOST_ENTRIES = {"compilation": 1, "step": 30, "evaluation": 1, "save": 2, "commit": 2}
"""A phase is left alone up to so many times before the kill."""


def command(run: Path, arguments: argparse.Namespace) -> list[str]:
    """The same for every start."""
    given = {
        "run-dir": run,
        "corpus.path": arguments.data,
        "corpus.cache": run.parent / "cache",
        "parallel.compile-cache": run.parent / "cache" / "xla",
        "parallel.num-devices": 1,
        "max-steps": arguments.steps,
        "report.log-every-steps": 1,
        "evaluation.every-steps": 40,
        "evaluation.max-decode-len": 8,
        "checkpoint.every-steps": 15,
        "tokenizer.vocab-size": 1000,
        "batch.max-tokens": 600,
        "batch.num-buckets": 3,
        "model.d-model": 64,
        "model.d-ff": 128,
        "model.num-heads": 4,
        "model.num-encoder-layers": 1,
        "model.num-decoder-layers": 1,
    }
    return ["run", "multi30k-de-en", *(part for name, value in given.items() for part in (f"--{name}", str(value)))]


# The child: the command line, watched.


class Watch:
    """Knows the phase, writes down batches, and kills its process when it is told to."""

    def __init__(self, plan: dict[str, Any], log: Path):
        self.plan, self.log = plan, log
        self.phases = ["step"]
        """Of the main thread; commits happen in another, beside it."""
        self.commits = 0
        self.entered: Counter[str] = Counter()

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Enters `phase` whenever the method is called."""
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase)
            try:
                return original(*args, **kwargs)
            finally:
                self.phases.pop()

        setattr(owner, name, watched)

    def enter(self, phase: str) -> None:
        """May set off the timer."""
        if phase == "commit":
            self.commits += 1
        else:
            self.phases.append(phase)
        self.entered[phase] += 1
        if self.plan.get("phase") == phase and self.entered[phase] == self.plan["entries"]:
            threading.Timer(self.plan["wait"], self.kill).start()

    def kill(self) -> None:
        """Writes down where the run is, and ends it."""
        file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{'commit' if self.commits else self.phases[-1]}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)


def child(plan: dict[str, Any], log: Path, batches: Path, arguments: list[str]) -> int:
    """Runs the command line with everything watched."""
    from orbax.checkpoint._src.path import atomicity

    import train.__main__
    from train.checkpoint import Checkpoints
    from train.loop import Trainer

    watch = Watch(plan, log)
    watch.wrap(Trainer, "compile", "compilation")
    watch.wrap(Trainer, "_evaluate", "evaluation")
    watch.wrap(Checkpoints, "save", "save")
    take, finalize = Trainer._take, atomicity.AtomicRenameTemporaryPath.finalize

    def taken(self: Any, made: Any, progress: Any) -> None:
        watch.enter("step")
        epoch, i = divmod(made.number, self.steps_per_epoch)
        digest = hashlib.sha256(self.data.epoch(epoch).pairs(i).tobytes()).hexdigest()[:16]
        with batches.open("a") as file:
            file.write(f"{made.number} {digest}\n")
        take(self, made, progress)
        watch.phases.pop()

    async def committed(self: Any, *args: Any, **kwargs: Any) -> None:
        watch.enter("commit")
        await finalize(self, *args, **kwargs)
        watch.commits -= 1

    Trainer._take = taken  # type: ignore[method-assign]
    atomicity.AtomicRenameTemporaryPath.finalize = committed
    return train.__main__.main(arguments)


# The parent.


def start(run: Path, arguments: argparse.Namespace, plan: dict[str, Any]) -> int:
    """One start of the run; its exit status."""
    files = [str(run.parent / f"{run.name}.{name}") for name in ("kills", "batches")]
    with (run.parent / f"{run.name}.log").open("a") as log:
        return subprocess.run(
            [sys.executable, __file__, "--child", json.dumps(plan), *files, *command(run, arguments)],
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


def kill_often(run: Path, arguments: argparse.Namespace) -> tuple[Counter[str], int]:
    """Kills, by the phase in which they fell, and starts that came to their end before they were killed."""
    rng, early = random.Random(arguments.seed), 0
    log = run.parent / f"{run.name}.kills"
    while len(kills := log.read_text().split() if log.exists() else []) < arguments.kills:
        counted = Counter(kills)
        rare = [phase for phase in PHASES if counted[phase] < 3]
        phase = rng.choice(rare or PHASES)
        plan = {
            "phase": phase,
            "entries": rng.randint(1, MOST_ENTRIES[phase]),
            "wait": rng.uniform(0.0, LONGEST_WAIT[phase]),
        }
        status = start(run, arguments, plan)
        if status == 0:
            early += 1
            if early > 3:
                raise SystemExit(f"the run ended after {len(kills)} kills: more steps are needed")
        elif status != -signal.SIGKILL:
            raise SystemExit(f"the run failed with status {status}: see {run.parent}/{run.name}.log")
    return Counter(log.read_text().split()), early


def differences(whole: Path, killed: Path) -> list[str]:
    """What of the two runs is not the same."""
    from train.checkpoint import Checkpoints
    from train.run_dir import RunDir

    found = []
    config = RunDir(whole).read_config()
    config = config.with_vocabulary(RunDir(whole).tokenizer().size)
    states = []
    for run in (whole, killed):
        checkpoints = Checkpoints(RunDir(run).checkpoints, keep=1, read_only=True)
        step = checkpoints.latest_step()
        states.append(checkpoints.restore(config, step if step is not None else -1))
        checkpoints.close()
    import jax

    for (path, ours), theirs in zip(jax.tree.leaves_with_path(states[0]), jax.tree.leaves(states[1]), strict=True):
        if ours.tobytes() != theirs.tobytes():
            found.append(f"state{jax.tree_util.keystr(path)}")
    metrics = [
        [
            {name: value for name, value in json.loads(line).items() if name != "tokens_per_second"}
            for line in RunDir(run).metrics().splitlines()
        ]
        for run in (whole, killed)
    ]
    if metrics[0] != metrics[1]:
        found.append("metrics.jsonl")
    lines = [(run.parent / f"{run.name}.batches").read_text().splitlines() for run in (whole, killed)]
    taken = [dict(line.split() for line in every) for every in lines]  # type: ignore[misc]
    if taken[0] != taken[1] or {len(set(lines[1])), len(lines[0])} != {len(lines[0])}:
        found.append("pairs of the batches")
    return found


def main() -> int:
    """Runs, kills, compares."""
    if sys.argv[1:2] == ["--child"]:
        plan, kills, batches, *rest = sys.argv[2:]
        return child(json.loads(plan), Path(kills), Path(batches), rest)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.data = arguments.data.resolve()
    folder = Path(tempfile.mkdtemp(prefix="kill-test-"))
    started = time.perf_counter()
    whole, killed = folder / "whole", folder / "killed"
    if start(whole, arguments, {}) != 0:
        raise SystemExit(f"the undisturbed run failed: see {folder}/whole.log")
    by_phase, early = kill_often(killed, arguments)
    if start(killed, arguments, {}) != 0:
        raise SystemExit(f"the killed run could not be ended: see {folder}/killed.log")
    different = differences(whole, killed)
    figures = {
        "kills": sum(by_phase.values()),
        "by phase": {phase: by_phase[phase] for phase in PHASES},
        "starts that ended before their kill": early,
        "steps": arguments.steps,
        "steps taken, repeated ones too": len((folder / "killed.batches").read_text().splitlines()),
        "different": different,
        "seconds": round(time.perf_counter() - started),
    }
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if different or any(by_phase[phase] < 3 for phase in PHASES) else 0


if __name__ == "__main__":
    sys.exit(main())
