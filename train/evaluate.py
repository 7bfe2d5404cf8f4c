"""What is measured on held-out text: loss over every token, and greedy translations scored as text."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import sacrebleu
from jaxtyping import Array

from flax_transformer.transformer import check_ids
from train.batching import BatchPlan, decode_batches, decoding_lengths
from train.compilation import Compiled
from train.config import TrainConfig
from train.parallel import Devices
from train.step import EvaluationStep
from train.tokenizer import Tokenizer
from transformer_config import EOS_ID


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translations:
    """Translated lines in the order of their sources."""

    lines: tuple[str, ...]
    unfinished: tuple[int, ...]
    """Which of them reached the limit on length before their end."""


def held_out_loss(
    evaluation_step: EvaluationStep,
    params: dict[str, Array],
    plan: BatchPlan,
    *,
    target: Sequence[str],
    vocab_size: int,
    devices: Devices,
) -> HeldOutLoss:
    """The loss over every pair of `plan` exactly once (T5), whose raw target lines are `target`."""
    sums = []
    for i in range(len(plan)):
        batch = devices.place_batch(plan.shape(i), partial(plan.rows, i), vocab_size=vocab_size)
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


class Translator:
    """Greedy translation of lines with one set of parameters; keeps what it has compiled."""

    def __init__(self, config: TrainConfig, tokenizer: Tokenizer, devices: Devices):
        self._devices = devices
        self._config = config
        self._tokenizer = tokenizer
        self._compiled: dict[int, Compiled[..., Any]] = {}
        self._longest = 0

    @property
    def compilations(self) -> int:
        """How often decoding was compiled: once for every padded source length."""
        return sum(compiled.compilations for compiled in self._compiled.values())

    @property
    def max_compilations(self) -> int:
        """The most there can be for sources as long as the longest so far: one for each of its `decoding_lengths`."""
        return len(decoding_lengths(self._longest))

    def translate(self, params: dict[str, Array], lines: Sequence[str]) -> Translations:
        """Translates `lines`; an empty one stays empty. Raises ValueError for lines too long for the model."""
        encoded = [[*ids, EOS_ID] for ids in self._tokenizer.encode([line.strip() for line in lines])]
        full = [i for i, ids in enumerate(encoded) if len(ids) > 1]
        self._longest = max([self._longest, *map(len, encoded)])
        output: list[list[int]] = [[] for _ in encoded]
        unfinished = []
        batches = decode_batches(
            [encoded[i] for i in full],
            batch_size=self._config.evaluation.batch_size,
            max_len=self._config.model.sequence_limit,
        )
        for indices, src in batches:
            check_ids(src, name="src", vocab_size=self._config.model.src_vocab_size)
            rows = np.asarray(self._decoder(src.shape[1])(params, self._devices.place_sources(src)))
            for index, row in zip(indices, rows, strict=True):
                if index >= 0:
                    output[full[index]] = row.tolist()
                    if EOS_ID not in row:
                        unfinished.append(full[index])
        return Translations(lines=tuple(self._tokenizer.decode(output)), unfinished=tuple(sorted(unfinished)))

    def _decoder(self, src_len: int) -> Compiled[..., Any]:
        # Room to grow with the source; the loop ends when all sentences have, so room that is not used costs little.
        limit = self._config.model.sequence_limit
        max_len = max(self._config.evaluation.max_decode_len, 2 * src_len)
        max_len = max_len if limit is None else min(max_len, limit)
        if max_len not in self._compiled:
            self._compiled[max_len] = self._devices.compile_greedy(self._config.model, max_len=max_len)
        return self._compiled[max_len]
