"""The bounds of parity/tolerances.py with their reasons, read off its source: a constant and the docstring below it."""

import ast
import dataclasses
import functools
import inspect
import itertools

from parity import tolerances


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """One of them."""

    name: str
    value: str
    """As a reader would write it."""
    reason: str


@functools.cache
def every_bound() -> tuple[Bound, ...]:
    """In the order in which they stand in the file."""
    body = ast.parse(inspect.getsource(tolerances)).body
    found = []
    for assignment, below in itertools.pairwise(body):
        if not (isinstance(assignment, ast.Assign) and isinstance(below, ast.Expr)):
            continue
        if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            names = [node.id for node in ast.walk(assignment.targets[0]) if isinstance(node, ast.Name)]
            reason = " ".join(below.value.value.split())
            # One that is missing was added to the file after it was imported.
            known = [name for name in names if hasattr(tolerances, name)]
            found += [Bound(name=name, value=_shown(getattr(tolerances, name)), reason=reason) for name in known]
    return tuple(found)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2g}"
    if dataclasses.is_dataclass(value):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return ", ".join(f"{name} {_shown(v)}" for name, v in fields)
    return str(value)
