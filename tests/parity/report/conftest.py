"""Two reports made by hand: one of a pair that is equal, one of a port whose second norm has another eps."""

import dataclasses
from typing import Any

import pytest

from parity import ladder
from parity.compare import Comparison, Identical
from parity.locate import Location
from parity.pair import KnownDifference
from parity.rungs import Outcome, Rung, Section

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


@dataclasses.dataclass(frozen=True)
class Node:
    path: str
    depth: int
    type: str
    status: str
    error: float | None


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    kind: str = "eps"
    module: str = "layers.1.norm"
    sentence: str = "The port's eps is 1e-6, the reference's 1e-5"
    fix: str = "set eps to 1e-5"
    alternatives: tuple[str, ...] = ("fast variance",)

    def __str__(self) -> str:
        return f"{self.sentence}; fix: {self.fix}."


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
    report = ladder.Report(
        name="toy <b>&",
        rungs=tuple(_rung(n, name, title, differs=differs) for n, (name, _, title) in enumerate(ladder.RUNGS, start=1)),
        first_difference=Location(module="layers.1.norm", error=3e-7) if differs else None,
        diagnosis=Diagnosis() if differs else None,
        known=(KnownDifference(tensors=("rnn.bias",), kind="GRU bias", reason="No place.", holds="the rest"),),
        results_identical=Identical(count=21, unequal=int(differs), max_units=int(differs)),
        gradients_identical=Identical(count=98, unequal=0, max_units=0),
        zero_gradients=("layers.0.attention.k.bias",),
        redrawn=("layers.1.norm",),
        num_parameters=12345,
        seconds=2.5,
    )
    nodes = [Node("", 0, "Toy", "differs" if differs else "equal", 3e-7 if differs else 0.0)]
    for path in ("embed", "layers", "layers.0", "layers.0.attention", "layers.0.norm", "layers.1", "layers.1.norm"):
        status = {"layers.1.norm": "first", "layers": "differs", "layers.1": "differs"}.get(path) if differs else None
        nodes.append(Node(path, path.count(".") + 1, "Module", status or "equal", 3e-7 if status else None))
    object.__setattr__(report, "tree", tuple(nodes))
    return report


@pytest.fixture(scope="package")
def equal() -> Any:
    return made(differs=False)


@pytest.fixture(scope="package")
def unequal() -> Any:
    return made(differs=True)
