"""What metrics.jsonl of one or more runs holds, as one figure: loss, BLEU, learning rate, throughput."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from train.run_dir import RunDir

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Told apart by the colour-blind as well (Okabe and Ito 2008); their yellow, too pale for a line, is left out."""
_DASHES = ("-", "--", ":", "-.")
"""Lines of runs beyond the seventh."""
_GREY = "#555555"
_SMOOTHED_SHARE = 0.03
"""Of a run's records: how many a smoothed value is the mean of."""
_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": _GREY,
    "axes.grid": True,
    "axes.labelcolor": _GREY,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "font.size": 9,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "xtick.color": _GREY,
    "ytick.color": _GREY,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """Values over steps, in the order of the steps."""

    steps: Float64[ndarray, " points"]
    values: Float64[ndarray, " points"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    name: str
    colour: str
    dash: Any
    records: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Curve:
    kinds: tuple[str, ...]
    fields: tuple[str, ...]
    """The first that a record has is drawn: older runs lack some."""
    look: Literal["line", "smoothed", "points", "joined points"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Panel:
    title: str
    unit: str
    curves: tuple[_Curve, ...]
    scale: Literal["values", "power of ten", "from zero"] = "values"


_PANELS = (
    _Panel(
        title="Loss",
        unit="nats a piece",
        curves=(
            # Not `loss`, where there is a choice: it has the smoothing of labels in it, validation has not.
            _Curve(kinds=("train",), fields=("nll", "loss"), look="smoothed"),
            _Curve(kinds=("validation", "final_validation"), fields=("nll_per_token",), look="points"),
        ),
    ),
    _Panel(
        title="BLEU on the validation text",
        unit="BLEU, cased",
        curves=(
            _Curve(
                kinds=("validation_scores", "validation_bleu", "final_validation"),
                fields=("bleu",),
                look="joined points",
            ),
        ),
    ),
    _Panel(
        title="Learning rate",
        unit="learning rate",
        curves=(_Curve(kinds=("train",), fields=("learning_rate",), look="line"),),
        scale="power of ten",
    ),
    _Panel(
        title="Throughput",
        unit="real tokens/s",
        curves=(_Curve(kinds=("train",), fields=("tokens_per_second",), look="smoothed"),),
        scale="from zero",
    ),
)


def plot_runs(runs: Sequence[Path], output: Path) -> Path:
    """Draws the runs in these folders, a colour each, into `output`, whose suffix (.png, .svg, .pdf) says how.

    Panels that would be empty are left out. Raises ValueError for another suffix, no runs, a run without metrics (which
    it names), and where matplotlib is not installed.
    """
    if output.suffix not in FORMATS:
        raise ValueError(f"expected an output that ends in one of {', '.join(FORMATS)}, got {output}")
    if not runs:
        raise ValueError("expected at least one folder of a run, got none")
    drawn = [
        _Run(
            name=name,
            colour=_COLOURS[i % len(_COLOURS)],
            dash=_DASHES[i // len(_COLOURS) % len(_DASHES)],
            records=read_metrics(path),
        )
        for i, (path, name) in enumerate(zip(runs, run_names(runs), strict=True))
    ]
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError("expected matplotlib to draw a plot; pip install 'twinformer[plot]'") from error
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = output.with_name(output.name + ".partial")
    with matplotlib.rc_context(_STYLE):
        _figure(drawn).savefig(beside, format=output.suffix[1:], dpi=160)
    os.replace(beside, output)
    return output


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl; a last line that a kill cut short is left out.

    Raises ValueError that names the run if there is no such file, nothing in it, or a line that is no record.
    """
    file = RunDir(run).metrics_file
    if not file.exists():
        raise ValueError(f"{run}: expected the folder of a training run, found no {file.name} in it")
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{run}: expected a JSON object in line {number} of {file.name}, got {error}") from error
        if not isinstance(record, dict) or not {"kind", "step"} <= record.keys():
            raise ValueError(f"{run}: expected a record with kind and step in line {number} of {file.name}")
        records.append(record)
    if not records:
        raise ValueError(f"{run}: expected records in {file.name}, found none")
    return records


def run_names(runs: Sequence[Path]) -> list[str]:
    """The folders' names, with as many folders above as it takes to tell them apart."""
    parts = [path.resolve().parts for path in runs]
    for count in range(1, max(map(len, parts)) + 1):
        names = [os.path.join(*part[-count:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    raise AssertionError("whole paths differ where the paths do")


def series(records: Sequence[Mapping[str, Any]], kinds: Sequence[str], fields: Sequence[str]) -> Series:
    """What records of these kinds have in the first of `fields` they have; of two of one step, the later counts."""
    points = {}
    for record in records:
        field = next((field for field in fields if field in record), None)
        if record["kind"] in kinds and field is not None:
            points[float(record["step"])] = float(record[field])
    steps = sorted(points)
    return Series(steps=np.array(steps, np.float64), values=np.array([points[step] for step in steps], np.float64))


def smooth(values: Float64[ndarray, " points"]) -> Float64[ndarray, " points"]:
    """The mean of a window around every value; at both ends, of what is left of the window."""
    reach = math.ceil(len(values) * _SMOOTHED_SHARE / 2)
    return np.array([values[max(i - reach, 0) : i + reach + 1].mean() for i in range(len(values))], np.float64)


def _figure(runs: Sequence[_Run]) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    panels = [panel for panel in _PANELS if any(_drawn(panel, run) for run in runs)]
    if not panels:
        names = ", ".join(run.name for run in runs)
        raise ValueError(f"expected losses, scores or rates in the metrics of {names}, found none")
    columns = min(2, len(panels))
    rows, legend_columns = math.ceil(len(panels) / columns), _legend_columns(runs, panels=columns)
    height = 3.0 * rows + 0.2 * math.ceil(len(runs) / legend_columns) + 0.2
    figure = Figure(figsize=(4.8 * columns, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    grid = figure.add_gridspec(rows, columns)
    spare = rows * columns - len(panels)
    for i, panel in enumerate(panels):
        # Where a place is to spare the first panel, the loss, has two.
        cell = grid[0, :] if i == 0 and spare else grid[divmod(i + spare, columns)]
        _fill(figure.add_subplot(cell), panel, runs)
    handles = [Line2D([], [], color=run.colour, linestyle=run.dash, linewidth=2, label=run.name) for run in runs]
    figure.legend(handles=handles, loc="outside upper left", ncols=legend_columns)
    return figure


def _fill(axes: "Axes", panel: _Panel, runs: Sequence[_Run]) -> None:
    looks = []
    for run in runs:
        for curve, points in _drawn(panel, run):
            _draw(axes, points, look=curve.look, run=run)
            looks.append(curve.look)
    # The same steps in every panel, whichever of them have values there.
    _finish(axes, panel, last_step=max(float(record["step"]) for run in runs for record in run.records))
    if len(panel.curves) > 1:
        _explain(axes, looks)


def _drawn(panel: _Panel, run: _Run) -> list[tuple[_Curve, Series]]:
    found = [(curve, series(run.records, curve.kinds, curve.fields)) for curve in panel.curves]
    return [(curve, points) for curve, points in found if len(points.steps)]


def _draw(axes: "Axes", points: Series, *, look: str, run: _Run) -> None:
    steps, values = points.steps, points.values
    line: dict[str, Any] = {"color": run.colour, "linestyle": run.dash}
    dots: dict[str, Any] = {"color": run.colour, "marker": "o", "markersize": 5, "markeredgecolor": "white"}
    if look == "points":
        axes.plot(steps, values, linestyle="", **dots)
    elif look == "joined points":
        axes.plot(steps, values, linewidth=1.0, **line | dots)
    elif look == "smoothed":
        axes.plot(steps, values, color=run.colour, linewidth=0.5, alpha=0.35)
        axes.plot(steps, smooth(values), linewidth=1.5, **line)
    else:
        axes.plot(steps, values, linewidth=1.5, **line)
    if len(steps) == 1 and "points" not in look:
        axes.plot(steps, values, color=run.colour, marker=".")  # a line of one point would not be seen


def _finish(axes: "Axes", panel: _Panel, *, last_step: float) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(title=panel.title, xlabel="step", ylabel=panel.unit, xlim=(0, max(last_step, 1) * 1.03))
    # Of fixed number: by default it depends on the room, which is known only when all labels are there.
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    power = 0
    if panel.scale == "from zero":
        axes.set_ylim(bottom=0)
    elif panel.scale == "power of ten":
        highest = max(axes.get_ylim())
        power = math.floor(math.log10(highest)) if highest > 0 else 0
        axes.set_ylabel(f"{panel.unit} ($10^{{{power}}}$)")
    _label_ticks(axes.xaxis)
    _label_ticks(axes.yaxis, power=power)


def _label_ticks(axis: "Axis", *, power: int = 0) -> None:
    """Commas between thousands, and as many decimals at every tick as the one that needs most."""
    from matplotlib.ticker import FuncFormatter

    shown = [np.format_float_positional(tick / 10.0**power, precision=6, trim="-") for tick in axis.get_majorticklocs()]
    decimals = max((len(text.partition(".")[2]) for text in shown), default=0)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 10.0**power:,.{decimals}f}"))


def _explain(axes: "Axes", looks: Sequence[str]) -> None:
    """Says how training and validation look, beside the title, where no line can run through it."""
    from matplotlib.lines import Line2D

    handles = {
        "smoothed": Line2D([], [], color=_GREY, linewidth=1.5, label="training (bold: running mean)"),
        "points": Line2D([], [], color=_GREY, linestyle="", marker="o", markersize=5, label="validation"),
    }
    axes.legend(
        handles=[handle for look, handle in handles.items() if look in looks],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.0,
        fontsize=8,
        labelcolor=_GREY,
        ncols=2,
    )


def _legend_columns(runs: Sequence[_Run], *, panels: int) -> int:
    # About 60 characters fit above a panel, and a line and some space stand beside every name.
    return max(1, min(len(runs), 60 * panels // (max(len(run.name) for run in runs) + 8)))
