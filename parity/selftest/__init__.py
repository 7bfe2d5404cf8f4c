"""Proof that the harness can fail, and does not where nothing is wrong: `python -m parity selftest`.

Known porting faults are planted (parity/mutations) and must be detected, located and named; the port's source is
changed blindly, and each change must be noticed or be no change; and pairs in which nothing is wrong must pass. All
three go through `parity.ladder.check`, all rungs, as a user's pair does.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from parity.selftest.outcome import Outcome

BLIND, BLIND_QUICKLY, CLEAN, CLEAN_QUICKLY = 205, 20, 200, 8
"""How many mutations and clean pairs, in full and with --quick."""


def run(*, quick: bool, json_file: Path | None, markdown: Path | None, seed: int, workers: int) -> int:
    """The selftest. Returns the exit status: 0 if every goal is met, 1 if not.

    Raises ValueError for fewer than one worker, RuntimeError if the code as it is does not run.
    """
    if workers < 1:
        raise ValueError(f"--workers: expected at least 1, got {workers}")
    for file in (json_file, markdown):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    from parity.selftest import pool

    with tempfile.TemporaryDirectory(prefix="parity-selftest-") as cache:
        pool.prepare(Path(cache))  # before anything imports jax
        from rich.console import Console

        from parity.selftest import terminal

        console = Console(width=None if sys.stdout.isatty() else 140)
        outcome = measure(quick=quick, seed=seed, workers=workers, console=console)
    terminal.show(outcome, console=console)
    if json_file is not None:
        json_file.write_text(json.dumps(outcome.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        console.print(f"Written to {json_file}.")
    if markdown is not None:
        from parity.selftest.page import page

        markdown.write_text(page(outcome.to_json()), encoding="utf-8")
        console.print(f"Written to {markdown}.")
    return 0 if outcome.passed else 1


def measure(*, quick: bool, seed: int, workers: int, console: "Console") -> "Outcome":
    """Plants, mutates and checks clean pairs."""
    from parity.mutations import syntax
    from parity.selftest import blind, clean, planted
    from parity.selftest.outcome import Outcome
    from parity.selftest.terminal import progressing

    started = time.perf_counter()
    with progressing(console, "Known faults", len(planted.kinds_to_plant(quick=quick, seed=seed))) as advance:
        faults = planted.plant(
            quick=quick,
            seed=seed,
            workers=workers,
            progress=lambda p: advance(p.as_wanted, str(p)),
        )
    survey = blind.survey(workers=workers, names=blind.QUICK_VARIANTS if quick else tuple(blind.VARIANTS))
    reached, unreached = blind.candidates(survey)
    chosen = syntax.sample(reached, BLIND_QUICKLY if quick else BLIND, seed=seed)
    with progressing(console, "Blind mutations", len(chosen)) as advance:
        mutants = blind.check(
            chosen,
            survey,
            workers=workers,
            progress=lambda m: advance(m.explained, f"survived: {m.mutation}"),
        )
    count = CLEAN_QUICKLY if quick else CLEAN
    with progressing(console, "Clean pairs", count) as advance:
        pairs = clean.check(
            count,
            seed=seed,
            workers=workers,
            progress=lambda c: advance(c.passed, f"false alarm, seed {c.seed}: {'; '.join(c.failures)}"),
        )
    return Outcome(
        quick=quick,
        seed=seed,
        workers=workers,
        planted=[fault for fault in faults if not planted.kind_named(fault.kind).beyond],
        beyond=[fault for fault in faults if planted.kind_named(fault.kind).beyond],
        mutants=mutants,
        unreached=unreached,
        candidates=len(reached),
        clean=pairs,
        seconds=time.perf_counter() - started,
    )
