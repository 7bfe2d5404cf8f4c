"""A Report as plain values: what report.json holds, and what the page and the JUnit file are made of."""

import math
from typing import TYPE_CHECKING, Any

from parity.report.bounds import every_bound
from parity.report.environment import environment
from parity.report.verdict import coverage, verdict

if TYPE_CHECKING:
    from parity.compare import Comparison, Identical
    from parity.ladder import Report
    from parity.locate import Location
    from parity.rungs import Rung, Section
    from parity.tree import Node

FORMAT = 2
"""Goes up when a field changes its meaning or goes away."""


def to_json(report: "Report") -> dict[str, Any]:
    """Every comparison, with its bound and the rule behind it. Numbers that JSON lacks are "inf" and "nan"."""
    first = report.first_difference
    return {
        "format": FORMAT,
        "name": report.name,
        "passed": report.passed,
        "verdict": verdict(report),
        "coverage": coverage(report),
        "rungs": [_rung(rung) for rung in report.rungs],
        "first_difference": None if first is None else _location(first),
        "diagnosis": _diagnosis(report.diagnosis),
        "tree": [_node(node) for node in report.tree],
        "known": [
            {"tensors": list(k.tensors), "kind": k.kind, "reason": k.reason, "holds": k.holds} for k in report.known
        ],
        "results_identical": _identical(report.results_identical),
        "gradients_identical": _identical(report.gradients_identical),
        "zero_gradients": list(report.zero_gradients),
        "redrawn": list(report.redrawn),
        "num_parameters": report.num_parameters,
        "seconds": report.seconds,
        "golden": dict(report.golden),
        "bounds": [{"name": b.name, "value": b.value, "reason": b.reason} for b in every_bound()],
        "environment": environment(),
    }


def _rung(rung: "Rung") -> dict[str, Any]:
    return {
        "number": rung.number,
        "name": rung.name,
        "title": rung.title,
        "status": rung.status,
        "passed": rung.passed,
        "skipped": rung.skipped,
        "compared": rung.compared,
        "seconds": rung.seconds,
        "notes": list(rung.outcome.notes),
        "sections": [_section(section) for section in rung.outcome.sections],
    }


def _section(section: "Section") -> dict[str, Any]:
    return {
        "title": section.title,
        "precision": section.precision,
        "rule": section.rule,
        "passed": section.passed,
        "worst": None if section.worst is None else _comparison(section.worst),
        "comparisons": [_comparison(comparison) for comparison in section.comparisons],
    }


def _comparison(comparison: "Comparison") -> dict[str, Any]:
    return {
        "tensor": comparison.tensor,
        "error": _number(comparison.error),
        "bound": _number(comparison.bound),
        "passed": comparison.passed,
        "reference": None if comparison.reference is None else _number(comparison.reference),
        "detail": comparison.detail,
    }


def _location(first: "Location") -> dict[str, Any]:
    return {
        "module": first.module,
        "error": _number(first.error),
        "explanation": first.explanation,
        "sentence": str(first),
        "further": list(getattr(first, "sentences", ())),
    }


def _diagnosis(diagnosis: Any) -> dict[str, Any] | None:
    if diagnosis is None:
        return None
    return {
        "kind": diagnosis.kind,
        "module": diagnosis.module,
        "sentence": diagnosis.sentence,
        "fix": diagnosis.fix,
        "alternatives": list(diagnosis.alternatives),
    }


def _node(node: "Node") -> dict[str, Any]:
    return {
        "path": node.path,
        "depth": node.depth,
        "type": node.type,
        "status": node.status,
        "error": None if node.error is None else _number(node.error),
    }


def _identical(identical: "Identical") -> dict[str, Any]:
    return {
        "share": identical.share,
        "count": identical.count,
        "unequal": identical.unequal,
        "max_units_in_the_last_place": identical.max_units,
    }


def _number(value: float) -> float | str:
    # A string says more than null.
    value = float(value)
    return value if math.isfinite(value) else str(value)
