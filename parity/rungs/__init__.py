"""One file a rung: what is compared, and by which bound. Each has `climb(runs) -> Outcome`."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from parity.compare import Comparison
from parity.pair import KnownDifference

Status = Literal["passed", "failed", "skipped", "not reached"]


class NotComparedError(Exception):
    """A rung has nothing to compare. The message says why; it is shown, and it is not a pass."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Comparisons of one kind, judged by one rule."""

    title: str
    precision: str
    """`float64`, `float32`, `bfloat16`, `bits`, `static` or `statistics`."""
    rule: str
    """How the bound came about, in a sentence (see tolerances)."""
    comparisons: tuple[Comparison, ...]

    @property
    def failures(self) -> tuple[Comparison, ...]:
        """Those beyond their bound."""
        return tuple(comparison for comparison in self.comparisons if not comparison.passed)

    @property
    def passed(self) -> bool:
        """Every tensor within its bound, and at least one compared: nothing compared is not a pass."""
        return bool(self.comparisons) and not self.failures

    @property
    def worst(self) -> Comparison | None:
        """The tensor that came nearest to its bound, or passed it furthest."""
        return max(self.comparisons, key=_share_of_bound, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rung found."""

    sections: tuple[Section, ...]
    known: tuple[KnownDifference, ...] = ()
    notes: tuple[str, ...] = ()
    """What the reader should know besides: a part that was not compared and why, a figure of interest."""
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """For the diagnosis, where no module is at fault: whatever the suspects of this rung look at."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
    """The verdict on one rung."""

    number: int
    name: str
    """Short: `forward`."""
    title: str
    """In words: `every module's output`."""
    outcome: Outcome
    skipped: str = ""
    """Why nothing was compared."""
    reached: bool = True
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        """Skipped and not reached are not passed."""
        if not self.reached:
            return "not reached"
        if self.skipped:
            return "skipped"
        sections = self.outcome.sections
        return "passed" if sections and all(section.passed for section in sections) else "failed"

    @property
    def passed(self) -> bool:
        """Compared, and every section passed."""
        return self.status == "passed"

    @property
    def compared(self) -> int:
        """Comparisons."""
        return sum(len(section.comparisons) for section in self.outcome.sections)

    @property
    def failures(self) -> tuple[Comparison, ...]:
        """Of every section."""
        return tuple(failure for section in self.outcome.sections for failure in section.failures)


def section(title: str, precision: str, rule: str, comparisons: Iterable[Comparison]) -> Section:
    """A Section of whatever iterable."""
    return Section(title=title, precision=precision, rule=rule, comparisons=tuple(comparisons))


def _share_of_bound(comparison: Comparison) -> float:
    if comparison.error == 0.0:
        return 0.0
    return comparison.error / comparison.bound if comparison.bound > 0.0 else float("inf")
