"""One line in a pytest file: `assert_parity(pair)`."""

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from parity.ladder import NAMES, Report, check
from parity.pair import Pair
from parity.report import terminal

WIDTH = 110


def assert_parity(
    pair: Pair,
    *,
    rungs: Sequence[str] = NAMES,
    require: Sequence[str] = (),
    keep_going: bool = False,
    seed: int = 0,
    golden: Any = None,
) -> Report:
    """Checks the pair, and returns the report if the two are equal.

    `rungs`, `keep_going`, `seed` and `golden` are those of `parity.check`. `require` names rungs that must have been
    compared: a pair that stops bringing its optimizer would otherwise go on passing, one rung shorter.

    Raises AssertionError, whose message is the report as the terminal shows it, if a rung failed, if weights or outputs
    were not compared, or if a required rung was not; ValueError for an unknown rung, and for a required one that
    `rungs` leaves out.
    """
    __tracebackhide__ = True  # pytest shows the caller's line, not this function
    unknown = sorted(set(require) - set(NAMES))
    if unknown:
        raise ValueError(f"require: expected rungs among {', '.join(NAMES)}, got {', '.join(unknown)}")
    left_out = [name for name in require if name not in rungs]
    if left_out:
        raise ValueError(f"expected required rungs to be among `rungs`, got {', '.join(left_out)} left out")
    report = check(pair, keep_going=keep_going, rungs=rungs, seed=seed, golden=golden)
    missing = [report.rung(name) for name in require if not report.rung(name).passed]
    if not report.passed or missing:
        lines = [f"required, but {rung.name} {_why(rung)}" for rung in missing]
        raise AssertionError("\n".join([f"{pair.name}: {terminal.verdict(report)}", *lines, "", as_text(report)]))
    return report


def as_text(report: Report) -> str:
    """The report as the terminal shows it, without colours."""
    out = io.StringIO()
    terminal.show(report, console=Console(file=out, width=WIDTH, no_color=True, force_terminal=False))
    return out.getvalue()


def _why(rung: Any) -> str:
    if rung.status == "failed":
        return "failed"
    return f"was not compared: {rung.skipped or 'a rung before it is broken'}"
