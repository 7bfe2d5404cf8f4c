"""Two-sample tests with a stated rate of false alarms, and what they can see.

Every test gives a `Verdict`: its statistic as a share of what chance allows. Above 1 the two samples are not from the
same distribution, except once in so many times.
"""

import dataclasses
import math
from statistics import NormalDist

import numpy as np

KOLMOGOROV = 2.17
"""P(D > d) <= 2.17 exp(-2 d² n m / (n + m)) for two samples of n and m (Wei and Dudley 2012: proven for n = m >= 4)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """One test."""

    test: str
    share: float
    """The statistic over its limit."""
    detail: str
    """What was expected, what was found, and from which difference on it is seen."""


def normal_limit(false_alarm: float) -> float:
    """How many standard errors are exceeded, to either side, with this probability."""
    return -NormalDist().inv_cdf(false_alarm / 2.0)


def mean_test(expected: np.ndarray, found: np.ndarray, *, false_alarm: float) -> Verdict:
    """Whether both have the same mean."""
    error = math.sqrt(expected.var() / expected.size + found.var() / found.size)
    limit = normal_limit(false_alarm) * error
    a, b = float(expected.mean()), float(found.mean())
    return Verdict(
        test="mean",
        share=_share(abs(b - a), limit),
        detail=f"mean: expected {a:.3g}, found {b:.3g}; seen from {limit:.1e} on",
    )


def scale_test(expected: np.ndarray, found: np.ndarray, *, false_alarm: float) -> Verdict:
    """Whether both have the same standard deviation: the difference of the logarithms of their variances."""
    limit = normal_limit(false_alarm) * math.sqrt(log_variance_error(expected) + log_variance_error(found))
    a, b = float(expected.std()), float(found.std())
    if a == 0.0 or b == 0.0:
        return Verdict(test="scale", share=0.0 if a == b else math.inf, detail=f"standard deviation {a:.3g}, {b:.3g}")
    return Verdict(
        test="scale",
        share=_share(abs(2.0 * math.log(b / a)), limit),
        detail=(
            f"standard deviation: expected {a:.3g}, found {b:.3g}, {b / a:.3f} times that; "
            f"a factor is seen from {math.exp(limit / 2.0):.3f} on"
        ),
    )


def shape_test(expected: np.ndarray, found: np.ndarray, *, false_alarm: float) -> Verdict:
    """Whether the mean absolute deviation has the same ratio to the standard deviation.

    0.80 for a normal distribution, 0.81 for one cut off at two standard deviations, 0.87 for a uniform one (Geary's
    test of normality). The ratio does not depend on the scale, and hardly on a few large values.
    """
    (a, a_error), (b, b_error) = _geary(expected), _geary(found)
    limit = normal_limit(false_alarm) * math.hypot(a_error, b_error)
    return Verdict(
        test="shape",
        share=_share(abs(b - a), limit),
        detail=(
            f"mean absolute over standard deviation: expected {a:.3f} ({_resembles(a)}), "
            f"found {b:.3f} ({_resembles(b)}); seen from {limit:.3f} on"
        ),
    )


def distribution_test(expected: np.ndarray, found: np.ndarray, *, false_alarm: float) -> Verdict:
    """Kolmogorov and Smirnov: the largest distance between the two empirical distribution functions."""
    a, b = np.sort(expected), np.sort(found)
    at = np.concatenate([a, b])
    distances = np.abs(np.searchsorted(a, at, side="right") / a.size - np.searchsorted(b, at, side="right") / b.size)
    limit = kolmogorov_limit(a.size, b.size, false_alarm=false_alarm)
    distance = float(distances.max())
    return Verdict(
        test="distribution",
        share=_share(distance, limit),
        detail=f"distance of the distributions: {distance:.3f}; seen from {limit:.3f} on",
    )


def range_test(expected: np.ndarray, found: np.ndarray, *, false_alarm: float) -> Verdict:
    """How many values of one sample are beyond all values of the other: of any number, and of any distribution.

    That the k largest and the l smallest of all n + m values are among the n has the probability
    n (n - 1) ... / ((n + m) (n + m - 1) ...), with k + l factors each, and k + l has k + l + 1 ways to come about.
    """
    worst = max(
        (
            (_log_beyond(a, b), int(np.count_nonzero((a < b.min()) | (a > b.max()))), name)
            for a, b, name in (
                (found, expected, "found"),
                (expected, found, "expected"),
            )
        ),
        key=lambda one: -one[0],
    )
    surprise, count, name = worst
    other = "expected" if name == "found" else "found"
    return Verdict(
        test="range",
        share=surprise / math.log(false_alarm / 2.0),
        detail=f"{count} values {name} beyond every one {other}",
    )


def share_test(kept: int, size: int, *, expected: float, false_alarm: float) -> Verdict:
    """Whether `kept` of `size` independent draws fit a probability."""
    limit = normal_limit(false_alarm) * math.sqrt(expected * (1.0 - expected) / size)
    found = kept / size
    return Verdict(
        test="share",
        share=_share(abs(found - expected), limit),
        detail=f"share kept: expected {expected:.5g}, found {found:.5g} of {size:,}; seen from {limit:.1e} on",
    )


def kolmogorov_limit(first: int, second: int, *, false_alarm: float) -> float:
    """The distance of two samples of these sizes that is exceeded with at most this probability."""
    return math.sqrt(math.log(KOLMOGOROV / false_alarm) * (first + second) / (2.0 * first * second))


def normal_distance(factor: float) -> float:
    """Largest distance between the distribution functions of two normal distributions, one `factor` times as wide."""
    if factor == 1.0:
        return 0.0
    at = math.sqrt(2.0 * math.log(factor) / (1.0 - factor**-2.0))
    return NormalDist().cdf(at) - NormalDist().cdf(at / factor)


def log_variance_error(sample: np.ndarray) -> float:
    """Squared standard error of the logarithm of the variance: (kurtosis - 1) / n."""
    centred = sample - sample.mean()
    variance = float(np.mean(centred**2))
    return (float(np.mean(centred**4)) / variance**2 - 1.0) / sample.size if variance > 0.0 else 0.0


def _geary(sample: np.ndarray) -> tuple[float, float]:
    """Mean absolute over standard deviation, and its standard error by the delta method."""
    centred = np.abs(sample - sample.mean())
    deviation = math.sqrt(float(np.mean(centred**2)))
    if deviation == 0.0:
        return 0.0, 0.0
    ratio = float(centred.mean()) / deviation
    influence = centred / deviation - ratio - 0.5 * ratio * ((centred / deviation) ** 2 - 1.0)
    return ratio, float(influence.std()) / math.sqrt(sample.size)


def _resembles(ratio: float) -> str:
    known = {"uniform": 0.866, "normal": 0.798, "truncated normal": 0.814, "two values": 1.0, "Laplace": 0.707}
    return min(known, key=lambda name: abs(known[name] - ratio)) + "-like"


def _log_beyond(sample: np.ndarray, other: np.ndarray) -> float:
    """Logarithm of the probability of as many values beyond the other sample's; at most 0."""
    beyond = int(np.count_nonzero((sample < other.min()) | (sample > other.max())))
    size, both = sample.size, sample.size + other.size
    factors = np.log(size - np.arange(beyond)) - np.log(both - np.arange(beyond))
    return min(0.0, float(factors.sum()) + math.log(beyond + 1))


def _share(difference: float, limit: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / limit if limit > 0.0 else math.inf
