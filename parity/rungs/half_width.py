"""Rung 17: both sides in bfloat16, each by its distance from the float64 answer."""

from parity.rungs import NotComparedError, Outcome, float32
from parity.rungs.forward import label
from parity.rungs.gradients import gradient_errors
from parity.runs import Runs
from parity.tolerances import BFLOAT16


def climb(runs: Runs) -> Outcome:
    """Raises NotComparedError where no live reference can be run in bfloat16."""
    runs.live_reference()
    sections = []
    for number, inputs in enumerate(runs.batches):
        exact = runs.reference("float64", number)
        try:
            reference = runs.run_reference(inputs, "bfloat16")
        except RuntimeError as error:  # torch has kernels that know no bfloat16
            raise NotComparedError(f"the reference does not run in bfloat16: {error}") from error
        port = runs.run_port(inputs, "bfloat16")
        names = runs.comparable(exact, port) | exact.results.keys()
        theirs, ours = runs.errors(reference, exact), runs.errors(port, exact)
        sections.append(
            float32.judged(
                "modules and results" + label(runs, number),
                {name: ours[name] for name in ours if name in names},
                {name: theirs[name] for name in theirs if name in names},
                rule=BFLOAT16,
            )
        )
        answer, zero = runs.reference_gradients(number), runs.zero_gradients(number)
        sections.append(
            float32.judged(
                "gradients" + label(runs, number),
                gradient_errors(port.gradients, answer, zero),
                gradient_errors(runs.gradients_in_port_layout(reference), answer, zero),
                rule=BFLOAT16,
            )
        )
    return Outcome(sections=tuple(sections))
