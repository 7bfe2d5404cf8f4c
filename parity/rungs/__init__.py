"""One file a rung: what is compared, and by which bound."""

import dataclasses
from collections.abc import Iterable

from parity.compare import Comparison


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
    """The verdict on one kind of comparison, over every tensor and batch."""

    name: str
    precision: str
    compared: int
    """Tensors."""
    failures: tuple[Comparison, ...]
    worst: Comparison | None
    """The tensor that came nearest to its bound, or passed it furthest."""

    @property
    def passed(self) -> bool:
        """Every tensor within its bound, and at least one compared: nothing compared is not a pass."""
        return self.compared > 0 and not self.failures

    @classmethod
    def of(cls, name: str, precision: str, comparisons: Iterable[Comparison]) -> "Rung":
        """Judges `comparisons`."""
        every = list(comparisons)
        return cls(
            name=name,
            precision=precision,
            compared=len(every),
            failures=tuple(c for c in every if not c.passed),
            worst=max(every, key=_share_of_bound, default=None),
        )


def _share_of_bound(comparison: Comparison) -> float:
    if comparison.error == 0.0:
        return 0.0
    return comparison.error / comparison.bound if comparison.bound > 0.0 else float("inf")
