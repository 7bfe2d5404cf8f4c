"""Known porting faults, planted: is each detected, its module named, its kind named?"""

import dataclasses
import time
from collections.abc import Callable, Sequence

from parity.locate import Location
from parity.mutations import KINDS, Kind, plantings
from parity.mutations.layers import THE_MODEL
from parity.selftest import pool
from parity.selftest.bases import base_pair
from parity.selftest.names import NAMES

CPU_SECONDS = 300
"""Limit of one planting; a check takes 2 to 40."""
PER_PROCESS = 12
LAST = 2
QUICK_SHARE = 3
"""A quick run plants every so manyth kind."""

EVERY_MODULE_EQUAL = "every module is equal, its loss not"
"""What the harness says of a model whose loss alone differs: that names the loss."""

TENSORS = frozenset(
    {"kernel", "weight", "bias", "scale", "table", "running_mean", "running_var", "in_proj_weight", "in_proj_bias"}
    | {f"{what}_{of}" for what in ("weight", "bias") for of in ("ih", "hh")}
)
"""Last parts of names of tensors: a tensor is named by its module, and a module by its tensor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planted:
    """What the harness said of one planting."""

    kind: str
    base: str
    place: str
    number: int
    """0: the first place, 1: a middle one, 2: the last."""
    detected: bool
    located: bool
    named: bool
    rung: str = ""
    """The first that failed."""
    module: str = ""
    """Where the harness saw the first difference."""
    diagnosis: str = ""
    """The kind that the diagnosis names."""
    seconds: float = 0.0

    @property
    def as_wanted(self) -> bool:
        """Detected, located and named; or not to be expected."""
        return (self.named and self.located) or bool(kind_named(self.kind).beyond)

    def __str__(self) -> str:
        said = f"{self.rung or 'nothing'} failed; at {self.module or '-'}; {self.diagnosis or 'no name'}"
        return f"{self.kind} at {self.place or 'the model'}: {said}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Item:
    kind: str
    number: int
    alone: bool = False
    """Planted at no other place."""


def kinds_to_plant(*, quick: bool, seed: int = 0) -> list[_Item]:
    """Every kind at its first, middle and last place; if `quick`, every third kind at one place, by the seed."""
    if quick:
        chosen = range(seed % QUICK_SHARE, len(KINDS), QUICK_SHARE)
        items = [(i, 0 if (i // QUICK_SHARE + seed) % 2 else LAST) for i in chosen]
    else:
        items = [(i, number) for i in range(len(KINDS)) for number in (0, 1, LAST)]
    # By base, so that a process builds few of them.
    items.sort(key=lambda item: KINDS[item[0]].base)
    return [_Item(kind=KINDS[i].name, number=number, alone=quick) for i, number in items]


def plant(
    *, quick: bool, seed: int, workers: int, progress: Callable[[Planted], None] = lambda planted: None
) -> list[Planted]:
    """Plants every kind. A kind that fits in fewer than three places is planted in those."""
    results: list[Planted] = []
    items = kinds_to_plant(quick=quick, seed=seed)
    for ended in pool.run(check_one, items, workers=workers, per_process=PER_PROCESS, cpu_seconds=CPU_SECONDS):
        if ended.how == "done":
            found = ended.value
        else:
            # The program ended in an error, which is seen; what it was, is not said.
            found = _failed(ended.item, f"{ended.how}: {str(ended.value).strip().splitlines()[-1]}")
        if found is not None:
            results.append(found)
            progress(found)
    order = {kind.name: i for i, kind in enumerate(KINDS)}
    return sorted(results, key=lambda planted: (order[planted.kind], planted.number))


def check_one(item: _Item) -> Planted | None:
    """Checks one planting; None if the kind has fewer places than that."""
    from parity import ladder

    kind = kind_named(item.kind)
    base = base_pair(kind.base)
    every = plantings(kind, base)
    # With one place it is the first, or the last where only the last was asked for; with two, first and last.
    numbers = {1: [item.number if item.alone else 0], 2: [0, LAST], 3: [0, 1, LAST]}[len(every)]
    number = item.number
    if number not in numbers:
        return None
    planting = every[numbers.index(number)]
    started = time.perf_counter()
    report = ladder.check(planting.pair(base))
    first, diagnosis = report.first_difference, report.diagnosis
    module = place_named(first) if first is not None else ""
    rung = report.failed[0].name if report.failed else ""
    named = getattr(diagnosis, "kind", "")
    return Planted(
        kind=kind.name,
        base=kind.base,
        place=planting.place,
        number=number,
        detected=not report.passed,
        located=not report.passed and (locates(module, planting.shows) or rung in kind.rungs),
        named=not report.passed and named in NAMES.get(kind.name, ()),
        rung=rung,
        module=module,
        diagnosis=named,
        seconds=time.perf_counter() - started,
    )


def kind_named(name: str) -> Kind:
    """Raises KeyError."""
    return {kind.name: kind for kind in KINDS}[name]


def place_named(first: Location) -> str:
    """The name that a report gives to the first difference."""
    return "loss" if first.module == THE_MODEL and EVERY_MODULE_EQUAL in first.explanation else first.module


def locates(found: str, shows: Sequence[str]) -> bool:
    """Whether a name that the harness gave is that of one of these places.

    A tensor's name is as good as its module's, and the other way round; a module inside or around is not.
    """
    name = _module(found.split(",", maxsplit=1)[0].split(" (", maxsplit=1)[0])
    return any(name == _module(place) for place in shows)


def _module(name: str) -> str:
    name = name.split("[", maxsplit=1)[0].split("#", maxsplit=1)[0]
    head, _, last = name.rpartition(".")
    return head if last in TENSORS else name


def _failed(item: _Item, why: str) -> Planted:
    kind = kind_named(item.kind)
    return Planted(
        kind=kind.name,
        base=kind.base,
        place="",
        number=item.number,
        detected=True,
        located=False,
        named=False,
        rung=why,
    )
