"""Equal in float64, too far from it in float32: what loses digits in one module."""

import numpy as np

from parity.diagnose.diagnosis import Diagnosis
from parity.diagnose.norm import FAST, is_norm
from parity.diagnose.precision import BFLOAT16 as BFLOAT16_INSIDE
from parity.diagnose.precision import LOW_PRECISION
from parity.runs import Runs
from parity.trace import module_of

TF32, BFLOAT16 = 2.0**-11, 2.0**-9
"""Roundings of TF32 and of bfloat16."""


def explain_narrow(runs: Runs, place: str) -> Diagnosis | None:
    """By the size of the error that the module makes of its own float32 inputs."""
    module = module_of(place.partition(" (batch")[0].partition(",")[0])
    reference, exact = runs.port("float32"), runs.reference("float64")
    if module not in exact.outputs or module not in reference.outputs:
        return None
    error = float(
        np.linalg.norm((reference.outputs[module] - exact.outputs[module]).ravel())
        / max(float(np.linalg.norm(exact.outputs[module].ravel())), 1e-300)
    )
    facts = runs.reference_facts.get(module)
    if is_norm(module, facts.type if facts else "") and error < 1e-2:
        return Diagnosis(
            kind=FAST,
            module=module,
            sentence=f"The port's norm loses digits in float32 ({error:.1e}), as with a variance E[x²] - E[x]²",
            fix="use_fast_variance=False: take the variance as the mean of (x - mean)²",
        )
    if TF32 / 30 < error < 10 * BFLOAT16:
        name = "TF32" if error < TF32 else "bfloat16"
        return Diagnosis(
            kind=LOW_PRECISION,
            module=module,
            sentence=f"The port's float32 run is {error:.1e} from the float64 answer, as after a product in {name}",
            fix="no cast to a narrower type, and precision=jax.lax.Precision.HIGHEST in matrix products",
        )
    return None


def explain_half_width(place: str, error: float, reference: float | None) -> Diagnosis | None:
    """Of the first tensor that is further from the float64 answer in bfloat16 than the reference's roundings allow."""
    if reference is None or not np.isfinite(error) or reference <= 0.0:
        return None
    module = module_of(place.partition(" (batch")[0])
    times = f"{error / reference:.2g} times as far from the float64 answer as the reference's"
    return Diagnosis(
        kind=BFLOAT16_INSIDE,
        module=module,
        sentence=f"In bfloat16 the port's {module} is {times}: it rounds where that keeps float32",
        fix="softmax, norms, losses and sums in float32, rounded to bfloat16 at their ends alone",
    )
