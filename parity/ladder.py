"""Climbs the rungs for a Pair, and says where the two first differ, and what the difference is."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from parity.compare import Identical
from parity.locate import Location, locate
from parity.pair import KnownDifference, Pair
from parity.rungs import (
    NotComparedError,
    Outcome,
    Rung,
    adversarial,
    buffers,
    clipping,
    decoding,
    dropout,
    forward,
    gradients,
    half_width,
    initialisation,
    inventory,
    loss,
    modes,
    optimizer,
    preflight,
    schedule,
    trajectory,
    weights,
)
from parity.runs import Runs
from parity.tree import Node, tree
from parity.weights.problems import MappingError

RUNGS: tuple[tuple[str, ModuleType, str], ...] = (
    ("preflight", preflight, "environment, precision in force, repeatability"),
    ("inventory", inventory, "parameters, what is trained, hyper-parameters"),
    ("buffers", buffers, "buffers and position tables"),
    ("weights", weights, "weights there and back"),
    ("initialisation", initialisation, "initial distributions"),
    ("forward", forward, "every module's output"),
    ("adversarial", adversarial, "masks and hard inputs"),
    ("loss", loss, "loss"),
    ("gradients", gradients, "every parameter's gradient"),
    ("dropout", dropout, "dropout and training mode"),
    ("clipping", clipping, "gradient clipping"),
    ("optimizer", optimizer, "optimizer moments and updates"),
    ("schedule", schedule, "learning-rate table"),
    ("trajectory", trajectory, "training steps"),
    ("decoding", decoding, "decoding"),
    ("modes", modes, "eager, jit, several devices, untapped"),
    ("half_width", half_width, "bfloat16"),
)
"""In the order in which they are climbed: a later one means little where an earlier one is broken."""

NAMES = tuple(name for name, _, _ in RUNGS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a check."""

    name: str
    rungs: tuple[Rung, ...]
    """All of them, in order; those that were not reached or had nothing to compare say so."""
    first_difference: Location | None
    diagnosis: Any
    """What the difference is, where a suspect explains it."""
    known: tuple[KnownDifference, ...]
    results_identical: Identical
    gradients_identical: Identical
    """Over the gradients that are not zero in exact arithmetic."""
    zero_gradients: tuple[str, ...]
    """Parameters whose gradient is zero in exact arithmetic, judged apart."""
    redrawn: tuple[str, ...]
    """Tensors whose float32 error was beyond twice the reference's, and was judged by further runs of the reference."""
    num_parameters: int
    seconds: float
    tree: tuple[Node, ...] = ()
    """Every module, with the first that differs marked."""
    golden: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What stood for the reference: its file, when and with which versions it was recorded; empty if it was alive."""

    def rung(self, name: str) -> Rung:
        """By its short name. Raises KeyError."""
        return {rung.name: rung for rung in self.rungs}[name]

    @property
    def failed(self) -> tuple[Rung, ...]:
        """Rungs that were compared and differ."""
        return tuple(rung for rung in self.rungs if rung.status == "failed")

    @property
    def skipped(self) -> tuple[Rung, ...]:
        """Rungs with nothing to compare: the pair does not bring it."""
        return tuple(rung for rung in self.rungs if rung.status == "skipped")

    @property
    def passed(self) -> bool:
        """No rung failed, and weights and outputs were compared: without them the rest would prove nothing."""
        return not self.failed and self.rung("weights").passed and self.rung("forward").passed


def check(
    pair: Pair,
    *,
    keep_going: bool = False,
    rungs: Sequence[str] = NAMES,
    seed: int = 0,
    golden: Any = None,
    explain: bool = True,
    progress: Callable[[str], None] = lambda title: None,
) -> Report:
    """Climbs the ladder, and stops at the first broken rung, or goes on with `keep_going`.

    `rungs` leaves some out: they are reported as not compared. `golden` stands for the reference's side. Without
    `explain` the report says whether the two differ, not where and why. `progress` is told the title of each rung.
    Raises ValueError for an unknown rung, and whatever a model raises.
    """
    unknown = sorted(set(rungs) - set(NAMES))
    if unknown:
        raise ValueError(f"expected rungs among {', '.join(NAMES)}, got {', '.join(unknown)}")
    started = time.perf_counter()
    runs = Runs(pair, seed=seed, golden=golden)
    climbed: list[Rung] = []
    for number, (name, module, title) in enumerate(RUNGS, start=1):
        rung = Rung(number=number, name=name, title=title, outcome=Outcome(sections=()))
        broken = any(r.status == "failed" for r in climbed)
        if name not in rungs:
            rung = dataclasses.replace(rung, skipped="left out on request")
        elif broken and not keep_going:
            rung = dataclasses.replace(rung, reached=False)
        else:
            progress(title)
            rung = _climb(rung, module, runs)
        climbed.append(rung)
    failed = next((r for r in climbed if r.status == "failed"), None)
    first, diagnosis = locate(runs, failed) if explain else (None, None)
    return Report(
        name=pair.name,
        rungs=tuple(climbed),
        first_difference=first,
        diagnosis=diagnosis,
        known=tuple(dict.fromkeys(k for rung in climbed for k in rung.outcome.known)),
        results_identical=runs.results_identical,
        gradients_identical=runs.gradients_identical,
        zero_gradients=tuple(sorted(runs.zero_names())),
        redrawn=tuple(sorted(runs.redrawn)),
        num_parameters=_num_parameters(runs),
        tree=_tree(runs, climbed, first),
        seconds=time.perf_counter() - started,
        golden={} if golden is None else golden.recorded,
    )


def _climb(rung: Rung, module: ModuleType, runs: Runs) -> Rung:
    started = time.perf_counter()
    try:
        rung = dataclasses.replace(rung, outcome=module.climb(runs))
    except (NotComparedError, MappingError) as reason:
        # A mapping that does not fit has failed the inventory; what needs the weights cannot be compared.
        rung = dataclasses.replace(rung, skipped=str(reason))
    return dataclasses.replace(rung, seconds=time.perf_counter() - started)


def _tree(runs: Runs, climbed: Sequence[Rung], first: Location | None) -> tuple[Node, ...]:
    try:
        return tree(runs, climbed, None if first is None else first.module)
    except (NotComparedError, MappingError):  # modules that do not correspond: the inventory has failed
        return ()


def _num_parameters(runs: Runs) -> int:
    try:
        return sum(array.size for name, array in runs.weights.items() if name in runs.reference_runner.trained())
    except NotComparedError:
        return 0
