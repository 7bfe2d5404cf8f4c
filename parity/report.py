"""A Report as a table in the terminal, and as JSON."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parity.compare import Comparison, Identical
from parity.ladder import Report
from parity.locate import Location
from parity.tolerances import FLOAT32_DRAWS

PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "numpy", "orbax-checkpoint", "twinformer")


def show(report: Report, *, console: Console) -> None:
    """Prints the table, the shares of identical values, the first difference and the verdict."""
    table = Table(title=f"Parity of {report.name}, {report.num_parameters:,} parameters", box=box.SIMPLE)
    table.add_column("precision")
    table.add_column("compared", overflow="fold")
    table.add_column("")
    table.add_column("nearest to its bound", overflow="fold")
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("bound", justify="right", no_wrap=True)
    for rung in report.rungs:
        verdict = Text("ok", style="green") if rung.passed else Text("FAIL", style="bold red")
        worst = rung.worst or Comparison(tensor="nothing compared", error=float("nan"), bound=float("nan"))
        error, bound = f"{worst.error:.1e}", f"{worst.bound:.1e}"
        table.add_row(rung.precision, f"{rung.compared} {rung.name}", verdict, Text(worst.tensor), error, bound)
    console.print(table)
    console.print(_identical_line("Logits", report.logits_identical))
    console.print(_identical_line("Gradients", report.gradients_identical))
    for name, distance in report.float32.items():
        console.print(
            f"Float32 {name}: the port is {distance.port:.1e} from the float64 answer, the reference "
            f"{distance.reference:.1e} (root mean square over tensors)."
        )
    if report.zero_gradients:
        console.print(
            f"{len(report.zero_gradients)} gradients are zero in exact arithmetic and were judged apart, by the scale "
            f"of what was summed: {_some(report.zero_gradients)}"
        )
    if report.redrawn:
        console.print(
            f"{len(report.redrawn)} float32 errors were beyond twice the reference's, and were judged by up to "
            f"{FLOAT32_DRAWS} further runs of it: {_some(report.redrawn)}"
        )
    for rung in report.rungs:
        if rung.failures:
            names = ", ".join(failure.tensor for failure in rung.failures[:5])
            more = ", ..." if len(rung.failures) > 5 else ""
            console.print(f"{rung.name}, {rung.precision}: {len(rung.failures)} beyond their bound: {names}{more}")
    if report.first_difference is not None:
        console.print(Text(str(report.first_difference), style="bold red"))
    verdict = Text("equal", style="bold green") if report.passed else Text("NOT EQUAL", style="bold red")
    console.print(Text.assemble("The two are ", verdict, f". {report.seconds:.0f} s."))


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain JSON values."""
    first = report.first_difference
    return {
        "name": report.name,
        "passed": report.passed,
        "rungs": [
            {
                "name": rung.name,
                "passed": rung.passed,
                "precision": rung.precision,
                "compared": rung.compared,
                "worst": None if rung.worst is None else _comparison(rung.worst),
                "failures": [_comparison(failure) for failure in rung.failures],
            }
            for rung in report.rungs
        ],
        "logits_identical": _identical(report.logits_identical),
        "gradients_identical": _identical(report.gradients_identical),
        "float32_distance_from_float64": {
            name: {"port": _number(distance.port), "reference": _number(distance.reference)}
            for name, distance in report.float32.items()
        },
        "zero_gradients": list(report.zero_gradients),
        "redrawn": list(report.redrawn),
        "first_difference": None if first is None else _location(first),
        "num_parameters": report.num_parameters,
        "seconds": report.seconds,
        "environment": environment(),
    }


def write_json(report: Report, path: Path) -> None:
    """Writes the JSON beside its target and renames it when whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".partial")
    beside.write_text(json.dumps(to_json(report), indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path)


def environment() -> dict[str, Any]:
    """Versions, platform, and the settings that decide about precision."""
    return {
        "python": sys.version.split()[0],
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "jax_devices": [str(device) for device in jax.devices()],
        "jax_enable_x64_outside_the_float64_gate": bool(jax.config.read("jax_enable_x64")),
        "jax_matmul_precision": "highest",
        "torch_threads": torch.get_num_threads(),
        "torch_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch_allow_tf32": bool(torch.backends.cuda.matmul.allow_tf32),
    }


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")


def _identical_line(what: str, identical: Identical) -> str:
    line = f"{what} rounded to float32: {identical.count - identical.unequal:,} of {identical.count:,} identical"
    return line + (f", the others at most {identical.max_units:,} units apart." if identical.unequal else ".")


def _identical(identical: Identical) -> dict[str, Any]:
    return {
        "share": identical.share,
        "count": identical.count,
        "unequal": identical.unequal,
        "max_units_in_the_last_place": identical.max_units,
    }


def _location(first: Location) -> dict[str, Any]:
    return {"module": first.module, "error": _number(first.error), "explanation": first.explanation}


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {"tensor": comparison.tensor, "error": _number(comparison.error), "bound": _number(comparison.bound)}


def _number(value: float) -> float | str:
    # JSON has no infinity; a string says more than null.
    return value if abs(value) < float("inf") else str(value)
