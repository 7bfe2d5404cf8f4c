"""The report in the terminal."""

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from parity.report import show
from parity.report.verdict import coverage, verdict


def shown(report: Any, width: int = 110) -> str:
    out = io.StringIO()
    show(report, console=Console(file=out, width=width))
    return out.getvalue()


def test_every_rung_has_a_row_and_the_last_line_is_the_verdict(equal: Any) -> None:
    lines = shown(equal).splitlines()
    for rung in equal.rungs:
        assert any(line.split()[:1] == [str(rung.number)] for line in lines), rung.number
    assert lines[-1].startswith("The two are equal: 16 of 17 rungs compared, 272 comparisons")


def test_what_was_skipped_is_not_ok_and_says_why(equal: Any) -> None:
    text = shown(equal)
    row = next(line for line in text.splitlines() if line.split()[:1] == ["15"])
    assert "not compared" in row
    assert " ok" not in row
    assert f"15 decoding: {equal.rung('decoding').skipped}" in text


def test_a_difference_is_named_with_its_diagnosis_and_its_place(unequal: Any) -> None:
    text = shown(unequal)
    assert "First module that differs: layers.1.norm" in text
    assert "The port's eps is 1e-6, the reference's 1e-5" in text
    assert "set eps to 1e-5" in text
    assert "norm  Module  first difference  3.0e-07" in text, "the tree marks it"
    assert "3 equal" in text, "and counts what is equal beside it"
    assert "6 forward, float64 modules and results: layers.1.norm 3.0e-07, bound 1.0e-12" in text
    assert text.splitlines()[-1].startswith("The two are NOT EQUAL: 6 of 17 rungs compared")


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_the_terminal(equal: Any, unequal: Any, width: int) -> None:
    for report in (equal, unequal):
        assert max(map(len, shown(report, width).splitlines())) <= width


@pytest.mark.parametrize(
    "fragment", ["GRU bias", "a note", "zero in exact arithmetic", "further runs", "the float32 rule"]
)
def test_what_the_reader_should_know_is_there(equal: Any, fragment: str) -> None:
    assert fragment in shown(equal)


def test_nothing_compared_is_neither_equal_nor_unequal(equal: Any) -> None:
    rungs = tuple(dataclasses.replace(rung, skipped="no port") for rung in equal.rungs)
    nothing = dataclasses.replace(equal, rungs=rungs)
    assert verdict(nothing) == "NOT PROVEN EQUAL"
    assert coverage(nothing).startswith("0 of 17 rungs compared; weights was not: no port; forward was not: no port")
    assert " ok" not in shown(nothing)
