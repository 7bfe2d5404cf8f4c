"""Rung 10: training mode. The same dropout masks handed to both give the same; each one's own masks are what they
should be; running statistics move alike.

Evidence: `rates` {site: rate}; `reference` and `port` {site: share kept of its own masks}; `shared_axes` {side: {site:
axes along which neighbours have one mask}}; `masks`, those handed in; `results` {side: what the model returned with
them}; `buffers` {name: {old, reference, port, momentum, count}}, of running statistics, by the port's names.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from parity import masks as drawn_masks
from parity.compare import Comparison
from parity.masks import Drawn
from parity.pair import Masks, Precision
from parity.rungs import NotComparedError, Outcome, Section, float32, running_statistics, section
from parity.rungs.forward import compare_all
from parity.rungs.gradients import compare_traces
from parity.rungs.rows import common_rows, tiled
from parity.runs import GATES, Runs, zero_among
from parity.statistics import share_test
from parity.tolerances import DROPOUT_FALSE_ALARM, EXACT_RULE, FLOAT64_GRADIENTS_RULE, INDEPENDENT_RULE, SHARE_RULE
from parity.trace import Trace, module_of
from parity.weights.variation import moved_by_a_rounding

Rates = Mapping[str, float]
Axes = Mapping[str, frozenset[int]]


def climb(runs: Runs) -> Outcome:
    """Raises NotComparedError if there is neither dropout nor anything else that training mode changes."""
    runs.live_reference()
    masks, own = (runs.draw_masks(side, runs.seed) for side in ("reference", "port"))
    sites = section("sites of dropout", "static", EXACT_RULE, _sites(masks, own))
    if not sites.passed and (masks or own):
        return Outcome(sections=(sites,), evidence={"masks": masks})
    reference = _training(runs, "reference", masks)
    statistics = running_statistics.changed(runs, reference)
    if not masks and not statistics:
        raise NotComparedError("neither side has dropout, or statistics that training mode changes")
    port = _training(runs, "port", masks)
    exact = list(_compared(runs, reference, port))
    sections = [section("training mode, the same masks", "float64", FLOAT64_GRADIENTS_RULE, exact)]
    notes, evidence = list[str](), dict[str, Any]({"masks": masks})
    evidence["results"] = {"reference": reference.results, "port": port.results}
    if all(comparison.passed for comparison in exact):
        sections += _float32(runs, masks, reference)
    elif masks:
        notes.append(_first_difference(runs, masks))
    if masks:
        notes += _in_force(runs, reference)
        sections.append(sites)
        found, of_masks = _own_masks(runs)
        sections += found
        evidence |= of_masks
    if statistics:
        compared, evidence["buffers"] = running_statistics.compare(runs, reference, port, statistics)
        sections.append(compared)
    known = tuple(k for k in runs.known if k.kind == running_statistics.VARIANCE and statistics)
    return Outcome(sections=tuple(sections), known=known, notes=tuple(n for n in notes if n), evidence=evidence)


def _training(
    runs: Runs,
    side: str,
    masks: Masks,
    precision: Precision = "float64",
    *,
    weights: Mapping[str, np.ndarray] | None = None,
    tap: bool = False,
) -> Trace:
    # A model without a site for masks runs in training mode all the same.
    batch, given = runs.batches[0], masks or None
    if side == "reference":
        return runs.run_reference(batch, precision, weights=weights, training=True, masks=given)
    return runs.run_port(batch, precision, weights=weights, tap=tap, training=True, masks=given)


def _compared(runs: Runs, reference: Trace, port: Trace) -> Iterator[Comparison]:
    bounds = runs.float64_bounds(0)
    expected = reference.results | runs.loss(reference)
    yield from compare_all(port.results | runs.loss(port), expected, bounds=bounds)
    if bounds:  # float64 ends inside, and with it what could be said of gradients that are zero
        zero = zero_among(
            runs.gradients_in_port_layout(reference), runs.summed_in_port_layout(reference), dtype=np.float32
        )
        answer = {n: a for n, a in runs.gradients_in_port_layout(reference).items() if n not in zero}
        got = {n: a for n, a in port.gradients.items() if n not in zero}
        yield from compare_all(got, answer, bounds=runs.float64_gradient_bounds(0))
    else:
        yield from compare_traces(runs, reference, port)


def _float32(runs: Runs, masks: Masks, exact: Trace) -> Iterator[Section]:
    """The second gate, on results and loss: how gradients round was asked in evaluation mode, at a price."""
    theirs = _training(runs, "reference", masks, "float32")
    ours = runs.run_port(runs.batches[0], "float32", tap=False, training=True, masks=masks or None, backward=False)

    def errors(run: Trace, exact: Trace) -> dict[str, float]:
        errors, wanted = runs.errors(run, exact), exact.results | runs.loss(exact)
        return {name: errors[name] for name in wanted}

    def further(draw: int) -> dict[str, float]:
        moved = moved_by_a_rounding(runs.weights, seed=draw)
        again = [_training(runs, "reference", masks, precision, weights=moved) for precision in GATES]
        return errors(again[1], again[0])

    yield float32.judged(
        "training mode, the same masks", errors(ours, exact), errors(theirs, exact), again=further, redrawn=runs.redrawn
    )


def _first_difference(runs: Runs, masks: Masks) -> str:
    """Which module is the first to differ with the same masks, with both watched."""
    reference, port = _training(runs, "reference", masks), _training(runs, "port", masks, tap=True)
    names = runs.comparable(reference, port)
    for name, array in reference.outputs.items():
        if name in names and any(
            not c.passed for c in compare_all({name: port.outputs.get(name, np.zeros(0))}, {name: array})
        ):
            return f"with the same masks, the first module that differs is {module_of(name)}"
    return "with the same masks, every module is equal, the model's own result is not"


def _in_force(runs: Runs, reference: Trace) -> Iterator[str]:
    evaluated = runs.reference("float64", 0)
    # In training a model may return something else.
    both = reference.results.keys() & evaluated.results.keys()
    if both and all(np.array_equal(reference.results[name], evaluated.results[name]) for name in both):
        yield "the masks change nothing in what the reference returns: are they in force?"


def _rates(runs: Runs, masks: Masks) -> dict[str, float]:
    """By the side's own word, or as the reference's Dropout modules have it."""
    runner = runs.live_reference()
    module, side = runner.module("float32"), runs.pair.reference
    if side.dropout_rates is not None:
        return dict(side.dropout_rates(module, runs.batches[0]))
    rates = {}
    for site in masks:
        rate = getattr(module.get_submodule(module_of(site)), "p", None) if not side.draw_dropout else None
        if rate is not None:
            rates[site] = float(rate)
    return rates


def _own_masks(runs: Runs) -> tuple[list[Section], dict[str, Any]]:
    """Sections on the masks that each side draws by itself."""
    first = runs.draw_masks("reference", runs.seed)
    rates = _rates(runs, first)
    # One draw of a small batch costs as much as one of a large one.
    times = drawn_masks.batches_a_draw(first, rates)
    batch = runs.batches[0]
    many = tiled(batch, times) if common_rows(batch) and not runs.pair.part else None

    def draw(side: str) -> Drawn:
        return drawn_masks.draw(lambda seed: runs.draw_masks(side, runs.seed + seed, inputs=many), rates)

    sides = {side: draw(side) for side in ("reference", "port")}
    reference, port = sides["reference"], sides["port"]
    limit = DROPOUT_FALSE_ALARM / max(1, 6 * len(reference.sites))
    shared = {side: _shared_axes(drawn, rates, limit) for side, drawn in sides.items()}
    sections = []
    shares = [c for side, drawn in sides.items() for c in _shares(side, drawn, rates, limit)]
    if shares:
        sections.append(section("each side's own masks: share kept", "statistics", SHARE_RULE, shares))
    independent = [*_sharing(reference, port, shared), *_alike(sides), *_repeating(sides)]
    sections.append(section("each side's own masks: independent", "statistics", INDEPENDENT_RULE, independent))
    evidence = {
        "rates": rates,
        "reference": {name: site.share for name, site in reference.sites.items()},
        "port": {name: site.share for name, site in port.sites.items()},
        "shared_axes": shared,
    }
    return sections, evidence


def _sites(reference: Masks, port: Masks) -> Iterator[Comparison]:
    for name in dict.fromkeys([*reference, *port]):
        if name not in reference or name not in port:
            which = "the port" if name in port else "the reference"
            yield Comparison(tensor=name, error=float("inf"), bound=0.0, detail=f"only {which} drops out here")
            continue
        # Channels may come last on one side.
        expected, found = reference[name].shape, port[name].shape
        same = sorted(expected) == sorted(found)
        detail = f"expected masks of shape {expected}, found {found}"
        yield Comparison(tensor=name, error=0.0 if same else float("inf"), bound=0.0, detail=detail)


def _shares(side: str, drawn: Drawn, rates: Rates, false_alarm: float) -> Iterator[Comparison]:
    sites = {name: site.counted_once() for name, site in drawn.sites.items()}
    counts = {f"{name}, {side}": (s.kept, s.size, rates[name]) for name, s in sites.items() if name in rates}
    for rate, (kept, size) in drawn_masks.pooled(sites, rates).items():
        counts[f"all sites of rate {rate:g}, {side}"] = (kept, size, rate)
    for name, (kept, size, rate) in counts.items():
        verdict = share_test(kept, size, expected=1.0 - rate, false_alarm=false_alarm)
        yield Comparison(tensor=name, error=verdict.share, bound=1.0, detail=verdict.detail)


def _shared_axes(drawn: Drawn, rates: Rates, false_alarm: float) -> Axes:
    return {
        name: site.shared_axes(rates.get(name, 1.0 - site.share), false_alarm=false_alarm)
        for name, site in drawn.sites.items()
    }


def _sharing(reference: Drawn, port: Drawn, shared: Mapping[str, Axes]) -> Iterator[Comparison]:
    """Along which axes neighbours have one mask: on both sides the same (P21)."""
    for name in reference.sites.keys() & port.sites.keys():
        theirs, ours = shared["reference"][name], shared["port"][name]
        if reference.sites[name].shape != port.sites[name].shape:  # axes in another order, but the batch is the first
            theirs, ours = theirs & {0}, ours & {0}
        detail = ""
        if theirs != ours:
            detail = f"one mask along axes: expected {sorted(theirs) or 'none'}, found {sorted(ours) or 'none'}"
            detail += "; axis 0 is the batch" if 0 in theirs ^ ours else ""
        yield Comparison(tensor=name, error=len(theirs ^ ours), bound=0.0, detail=detail)


def _alike(sides: Mapping[str, Drawn]) -> Iterator[Comparison]:
    reference, port = sides["reference"].alike(), sides["port"].alike()
    differing = sorted(reference ^ port)
    for a, b in differing:
        detail = f"{a} and {b} have one mask in the {'port' if (a, b) in port else 'reference'} alone"
        yield Comparison(tensor=b, error=1.0, bound=0.0, detail=detail)
    if not differing:
        yield Comparison(tensor="sites with one mask", error=0.0, bound=0.0)


def _repeating(sides: Mapping[str, Drawn]) -> Iterator[Comparison]:
    for side, drawn in sides.items():
        sites = sorted(drawn.repeating())
        detail = f"the same mask with two seeds: {', '.join(sites)}" if sites else ""
        yield Comparison(tensor=f"two seeds, {side}", error=len(sites), bound=0.0, detail=detail)
