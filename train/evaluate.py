"""What is measured on held-out text: loss over every token, and translations scored as text."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
import sacrebleu
from jaxtyping import Array

from train.batching import BatchPlan
from train.parallel import Devices
from train.step import EvaluationStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """Negative log likelihood of held-out text, without smoothing; ends of sentences are counted."""

    nll: float
    """Sum over all tokens, in nats."""
    num_tokens: int
    num_characters: int
    """Of the raw target text, ends of lines not counted."""

    @property
    def per_token(self) -> float:
        """Nats a piece."""
        return self.nll / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp of the nats a piece; not comparable between tokenizers."""
        return math.exp(min(self.per_token, 700.0))

    @property
    def per_character(self) -> float:
        """Nats a character: comparable between tokenizers."""
        return self.nll / self.num_characters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """How translations compare with references, as text."""

    bleu: float
    bleu_signature: str
    bleu_lowercased: float
    bleu_lowercased_signature: str
    chrf: float
    """0 to 100, like BLEU."""
    chrf_signature: str
    exact_match: float
    """Share of sentences that equal their reference, 0 to 1."""


def held_out_loss(
    evaluation_step: EvaluationStep,
    params: dict[str, Array],
    plan: BatchPlan,
    *,
    target: Sequence[str],
    vocab_sizes: tuple[int, int],
    devices: Devices,
) -> HeldOutLoss:
    """The loss over every pair of `plan` exactly once (T5), whose raw target lines are `target`."""
    sums = []
    for i in range(len(plan)):
        batch = devices.place_batch(plan.shape(i), partial(plan.rows, i), vocab_sizes=vocab_sizes)
        sums.append(evaluation_step(params, batch))
    host = jax.device_get(sums)
    return HeldOutLoss(
        nll=float(np.sum([s.nll for s in host], dtype=np.float64)),
        num_tokens=int(sum(s.num_tokens for s in host)),
        num_characters=sum(map(len, target)),
    )


def score(hypotheses: Sequence[str], references: Sequence[str]) -> Scores:
    """sacreBLEU (13a) on detokenised text against the raw references, cased and lowercased (Post 2018), and chrF2.

    chrF2 (Popović 2015) is an F-score of n-grams of up to 6 characters, with recall counting twice: it sees that a word
    is nearly right, for which BLEU gives nothing.

    Raises ValueError unless there are as many hypotheses as references, at least one.
    """
    if len(hypotheses) != len(references) or not references:
        raise ValueError(
            f"expected as many hypotheses as references, at least one, got {len(hypotheses)} and {len(references)}"
        )
    cased, lowercased, chrf = sacrebleu.BLEU(), sacrebleu.BLEU(lowercase=True), sacrebleu.CHRF()
    hypotheses, references = list(hypotheses), list(references)
    exact = sum(map(str.__eq__, hypotheses, references)) / len(references)
    return Scores(
        bleu=cased.corpus_score(hypotheses, [references]).score,
        bleu_signature=str(cased.get_signature()),
        bleu_lowercased=lowercased.corpus_score(hypotheses, [references]).score,
        bleu_lowercased_signature=str(lowercased.get_signature()),
        chrf=chrf.corpus_score(hypotheses, [references]).score,
        chrf_signature=str(chrf.get_signature()),
        exact_match=exact,
    )
