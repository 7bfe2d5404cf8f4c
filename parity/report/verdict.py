"""The verdict of a report, in words."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from parity.ladder import Report

Verdict = Literal["equal", "NOT EQUAL", "NOT PROVEN EQUAL"]

PROOF = ("weights", "forward")
"""Rungs without which the others would prove nothing (see ladder.Report.passed)."""


def verdict(report: "Report") -> Verdict:
    """`NOT PROVEN EQUAL` is no pass: nothing was found to differ, but weights or outputs were not compared."""
    if report.passed:
        return "equal"
    return "NOT EQUAL" if report.failed else "NOT PROVEN EQUAL"


def coverage(report: "Report") -> str:
    """How many of the rungs were compared, and which of the indispensable ones were not."""
    compared = [rung for rung in report.rungs if rung.status in ("passed", "failed")]
    line = f"{len(compared)} of {len(report.rungs)} rungs compared"
    missing = [rung for rung in report.rungs if rung.name in PROOF and rung.status in ("skipped", "not reached")]
    if missing and not report.failed:
        line += "".join(f"; {rung.name} was not: {rung.skipped or 'not reached'}" for rung in missing)
    return line
