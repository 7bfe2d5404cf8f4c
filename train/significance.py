"""Whether one set of translations is better than another, or only luckier: paired bootstrap resampling (Koehn 2004)."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import sacrebleu
from sacrebleu.significance import PairedTest

SEED_VARIABLE = "SACREBLEU_SEED"
BOOTSTRAP_SAMPLES = 1_000
BOOTSTRAP_SEED = 12_345
"""sacreBLEU's own default, whatever the environment says. Never 0, which sacreBLEU takes for no seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Between the scores of a run and of the one it is compared with, by paired bootstrap resampling (Koehn 2004)."""

    metric: str
    signature: str
    """With seed and number of samples."""
    score: float
    interval: tuple[float, float]
    """95% of the samples' scores: sacreBLEU's mean, less and plus half the width."""
    against_score: float
    against_interval: tuple[float, float]
    p_value: float
    """How likely a difference of this size is if neither is better."""

    @property
    def difference(self) -> float:
        """Above 0: the run is better than the other one."""
        return self.score - self.against_score


def compare(hypotheses: Sequence[str], against: Sequence[str], *, references: Sequence[str]) -> tuple[Difference, ...]:
    """Tests the differences of BLEU and chrF2 by sacreBLEU's paired bootstrap, both with the same samples and seed.

    Where there is no difference p is 1.
    """
    systems: list[tuple[str, Sequence[str]]] = [("against", list(against)), ("run", list(hypotheses))]
    metrics: dict[str, Any] = {"BLEU": sacrebleu.BLEU(), "chrF2": sacrebleu.CHRF()}
    with _seeded(BOOTSTRAP_SEED):
        test = PairedTest(systems, metrics, [list(references)], test_type="bs", n_samples=BOOTSTRAP_SAMPLES)
        signatures, results = test()
    differences = []
    for metric in metrics:
        tested: Any = results[metric]
        theirs, ours = tested
        intervals = [(float(result.mean - result.ci), float(result.mean + result.ci)) for result in tested]
        differences.append(
            Difference(
                metric=metric,
                signature=str(signatures[metric]),
                score=ours.score,
                interval=intervals[1],
                against_score=theirs.score,
                against_interval=intervals[0],
                # sacreBLEU counts samples beyond the difference: by that, a run would be surely better than itself.
                p_value=1.0 if ours.score == theirs.score else float(ours.p_value),
            )
        )
    return tuple(differences)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """sacreBLEU takes its seed from the environment, and from nowhere else."""
    before = os.environ.pop(SEED_VARIABLE, None)
    os.environ[SEED_VARIABLE] = str(seed)
    try:
        yield
    finally:
        del os.environ[SEED_VARIABLE]
        os.environ |= {} if before is None else {SEED_VARIABLE: before}
