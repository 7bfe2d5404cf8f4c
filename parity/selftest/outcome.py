"""What a selftest found: counts, goals, JSON, and the rows of a table."""

import dataclasses
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from parity.mutations import KINDS
from parity.mutations.syntax import Mutation
from parity.selftest.blind import Mutant
from parity.selftest.clean import Clean, false_alarms
from parity.selftest.planted import Planted

LOCATED_GOAL, NAMED_GOAL = 0.95, 0.85
KINDS_GOAL, BLIND_GOAL, CLEAN_GOAL = 40, 200, 200
PLACES = ("first", "middle", "last")
LIBRARIES = ("flax", "jax", "jaxlib", "numpy", "optax", "torch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """One thing that is demanded."""

    what: str
    got: str
    met: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything a selftest found."""

    quick: bool
    seed: int
    workers: int
    planted: Sequence[Planted]
    """Without those beyond the harness."""
    beyond: Sequence[Planted]
    """Of kinds that it cannot be expected to see; see `Kind.beyond`."""
    mutants: Sequence[Mutant]
    unreached: Sequence[Mutation]
    """Mutations of code that no variant executes."""
    candidates: int
    """Mutations that could have been chosen."""
    clean: Sequence[Clean]
    seconds: float

    @property
    def kinds(self) -> int:
        """Kinds planted."""
        return len({planted.kind for planted in self.planted})

    @property
    def survivors(self) -> list[Mutant]:
        """Blind mutations that no rung noticed."""
        return [mutant for mutant in self.mutants if not mutant.detected]

    @property
    def unexplained(self) -> list[Mutant]:
        """Survivors without an argument for their equivalence."""
        return [mutant for mutant in self.mutants if not mutant.explained]

    def share(self, what: str) -> float:
        """Of the plantings that were detected, located or named."""
        return sum(getattr(planted, what) for planted in self.planted) / max(1, len(self.planted))

    def goals(self) -> list[Goal]:
        """What is demanded, and what was found. A quick run plants at one place, and fewer blind mutations."""
        alarms, unexplained = len(false_alarms(self.clean)), len(self.unexplained)
        blind, clean = (0, 0) if self.quick else (BLIND_GOAL, CLEAN_GOAL)
        return [
            Goal(what=f"at least {KINDS_GOAL} kinds", got=str(self.kinds), met=self.kinds >= KINDS_GOAL),
            Goal(what="every planting detected", got=_percent(self.share("detected")), met=self.share("detected") == 1),
            Goal(
                what=f"module named in {_percent(LOCATED_GOAL)}",
                got=_percent(self.share("located")),
                met=self.share("located") >= LOCATED_GOAL,
            ),
            Goal(
                what=f"kind named in {_percent(NAMED_GOAL)}",
                got=_percent(self.share("named")),
                met=self.share("named") >= NAMED_GOAL,
            ),
            Goal(
                what=f"more than {blind} blind mutations" if self.quick else f"at least {blind} blind mutations",
                got=str(len(self.mutants)),
                met=len(self.mutants) >= max(1, blind),
            ),
            Goal(what="each detected or equivalent", got=f"{unexplained} unexplained", met=unexplained == 0),
            Goal(
                what=f"more than {clean} clean pairs" if self.quick else f"at least {clean} clean pairs",
                got=str(len(self.clean)),
                met=len(self.clean) >= max(1, clean),
            ),
            Goal(what="no false alarm", got=str(alarms), met=alarms == 0),
        ]

    @property
    def passed(self) -> bool:
        """Every goal met."""
        return all(goal.met for goal in self.goals())

    def to_json(self) -> dict[str, Any]:
        """Counts, goals, and every single result."""
        return {
            "passed": self.passed,
            "quick": self.quick,
            "seed": self.seed,
            "kinds": self.kinds,
            "planted": len(self.planted),
            **{what: sum(getattr(p, what) for p in self.planted) for what in ("detected", "located", "named")},
            "blind": len(self.mutants),
            "blind_candidates": self.candidates,
            "blind_survivors": len(self.survivors),
            "blind_unexplained": len(self.unexplained),
            "blind_unreached": len(self.unreached),
            "clean": len(self.clean),
            "false_alarms": len(false_alarms(self.clean)),
            "seconds": round(self.seconds, 1),
            "goals": [dataclasses.asdict(goal) for goal in self.goals()],
            "environment": {
                "python": platform.python_version(),
                "machine": platform.machine(),
                "workers": self.workers,
                **{library: version(library) for library in LIBRARIES},
            },
            "plantings": [dataclasses.asdict(planted) for planted in self.planted],
            "beyond": [dataclasses.asdict(planted) for planted in self.beyond],
            "mutants": [dataclasses.asdict(mutant) for mutant in self.mutants],
            "unreached": [str(mutation) for mutation in self.unreached],
            "clean_pairs": [dataclasses.asdict(clean) for clean in self.clean],
        }


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share not in (0.0, 1.0) else f"{100 * share:.0f}%"


MARKS = {(True, True, True): "●", (True, True, False): "◐", (True, False, True): "◑", (True, False, False): "○"}
LEGEND = "● detected, module and kind named · ◐ kind not named · ◑ module not named · ○ detected only · ✗ missed"


def mark(planted: Planted) -> str:
    """One sign for what was said of a planting."""
    return MARKS.get((planted.detected, planted.located, planted.named), "✗")


def rows(planted: Sequence[Planted]) -> Iterator[tuple[str, str, list[str], str]]:
    """(kind, cases, marks at first, middle and last place, rungs that failed) of every kind."""
    by_kind: dict[str, dict[int, Planted]] = {}
    for each in planted:
        by_kind.setdefault(each.kind, {})[each.number] = each
    for kind in KINDS:
        if kind.name in by_kind:
            found = by_kind[kind.name]
            marks = [mark(found[number]) if number in found else "" for number in range(len(PLACES))]
            rungs = ", ".join(dict.fromkeys(each.rung.split(":")[0] for each in found.values()))
            yield kind.name, ", ".join(kind.cases), marks, rungs
