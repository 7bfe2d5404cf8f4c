"""Rung 8: the loss."""

from collections.abc import Iterator

from parity.compare import Comparison, relative_error
from parity.rungs import NotComparedError, Outcome, float32, section
from parity.rungs.forward import label
from parity.runs import Runs
from parity.tolerances import FLOAT64_RELATIVE, FLOAT64_RULE
from parity.trace import LOSS


def climb(runs: Runs) -> Outcome:
    """Raises NotComparedError if the pair brings no loss."""
    if runs.pair.port.loss is None or not runs.reference_brings("loss"):
        raise NotComparedError("the pair brings no loss: gradients are those of a fixed random projection")
    sections = [section("loss", "float64", FLOAT64_RULE, _float64(runs))]
    if sections[0].passed:
        ours, theirs = {}, {}
        for number in range(len(runs.batches)):
            name = LOSS + label(runs, number)
            ours[name] = runs.errors(runs.port("float32", number), runs.reference("float64", number))[LOSS]
            theirs[name] = runs.reference_errors(number)[0][LOSS]

        def again(draw: int) -> dict[str, float]:
            return {LOSS + label(runs, n): runs.reference_errors(n, draw)[0][LOSS] for n in range(len(runs.batches))}

        sections.append(float32.judged("loss", ours, theirs, again=again, redrawn=runs.redrawn))
    return Outcome(sections=tuple(sections))


def _float64(runs: Runs) -> Iterator[Comparison]:
    for number in range(len(runs.batches)):
        error = relative_error(runs.port("float64", number).loss, runs.reference("float64", number).loss)
        bound = runs.float64_bounds(number).get(LOSS, FLOAT64_RELATIVE)
        yield Comparison(tensor=LOSS + label(runs, number), error=error, bound=bound)
