"""The selftest in a terminal: progress while it runs, tables when it is done."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from parity.mutations import KINDS
from parity.selftest.outcome import LEGEND, PLACES, Outcome, rows

EVERY = 60.0
"""Seconds between two lines in a log file, where no bar can move."""


@contextmanager
def progressing(console: Console, title: str, total: int) -> Iterator[Callable[[bool, str], None]]:
    """A bar; call what it gives with (was it as it should be, what it was) for everything that is done."""
    started = last = time.monotonic()
    done = wrong = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)

        def advance(good: bool, what: str) -> None:
            nonlocal done, wrong, last
            done, wrong = done + 1, wrong + (not good)
            progress.advance(task)
            if not good:
                progress.console.print(f"  {title}: {what}", style="yellow", highlight=False, markup=False)
            if not console.is_terminal and time.monotonic() - last > EVERY:
                last = time.monotonic()
                console.print(f"  {title}: {done} of {total} after {last - started:.0f} s", highlight=False)

        yield advance
    console.print(f"{title}: {done}, {wrong} to look at, {time.monotonic() - started:.0f} s", highlight=False)


def show(outcome: Outcome, *, console: Console) -> None:
    """The matrix of kinds and places, what survived, and the goals."""
    matrix = Table("fault", "case", *PLACES, "rung", title=LEGEND, title_justify="left", expand=False)
    for name, cases, marks, rungs in rows(outcome.planted):
        matrix.add_row(name, cases, *marks, rungs)
    console.print(matrix)
    for beyond in outcome.beyond:
        reason = next(kind.beyond for kind in KINDS if kind.name == beyond.kind)
        seen = "detected" if beyond.detected else "not detected"
        line = f"Planted and not counted: {beyond.kind} at {beyond.place}, {seen}: {reason}"
        console.print(line, highlight=False, markup=False)
    _survivors(outcome, console)
    for clean in outcome.clean:
        for failure in () if clean.passed else clean.failures:
            console.print(
                f"False alarm, clean pair {clean.seed}: {failure}", style="red", highlight=False, markup=False
            )
    goals = Table("goal", "found", "met")
    for goal in outcome.goals():
        goals.add_row(goal.what, goal.got, "yes" if goal.met else "NO", style=None if goal.met else "red")
    console.print(goals)


def _survivors(outcome: Outcome, console: Console) -> None:
    table = Table("blind mutation that survived", "why", title="Survivors", title_justify="left")
    for mutant in outcome.survivors:
        table.add_row(str(mutant.mutation), mutant.argument or "UNEXPLAINED", style=None if mutant.argument else "red")
    if outcome.survivors:
        console.print(table)
    if outcome.unreached:
        functions = dict.fromkeys(f"{m.file} {m.function}" for m in outcome.unreached)
        console.print(
            f"Not chosen from: {len(outcome.unreached)} mutations of code that no check executes, in "
            f"{', '.join(functions)}",
            highlight=False,
            markup=False,
        )
