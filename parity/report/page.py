"""One HTML page that opens offline: style, charts and text in a single file, nothing fetched, no script."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from parity.report import charts, series
from parity.report.series import number

Document = Mapping[str, Any]

DIFFERENT = ("first difference", "differs")
"""Statuses of modules that the reader looks for."""
STATUS_WORDS = {"passed": "ok", "failed": "fail", "skipped": "not compared", "not reached": "not reached"}


@dataclasses.dataclass(kw_only=True)
class Branch:
    """A module of the tree, and those that stand in it."""

    name: str
    path: str
    type: str
    status: str
    error: float | None
    branches: list["Branch"] = dataclasses.field(default_factory=list)

    @property
    def differs(self) -> bool:
        """Here or anywhere below: then it is shown opened."""
        return self.status in DIFFERENT or any(branch.differs for branch in self.branches)


def to_html(document: Document) -> str:
    """The page. `document` is what document.to_json returns; whatever it holds is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("parity.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"figure": figure, "thousands": "{:,}".format}
    outputs, gradients = series.outputs(document), series.gradients(document)
    scale = charts.Scale.of(gradients)
    first = document["first_difference"]
    return environment.get_template("page.html.jinja").render(
        report=document,
        status_words=STATUS_WORDS,
        tiles=_tiles(document, outputs),
        depth=charts.depth_chart(outputs, first=first["module"] if first else "") if outputs else None,
        output_series=_drawn(outputs),
        gradient_series=_drawn(gradients),
        gradients=[(point, charts.gradient_row(point, scale)) for point in gradients],
        gradient_axis=charts.gradient_axis(scale),
        first_failed=next((rung["number"] for rung in document["rungs"] if rung["status"] == "failed"), None),
        meters={rung["number"]: _meter(rung) for rung in document["rungs"]},
        tree=_tree(document["tree"]),
        notes=[(rung, note) for rung in document["rungs"] for note in rung["notes"]],
        not_compared=[rung for rung in document["rungs"] if rung["status"] in ("skipped", "not reached")],
        environment=_environment(document["environment"]),
    )


def figure(value: float | str | None) -> str:
    """1.2e-07; a dash where there is none; 0 is exactly 0."""
    if value is None:
        return "–"
    return "0" if value == 0 else f"{number(value):.1e}"


def _drawn(points: Sequence[series.Point]) -> list[charts.Series]:
    """What a legend needs to tell: float32 is not compared where float64 differs."""
    return [kind for kind in charts.SERIES if any(kind.value(point) is not None for point in points)]


def _tiles(document: Document, outputs: Sequence[series.Point]) -> list[tuple[str, str]]:
    """A few figures and what they are."""
    rungs = document["rungs"]
    compared = sum(rung["status"] in ("passed", "failed") for rung in rungs)
    tiles = [
        (f"{compared} of {len(rungs)}", "rungs compared"),
        (f"{sum(rung['compared'] for rung in rungs):,}", "comparisons"),
        (f"{document['num_parameters']:,}", "parameters"),
    ]
    exact = [point.exact for point in outputs if point.exact is not None]
    if exact:
        tiles.append((figure(max(exact)), "largest float64 difference of a module"))
    both = [(point.port, point.reference) for point in outputs if point.port is not None and point.reference]
    if both:
        ours, theirs = (math.sqrt(sum(e * e for e in side) / len(side)) for side in zip(*both, strict=True))
        tiles.append((f"{ours / theirs:.2f}", "float32 error of the port, in units of the reference's"))
    identical = document["results_identical"]
    if identical["count"]:
        tiles.append((f"{100 * identical['share']:.4g}%", f"of {identical['count']:,} results identical in float32"))
    return tiles


def _meter(rung: Mapping[str, Any]) -> Any:
    """Of the comparison that came nearest to its bound; None for a rung without any."""
    worst = [section["worst"] for section in rung["sections"] if section["worst"] is not None]
    if not worst:
        return None
    nearest = max(worst, key=lambda c: (not c["passed"], _share(c)))
    return charts.meter(number(nearest["error"]), number(nearest["bound"]))


def _share(comparison: Mapping[str, Any]) -> float:
    error, bound = number(comparison["error"]), number(comparison["bound"])
    return 0.0 if error == 0.0 else error / bound if bound > 0.0 else math.inf


def _tree(nodes: Sequence[Mapping[str, Any]]) -> list[Branch]:
    """Nodes come in the order of a walk, each after the module it stands in."""
    roots: list[Branch] = []
    stack: list[tuple[int, Branch]] = []
    for node in nodes:
        name = node["path"].rpartition(".")[2] or "the model"
        error = None if node["error"] is None else number(node["error"])
        branch = Branch(name=name, path=node["path"], type=node["type"], status=node["status"], error=error)
        while stack and stack[-1][0] >= node["depth"]:
            stack.pop()
        (stack[-1][1].branches if stack else roots).append(branch)
        stack.append((node["depth"], branch))
    return roots


def _environment(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(f"version of {name}", version) for name, version in environment["versions"].items()]
    for name, value in environment.items():
        if name != "versions":
            text = ", ".join(value) if isinstance(value, list) else str(value)
            rows.append((name.replace("_", " "), text or "–"))
    return rows
