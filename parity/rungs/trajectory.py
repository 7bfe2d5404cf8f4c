"""Rung 14: training steps in both, losses and parameters compared after each.

Evidence: `losses` [(reference, port)], `rates`, `distances` {parameter: root mean square, one a step} and `bounds`
alike; `unchanged` {side: steps after which nothing had changed}; `still`, the port's parameters that never moved;
`first`, the first step that departs, and `departure`, `jump` or `drift`.
"""

from collections.abc import Iterator

from parity.compare import Comparison
from parity.rungs import Outcome, section
from parity.runs import Runs
from parity.tolerances import (
    MOVES_RULE,
    TRAJECTORY_LOSS_RULE,
    TRAJECTORY_RULE,
    TRAJECTORY_ZERO_RULE,
)
from parity.trace import LOSS
from parity.trajectory import ELEMENT, LARGE, Trajectory, judge_again, train_both

NUM_STEPS, NUM_STEPS_OF_LARGE = 10, 3
"""Where the pair names no number."""

JUMP = 100.0
"""A distance that grew by this factor within one step is a jump; drift grows with the steps."""


def climb(runs: Runs) -> Outcome:
    """Losses, parameters, those with a zero gradient apart, and whether the steps changed anything at all."""
    found = train_both(runs, num_steps=_num_steps(runs))
    again = 0 if found.within() else judge_again(runs, found)
    losses = list(_losses(found))
    names = [name for name in found.distances if name not in found.zero]
    parameters = [_parameter(name, found.distances[name], found.bounds(name)) for name in names]
    parameters += [_parameter(name + ELEMENT, found.elements[name], found.element_bounds(name)) for name in names]
    noise = [_zero(found, name) for name in sorted(found.zero)]
    sections = [
        section("losses", "float64", TRAJECTORY_LOSS_RULE, losses),
        section("parameters", "float64", TRAJECTORY_RULE, parameters),
        section("steps that change nothing", "bits", MOVES_RULE, _moves(found)),
    ]
    if noise:
        sections.append(section("parameters whose gradient is zero", "float64", TRAJECTORY_ZERO_RULE, noise))
    first, departure = _departure(found)
    return Outcome(
        sections=tuple(sections),
        notes=tuple(_notes(found, first, departure, again)),
        evidence={
            "losses": found.losses,
            "rates": found.rates,
            "distances": found.distances,
            "bounds": {name: found.bounds(name) for name in found.distances},
            "unchanged": found.unchanged,
            "still": sorted(found.still - found.zero),
            "first": first,
            "departure": departure,
        },
    )


def _num_steps(runs: Runs) -> int:
    if runs.pair.training_steps is not None:
        return runs.pair.training_steps
    large = sum(array.size for array in runs.weights.values()) > LARGE
    return NUM_STEPS_OF_LARGE if large else NUM_STEPS


def _losses(found: Trajectory) -> Iterator[Comparison]:
    every = zip(found.losses, found.loss_errors, found.bounds(LOSS), strict=True)
    for number, ((theirs, ours), error, bound) in enumerate(every, start=1):
        detail = f"expected {theirs:.15g}, found {ours:.15g}"
        yield Comparison(tensor=f"loss of step {number}", error=error, bound=bound, detail=detail)


def _parameter(name: str, distances: list[float], bounds: list[float]) -> Comparison:
    """The step at which it came nearest to its bound, or the first beyond it."""
    shares = [_share(distance, bound) for distance, bound in zip(distances, bounds, strict=True)]
    beyond = next((i for i, share in enumerate(shares) if not share <= 1.0), None)
    worst = shares.index(max(shares)) if beyond is None else beyond
    detail = f"after step {worst + 1}"
    if beyond is not None:
        detail += f": {_kind(distances, bounds, beyond)}; {distances[-1]:.1e} after the last step"
    return Comparison(tensor=name, error=distances[worst], bound=bounds[worst], detail=detail)


def _zero(found: Trajectory, name: str) -> Comparison:
    return Comparison(tensor=name, error=max(found.elements[name]), bound=found.summed_rates[-1])


def _moves(found: Trajectory) -> Iterator[Comparison]:
    for side, steps in found.unchanged.items():
        other = found.unchanged["port" if side == "reference" else "reference"]
        # A rate of 0, in a warm-up's first step, changes nothing on either side; but then some other step does.
        wrong = [n for n in steps if n not in other or found.rates[n - 1] != 0.0 or len(steps) == len(found.rates)]
        detail = f"after step {', '.join(map(str, wrong))} every parameter is as before" if wrong else ""
        yield Comparison(tensor=f"the {side}", error=len(wrong), bound=0.0, detail=detail)


def _departure(found: Trajectory) -> tuple[int | None, str]:
    """The first step after which any parameter is beyond its bound, and in what way."""
    first: tuple[int, str] | None = None
    for name, distances in found.distances.items():
        if name in found.zero:
            continue
        for one, bounds in ((distances, found.bounds(name)), (found.elements[name], found.element_bounds(name))):
            beyond = (i for i, (x, bound) in enumerate(zip(one, bounds, strict=True)) if not x <= bound)
            at = next(beyond, None)
            if at is not None and (first is None or at + 1 < first[0]):
                first = (at + 1, _kind(one, bounds, at))
    return first or (None, "")


def _kind(distances: list[float], bounds: list[float], at: int) -> str:
    """A jump is far beyond the bound at once, where the step before was within a small part of it."""
    if at == 0:
        return "jump"
    before = max(distances[at - 1], bounds[at - 1] / JUMP)
    return "jump" if distances[at] > JUMP * before else "drift"


def _notes(found: Trajectory, first: int | None, departure: str, again: int) -> Iterator[str]:
    steps, way = len(found.losses), found.summed_rates[-1]
    furthest = max((found.elements[name][-1] for name in found.elements if name not in found.zero), default=0.0)
    per_unit = f", {furthest / way:.1e} for each unit of it" if way > 0 else ""
    yield f"{steps} steps, rates summed to {way:.3g}: parameters at most {furthest:.1e} apart at the end{per_unit}"
    if again and found.within():
        yield f"settled by {again} trainings of the reference beside itself, weights and gradients moved by a rounding"
    if first is not None:
        how = "in a jump" if departure == "jump" else "by drift"
        yield f"parameters depart in step {first}, {how}"
    if found.held:
        yield f"held still in the reference, because the port has only the sum: {', '.join(sorted(found.held))}"


def _share(distance: float, bound: float) -> float:
    if distance == 0.0:
        return 0.0
    return distance / bound if bound > 0.0 else float("inf")
