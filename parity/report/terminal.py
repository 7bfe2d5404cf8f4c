"""A Report in the terminal: a table of the rungs, and below it whatever the reader should know."""

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from parity.compare import Comparison, Identical
from parity.ladder import Report
from parity.pair import KnownDifference
from parity.report.tree import drawn
from parity.report.verdict import coverage, verdict
from parity.rungs import Rung, Section
from parity.tolerances import FLOAT32_DRAWS

__all__ = ["show", "verdict"]

STATUS = {
    "passed": ("ok", "green"),
    "failed": ("FAIL", "bold red"),
    "skipped": ("not compared", "yellow"),
    "not reached": ("not reached", "dim"),
}
SHOWN = 5
"""Failed comparisons of a section, and names in a list, before `...`."""
NEAREST = 35
"""Width of a comparison's precision and name where a line has 120 columns."""


def show(report: Report, *, console: Console) -> None:
    """Prints the table, the notes, the first difference with its diagnosis, the rules of the bounds, the verdict."""
    console.print(_table(report, wide=console.width >= 118))
    for title, lines in _blocks(report):
        console.print(Text(title, style="bold"))
        for line in lines:
            console.print(Padding(line, (0, 0, 0, 2)))
        console.print()
    if report.first_difference is not None:
        _show_difference(report, console)
    style = "bold green" if report.passed else "bold red"
    line = Text.assemble("The two are ", (verdict(report), style), f": {coverage(report)}, {_compared(report)}")
    console.print(line.append(f" comparisons, {report.seconds:.0f} s."))


def _table(report: Report, *, wide: bool) -> Table:
    title = f"Parity of {report.name}, {report.num_parameters:,} parameters"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_style="bold", pad_edge=False, collapse_padding=True)
    table.add_column("", justify="right")
    table.add_column("rung", max_width=None if wide else 27)
    table.add_column("status", no_wrap=True)
    table.add_column("compared", justify="right", no_wrap=True)
    table.add_column("nearest to its bound", overflow="fold")
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("bound", justify="right", no_wrap=True)
    for rung in report.rungs:
        word, style = STATUS[rung.status]
        start = (str(rung.number), rung.title, Text(word, style=style))
        found = worst(rung.outcome.sections)
        if found is None:
            table.add_row(*start, "0" if rung.status == "failed" else "", "", "", "")
            continue
        section, nearest = found
        precision = f"{section.precision} "
        name = Text.assemble((precision, "dim"), _from_the_end(nearest.tensor, NEAREST - len(precision)))
        table.add_row(*start, f"{rung.compared:,}", name, f"{nearest.error:.1e}", f"{nearest.bound:.1e}")
    return table


def worst(sections: Sequence[Section]) -> tuple[Section, Comparison] | None:
    """The comparison of all sections that came nearest to its bound, or passed it furthest, and its section."""
    found = [(section, section.worst) for section in sections]
    compared = [(section, comparison) for section, comparison in found if comparison is not None]
    return max(compared, key=lambda pair: (not pair[1].passed, _share(pair[1])), default=None)


def _share(comparison: Comparison) -> float:
    if comparison.error == 0.0:
        return 0.0
    return comparison.error / comparison.bound if comparison.bound > 0.0 else float("inf")


def _blocks(report: Report) -> Iterator[tuple[str, list[Text]]]:
    """What stands below the table: a heading and its lines each, where there are any."""
    blocks = (
        ("Reference", _golden(report)),
        ("Not compared", _not_compared(report)),
        ("After rounding to float32", _rounded(report)),
        ("Known differences of the frameworks", [_known(k) for k in report.known]),
        ("Notes", [Text(f"{rung.number} {rung.name}: {note}") for rung in report.rungs for note in rung.outcome.notes]),
        ("Judged apart", _apart(report)),
        ("Beyond their bound", _beyond(report)),
        ("Rules behind the bounds", _rules(report)),
    )
    yield from ((title, lines) for title, lines in blocks if lines)


def _golden(report: Report) -> list[Text]:
    return [Text(f"{name}: {text}") for name, text in report.golden.items()]


def _not_compared(report: Report) -> list[Text]:
    """Rungs with the same reason on one line."""
    reasons: dict[str, list[str]] = {}
    for rung in report.skipped:
        reasons.setdefault(rung.skipped, []).append(f"{rung.number} {rung.name}")
    lines = [Text.assemble((", ".join(names), "yellow"), f": {why}") for why, names in reasons.items()]
    beyond = [rung for rung in report.rungs if rung.status == "not reached"]
    if beyond:
        lines.append(Text(f"{beyond[0].number} to {beyond[-1].number}: not reached, as a rung before them is broken"))
    return lines


def _from_the_end(name: str, most: int) -> str:
    """Of a long path, the end tells more than the start."""
    return name if len(name) <= most else "…" + name[1 - most :]


def _rounded(report: Report) -> list[Text]:
    kinds: tuple[tuple[str, Identical], ...] = (
        ("results", report.results_identical),
        ("gradients", report.gradients_identical),
    )
    return [Text(f"{what}: {identical}") for what, identical in kinds if identical.count]


def _known(known: KnownDifference) -> Text:
    return Text(f"{known.kind} ({_some(known.tensors)}): {known.reason} Compared: {known.holds}")


def _apart(report: Report) -> list[Text]:
    lines = []
    if report.zero_gradients:
        lines.append(
            f"{len(report.zero_gradients)} gradients are zero in exact arithmetic, judged by the scale of what was "
            f"summed: {_some(report.zero_gradients)}"
        )
    if report.redrawn:
        lines.append(
            f"{len(report.redrawn)} float32 errors were beyond twice the reference's, judged by up to "
            f"{FLOAT32_DRAWS} further runs of it: {_some(report.redrawn)}"
        )
    return [Text(line) for line in lines]


def _beyond(report: Report) -> list[Text]:
    """Of the first broken rung in detail, of later ones how many: they mean little."""
    lines: list[Text] = []
    for i, rung in enumerate(report.failed):
        if i == 0:
            lines += _failures(rung)
        else:
            lines.append(Text(f"{rung.number} {rung.name}: {len(rung.failures):,} of {rung.compared:,}"))
    return lines


def _failures(rung: Rung) -> Iterator[Text]:
    for section in rung.outcome.sections:
        if not section.comparisons:
            yield Text(f"{rung.number} {rung.name}, {section.title}: nothing was compared", style="red")
        for failure in section.failures[:SHOWN]:
            detail = f" ({failure.detail})" if failure.detail else ""
            yield Text.assemble(
                f"{rung.number} {rung.name}, {section.precision} {section.title}: ",
                (failure.tensor, "red"),
                f" {failure.error:.1e}, bound {failure.bound:.1e}{detail}",
            )
        if len(section.failures) > SHOWN:
            yield Text(f"  and {len(section.failures) - SHOWN} more in {section.title}", style="dim")


def _rules(report: Report) -> list[Text]:
    """Each with the rungs that it judged."""
    rules: dict[str, dict[str, None]] = {}
    for rung in report.rungs:
        for section in rung.outcome.sections:
            rules.setdefault(section.rule, {})[f"{rung.number} {section.precision}"] = None
    return [Text(f"{', '.join(judged)}: {rule}", style="dim") for rule, judged in rules.items()]


def _show_difference(report: Report, console: Console) -> None:
    console.print(Text(str(report.first_difference), style="bold red"))
    for sentence in getattr(report.first_difference, "sentences", ()):
        console.print(Padding(Text(sentence), (0, 0, 0, 2)))
    if report.diagnosis is not None:
        console.print(Text(f"Diagnosis: {report.diagnosis}", style="bold"))
    if report.tree:
        console.print(drawn(report.tree))
    console.print()


def _compared(report: Report) -> str:
    return f"{sum(rung.compared for rung in report.rungs):,}"


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
