"""JSON out of files that may be damaged, or made to do harm."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value. Raises ValueError for what is no JSON, is nested too deep for Python, or names a field twice."""
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except RecursionError as error:
        raise ValueError("values nested too deep") from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(name for name in fields if names.count(name) > 1)!r} twice")
    return fields
