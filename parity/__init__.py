"""Moves weights between PyTorch and Flax, and proves that two models compute the same thing.

    import parity

    report = parity.check(parity.Pair(reference=..., port=..., inputs=...))

Names are imported when they are first used: neither jax nor torch is loaded by `import parity`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity.assertion import assert_parity
    from parity.ladder import Report, check
    from parity.pair import KnownDifference, Pair, Side
    from parity.weights.mapping import Rule

__all__ = ["KnownDifference", "Pair", "Report", "Rule", "Side", "assert_parity", "check"]

_HOMES = {
    "KnownDifference": "parity.pair",
    "Pair": "parity.pair",
    "Report": "parity.ladder",
    "Rule": "parity.weights.mapping",
    "Side": "parity.pair",
    "assert_parity": "parity.assertion",
    "check": "parity.ladder",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
