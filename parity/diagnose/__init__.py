"""What a difference is: the failing module is tried with the usual suspects, and the one that explains it says so.

A suspect is a function of a `Case` (the first value that a module makes differently, and all it may have been made
from) that gives a `Diagnosis`, or None. Those here explain *both* sides by one formula in numpy float64, with factors
in which ports go wrong (eps, axis, which mask, ...): the setting that gives the reference's value is looked for first,
then the one nearest to it that gives the port's. What changed is named, in a sentence, with the fix; what fits neither
is left alone. See `engine.explain`. Rungs without a failing module (optimizer, schedule, ...) hand over evidence, which
is explained in the same way.

`kinds()` lists what can be named. A suspect of one's own is a few lines:

    from parity.diagnose import suspect

    @suspect("sign", sentence="the port's output has the other sign", fix="negate it")
    def negated(case):
        return -case.got

    Pair(..., suspects=(negated,))

The function computes what the reference returns, from what the port returned and was given; the suspect explains the
difference if that is so. `register(negated)` tries it with every pair.

Nothing here is shared with the code that plants faults in the self-test: a diagnosis is not the inverse of a planting.
"""

from parity.diagnose.attention import attention
from parity.diagnose.between import between
from parity.diagnose.by_rung import diagnose, diagnose_case
from parity.diagnose.case import Case, CaseBuilder
from parity.diagnose.convolution import convolution
from parity.diagnose.diagnosis import Diagnosis, kind, kinds
from parity.diagnose.embedding import embedding
from parity.diagnose.engine import Factor, Option, explain
from parity.diagnose.exchange import exchange
from parity.diagnose.group_norm import group_norm
from parity.diagnose.ids import ids
from parity.diagnose.linear import linear
from parity.diagnose.norm import fast_variance, norm
from parity.diagnose.outputs import outputs
from parity.diagnose.pooling import pooling
from parity.diagnose.positions import positions
from parity.diagnose.precision import precision
from parity.diagnose.recurrent import recurrent
from parity.diagnose.suspects import REGISTRY, Suspect, register, suspect

for _family in (
    norm,
    group_norm,
    fast_variance,
    embedding,
    ids,
    positions,
    linear,
    recurrent,
    convolution,
    pooling,
    attention,
    between,
    precision,
    exchange,
    outputs,
):
    # In the order in which they are tried: the more specific first.
    register(_family)

__all__ = [
    "REGISTRY",
    "Case",
    "CaseBuilder",
    "Diagnosis",
    "Factor",
    "Option",
    "Suspect",
    "diagnose",
    "diagnose_case",
    "explain",
    "kind",
    "kinds",
    "register",
    "suspect",
]
