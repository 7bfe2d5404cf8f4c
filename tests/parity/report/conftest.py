"""Two reports made by hand: one of a pair that is equal, one of a port whose second norm has another eps."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from parity import ladder
from parity.compare import Comparison, Identical
from parity.diagnose.diagnosis import Diagnosis
from parity.locate import Location
from parity.pair import KnownDifference
from parity.rungs import Outcome, Rung, Section
from parity.tree import Node, Status

MODULES = (
    "embed",
    "layers.0.attention",
    "layers.0.norm",
    "layers.0",
    "layers.1.attention",
    "layers.1.norm",
    "layers.1",
)
SKIPPED = 'the pair brings no <decoder> & no "scores"'


DIAGNOSIS = Diagnosis(
    kind="eps",
    module="layers.1.norm",
    sentence="The port's eps is 1e-6, the reference's 1e-5",
    fix="set eps to 1e-5",
    alternatives=("fast variance",),
)


def _section(title: str, precision: str, comparisons: list[Comparison]) -> Section:
    return Section(title=title, precision=precision, rule=f"the {precision} rule", comparisons=tuple(comparisons))


def _compared(name: str, *, differs: bool) -> Outcome:
    exact = [
        Comparison(tensor=m, error=3e-7 if differs and i >= 5 else i * 1e-16, bound=1e-12)
        for i, m in enumerate((*MODULES, "output"))
    ]
    narrow = [Comparison(tensor=m, error=2e-7, bound=9.5e-7, reference=1.9e-7) for m in (*MODULES, "output")]
    narrow.append(Comparison(tensor="all of them, pooled", error=2e-7, bound=4e-7, reference=2e-7))
    title = "gradients" if name == "gradients" else "modules and results"
    sections = [_section(title, "float64", exact)]
    if not differs:
        sections.append(_section(title, "float32", narrow))
    return Outcome(sections=tuple(sections), notes=("a note",) if name == "forward" else ())


def _rung(number: int, name: str, title: str, *, differs: bool) -> Rung:
    rung = Rung(number=number, name=name, title=title, outcome=Outcome(sections=()), seconds=0.5)
    if name == "decoding" and not differs:
        return dataclasses.replace(rung, skipped=SKIPPED)
    if differs and number > 6:
        return dataclasses.replace(rung, reached=False)
    return dataclasses.replace(rung, outcome=_compared(name, differs=differs and number == 6))


def made(*, differs: bool) -> Any:
    return ladder.Report(
        name="toy <b>&",
        rungs=tuple(_rung(n, name, title, differs=differs) for n, (name, _, title) in enumerate(ladder.RUNGS, start=1)),
        first_difference=Location(module="layers.1.norm", error=3e-7) if differs else None,
        diagnosis=DIAGNOSIS if differs else None,
        known=(KnownDifference(tensors=("rnn.bias",), kind="GRU bias", reason="No place.", holds="the rest"),),
        results_identical=Identical(count=21, unequal=int(differs), max_units=int(differs)),
        gradients_identical=Identical(count=98, unequal=0, max_units=0),
        zero_gradients=("layers.0.attention.k.bias",),
        redrawn=("layers.1.norm",),
        num_parameters=12345,
        tree=tuple(_tree(differs=differs)),
        seconds=2.5,
    )


def _tree(*, differs: bool) -> Iterator[Node]:
    yield Node(path="", depth=0, type="Toy", status="differs" if differs else "equal", error=3e-7 if differs else 0.0)
    for path in ("embed", "layers", "layers.0", "layers.0.attention", "layers.0.norm", "layers.1", "layers.1.norm"):
        status: Status = "not compared" if path == "layers" else "equal"
        if differs and path.startswith("layers.1"):
            status = "first difference" if path == "layers.1.norm" else "differs"
        error = {"equal": 1e-16, "not compared": None}.get(status, 3e-7)
        yield Node(path=path, depth=path.count(".") + 1, type="Module", status=status, error=error)


@pytest.fixture(scope="package")
def equal() -> Any:
    return made(differs=False)


@pytest.fixture(scope="package")
def unequal() -> Any:
    return made(differs=True)
