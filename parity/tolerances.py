"""Every bound of the parity check, with its reason. Loosening one needs a line in CHANGELOG.md."""

import dataclasses
import math

import numpy as np

FLOAT64_RELATIVE = 1e-12
"""Norm-wise relative error between the two float64 runs. Equal mathematics differ by the order of sums: 1e-15 to 1e-14
a layer; a real porting bug, even a norm's eps of 1e-6 for 1e-5, is at least 1e-8. Between lies a wide gap."""

FLOAT32_RATIO = 2.0
"""The port's float32 error against the float64 answer may be this many times the reference's. Two equally good
float32 programs are within 0.96 and 1.2 of each other on tensors large enough to judge."""

FLOAT32_FLOOR = 16 * 2.0**-24
"""Float32 errors up to 16 half-units, relative to the norm of the tensor, are not held against the port tensor by
tensor: on a few elements a ratio of two rounding errors exceeds 2 by chance (8% of the time on 5 elements). Pooled over
all tensors there is no floor."""

FLOAT32_DRAWS = 8
"""A rounding error is one draw from a distribution. A tensor of the port beyond the bound is judged by the reference's
largest error over up to so many further runs, in float32 and in float64, with every weight moved by at most one
rounding: the error of an ill-conditioned gradient, or of a relu whose input is within rounding of its kink. So is the
pooled error, by the largest pooled one: over many tensors those are all alike, over a few they are chance too. The
report names the tensors that needed it."""

ZERO_GRADIENT_UNITS = 64.0
"""A bias gradient is zero in exact arithmetic if its norm is below so many units of rounding of the sum of absolute
values it is made of. The key projection's is: softmax does not see a shift that all keys share. What is left is
rounding noise, as large as the number of roundings, and a relative error of it would be noise over noise. Where no sum
was watched, or a smaller one, the norm of all gradients together stands for it: with one key only, what flows into the
query projection is noise already."""

UNEQUAL_AFTER_ROUNDING = 1e-6
"""Share of float64 logits that may round to different float32 values: those near a tie, measured at 4 in 48 million.
At least one is allowed, whatever the number of logits."""

UNITS_AFTER_ROUNDING = 1
"""Largest distance, in float32 units in the last place, of logits that do round differently."""

GRADIENTS_UNEQUAL_AFTER_ROUNDING = 1e-3
"""Share of float64 gradient entries that may round to different float32 values: an entry is a sum with cancellation,
its relative error as many times larger than a logit's, and with it the share near a tie."""

PROBE_RELATIVE = 1e-10
"""The same for a module that is given extreme inputs by itself. A mean of 1e4 beside a deviation of 1 costs four digits
of any variance, and E[x²] - E[x]² eight: 1e-12 and 1e-8."""

SCORES_RELATIVE = 1e-10
"""Norm-wise relative error of the scores of decoded sequences: sums of log-probabilities over up to hundreds of steps,
each 1e-14 to 1e-13 away."""

EQUAL_GRADIENTS = 64.0
"""Two biases that are only ever added have one gradient. Where a framework works it out twice, by sums in another
order, the two may differ by so many units of rounding of the largest entry."""

HALF_UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-9}
"""Largest relative error of one rounding."""

GRADIENT_HALF_UNITS = 16.0
"""Half-units of the norm of all gradients together that are not held against any one of them. A query projection behind
a saturated softmax has a thousandth of it, a difference of terms as large as the others' gradients, and their rounding.
Of eighty clean pairs of the self-test three were beyond twice the reference's error for this, by up to 9.4; all of them
have doubled weights."""

GRADIENT_ENTRY_FLOOR = 1e-6
"""Entries of a gradient below this share of the root mean square of its entries are not looked at after rounding to
float32. To round alike, one of a millionth needs to be within 1e-13 of that mean; float64 sums with cancellation are
1e-15 to 1e-14 apart, and behind a saturated softmax a tenth of the entries are that small."""

BFLOAT16_SUM_HALF_UNITS = 3.0
"""XLA on CPU adds up the gradient of what was broadcast (a bias, a norm's scale) term by term in bfloat16: a walk of as
many roundings as there are terms, so times the root of their number. Measured on small convolutions, 120 terms: up to
1.6; more where terms cancel."""

OF_ALL_GRADIENTS = f", or {GRADIENT_HALF_UNITS:g} half-units of the norm of all gradients together"
OF_LONG_SUMS = (
    ", or, of what is a sum over places, what it comes to in bfloat16: "
    f"{BFLOAT16_SUM_HALF_UNITS:g} half-units times the root of their number"
)
FLOAT64_RULE = f"relative error of two float64 programs: at most {FLOAT64_RELATIVE:.0e}"
FLOAT64_GRADIENTS_RULE = f"{FLOAT64_RULE}{OF_ALL_GRADIENTS}"
PROBE_RULE = f"relative error of two float64 programs on extreme inputs: at most {PROBE_RELATIVE:.0e}"
DECODING_RULE = f"the same ids; scores within a relative error of {SCORES_RELATIVE:.0e}"
ROUNDING_RULE = "float64 values rounded to float32: all but those near a tie are the same bits"
ZERO_RULE = f"noise of at most {ZERO_GRADIENT_UNITS:g} roundings of the absolute values that were summed"
BITS_RULE = "the same bits"
EXACT_RULE = "the same"


def zero_noise(summed: float, dtype: type) -> float:
    """The norm up to which a gradient is rounding noise, given the norm of the absolute values that were summed."""
    return ZERO_GRADIENT_UNITS * float(np.finfo(dtype).eps) * summed


@dataclasses.dataclass(frozen=True, kw_only=True)
class NarrowRule:
    """How the runs of a narrow precision are judged by the float64 answer."""

    precision: str
    ratio: float
    floor: float
    also: str = ""
    """What else is allowed to some tensors, for the sentence."""

    @property
    def sentence(self) -> str:
        """The rule, as a report shows it."""
        return (
            f"the port's distance from the float64 answer: at most {self.ratio:g} times the reference's, "
            f"or {self.floor:.1e} of the tensor's norm{self.also}"
        )


FLOAT32 = NarrowRule(precision="float32", ratio=FLOAT32_RATIO, floor=FLOAT32_FLOOR)

CTRANSLATE2 = NarrowRule(precision="float32", ratio=4.0, floor=FLOAT32_FLOOR)
"""CTranslate2's log-probabilities: kernels of another library, no float64 to compare, and too few of them to be judged
by further draws. In 42 comparisons on 14 random models it was 0.4 to 2.0 times as far from the float64 answer as our
twin in float32; with positions that begin one later, 700,000 times."""

BFLOAT16 = NarrowRule(precision="bfloat16", ratio=3.0, floor=8 * 2.0**-9)
"""As float32, with the 8 bits of bfloat16, and a floor of 8 half-units, 1.6%: XLA adds up a bias's gradient in bfloat16
where torch does so in float32. Where each framework rounds is its compiler's choice (one that fuses keeps
float32 in between), so that one side may be nearer to the answer by a factor. On the demo's trained weights a gradient
of an embedding's table was 1.9 times as far off as torch's: three times is the bound."""


def gradient_floor(own: float, together: float, precision: str) -> float:
    """Relative error of a gradient of norm `own` that is rounding of all gradients, of norm `together`."""
    return GRADIENT_HALF_UNITS * HALF_UNITS[precision] * together / own if own > 0.0 else 0.0


def sum_floor(terms: float) -> float:
    """Relative error that a sum of so many terms, added up in bfloat16, may have."""
    return float(BFLOAT16_SUM_HALF_UNITS * math.sqrt(terms) * HALF_UNITS["bfloat16"])


def allowed_unequal(count: int) -> int:
    """How many of `count` logits may differ after rounding to float32."""
    return max(1, math.floor(count * UNEQUAL_AFTER_ROUNDING))


FLOAT32_SCHEDULE = 16 * 2.0**-24
"""Relative error of a learning rate that one side computes in float32: a few roundings. Noam's rate of the wrong step
is further away up to step 500,000."""

TRAJECTORY_LOSS = 1e-10
"""Relative difference of the losses of two float64 trainings. The step itself is equal to 1e-13; what is left of it
grows with the steps, by 1e-13 to 1e-12 in a hundred (measured on our twins)."""

TRAJECTORY_PARAMETERS = 1e-10
"""Difference between two parameters (root mean square over a tensor), per unit of the way gone: the sum of learning
rates or, where that is larger, of the largest changes. Adam divides a gradient by its own size, so errors are in
proportion to the steps, not to the parameter. Measured on the twins: 1e-15 to 2e-13 after a hundred steps."""

TRAJECTORY_ELEMENT = 1e-6
"""The same for the element that differs most. Where a gradient is as small as Adam's eps, 1e-9 of a usual one, its
rounding is a millionth of it, and Adam moves the element by that: among the 65 million elements of base, one was 1.4e-9
of the way apart. A fault in a single element (a row of padding, a tied one) moves it by the way itself."""

INITIALISATION_FALSE_ALARM = 1e-6
"""Probability that any test of the initialisation of a correct port fails, over all parameters: the bound on each is
shared out (Bonferroni). Tests count six standard errors as chance; a scale off by √2 is ten of them and more."""

DROPOUT_FALSE_ALARM = 1e-6
"""The same for the tests of dropout masks."""

INITIALISATION_RULE = (
    "the worst of six statistics (mean, scale, shape, distribution, range, norms of rows) as a share of what chance "
    f"gives once in {1 / INITIALISATION_FALSE_ALARM:,.0f} runs, all parameters together"
)
INITIALISATION_FIXED_RULE = "elements with the same value in every draw: the same ones on both sides, the same value"
TRAJECTORY_DRAWS, TRAJECTORY_RATIO = 3, 10.0
"""A parameter beyond its bound is judged again by how far apart two trainings of the reference itself end up, where
every weight was moved by at most one rounding at the start, and every gradient gets the noise that it may have
(GRADIENT_HALF_UNITS): over so many of them, the largest distance, so many times. An element whose gradient is a
billionth of the others' has a relative error a billion times theirs, and Adam moves it by that; the port and those
trainings agree on how many do. Behind a saturated softmax one framework subtracts equal numbers where the other does
not, so that moving the weights alone shows nothing. A fault is some thousand times larger."""

INITIALISATION_EXEMPT_RULE = "the pair says so: of the same shape, and finite"
SHARE_RULE = (
    f"share of kept elements against 1 - rate, as a share of what chance gives once in {1 / DROPOUT_FALSE_ALARM:,.0f} "
    "runs, all sites together"
)
INDEPENDENT_RULE = "no mask for several elements, sites or seeds, unless the reference has it too"
STATISTICS_RULE = (
    f"relative difference: at most {FLOAT64_RELATIVE:.0e}; a variance that Flax keeps biased and torch unbiased, by "
    "what the batch adds to it, times (n - 1) / n"
)
SCHEDULE_RULE = (
    f"relative difference: at most {FLOAT64_RELATIVE:.0e}, "
    f"or {FLOAT32_SCHEDULE:.1e} for a rate that is computed in float32"
)
UPDATE_RULE = (
    f"relative difference: at most {FLOAT64_RELATIVE:.0e}, beside the rounding of the parameter it is added to"
)
TRAJECTORY_LOSS_RULE = f"relative difference of two float64 trainings: at most {TRAJECTORY_LOSS:.0e}"
TRAJECTORY_RULE = (
    f"root mean square difference of a tensor: at most {TRAJECTORY_PARAMETERS:.0e} for each unit of the learning rates "
    f"summed so far, its largest one {TRAJECTORY_ELEMENT:.0e}, beside one rounding of the parameter a step; beyond "
    f"that, {TRAJECTORY_RATIO:g} times what roundings of weights, and noise in gradients, change in the reference"
)
TRAJECTORY_ZERO_RULE = (
    "true gradient zero, so it moves by rounding noise alone: at most the learning rates summed so far"
)
MOVES_RULE = "a step whose learning rate and gradient are not zero changes the parameters"


MODES_RULE = (
    f"as two trainings: relative difference of losses at most {TRAJECTORY_LOSS:.0e}; of parameters, root mean square, "
    f"{TRAJECTORY_PARAMETERS:.0e} of the way gone so far, their largest {TRAJECTORY_ELEMENT:.0e} of it, beside one "
    "rounding of the parameter a step"
)
"""Of a training step in another mode. Devices and micro-batches change the order of sums and nothing else, which is
less than what two frameworks differ by; so the bounds of the trajectory hold, per unit of the largest changes. A mean
of means, a mask of another row or a gradient counted twice is a million times larger."""

TRAINER_LOSS = 1e-9
"""Difference of the losses, in nats a token, of two float64 trainings of some fifty steps on real text, our trainer's
and the reference's. A hundred float64 steps drift apart by 5e-11 to 1.5e-10 in parameters, mostly biases, and a loss of
2 to 10 nats by no more than them; a wrong eps, mask or row is at least 1e-6 within a few steps."""
TRAINER_RULE = f"difference of the losses of two float64 trainings: at most {TRAINER_LOSS:.0e}"

PRODUCT_RELATIVE = 2e-6
"""Norm-wise relative error of a product of 64 x 64 matrices of random float32 numbers. Measured: full float32 1.4e-7;
three passes of bfloat16 4.4e-6, TF32 (11 bits) 2.9e-4, bfloat16 (8 bits) 2.3e-3, these three by rounding entries."""
PRODUCT_RULE = f"relative error of a float32 matrix product: at most {PRODUCT_RELATIVE:.0e}, as full float32 has it"
REPEATED_RULE = (
    f"two runs of one side on the same input, with other random numbers: relative difference at most "
    f"{FLOAT64_RELATIVE:.0e}"
)


def updated(weight: float, update: float) -> float:
    """The bound on an update's relative error, read off a parameter before and after: norms of both."""
    noise = 4.0 * float(np.finfo(np.float64).eps) * weight
    return FLOAT64_RELATIVE + (noise / update if update > 0.0 else 0.0)


def trained_apart(way: float, steps: int, largest: float, *, per_unit: float = TRAJECTORY_PARAMETERS) -> float:
    """How far two parameters may be apart after `steps` that sum up to `way`; `largest` is the parameter's own size."""
    return per_unit * way + steps * float(np.finfo(np.float64).eps) * largest
