"""Beam search, written to be read: one sentence after the other, every step through the whole decoder, no cache."""

import dataclasses
import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_reference.masks import padding_mask
from torch_reference.transformer import Transformer
from transformer_config import BeamConfig


class Hypotheses(NamedTuple):
    """Translations of each sentence, the best first."""

    ids: Int[Tensor, "batch hypotheses room"]
    """Without bos_id; with eos_id where the hypothesis ended, and pad_id from there on."""
    scores: Float[Tensor, "batch hypotheses"]
    """`log_probs` over the penalty for length: what hypotheses are ranked by. -inf where there is none."""
    log_probs: Float[Tensor, "batch hypotheses"]
    """Sum of the pieces' log-probabilities, the end included."""
    lengths: Int[Tensor, "batch hypotheses"]
    """Pieces, the end included; 0 where there is no hypothesis."""
    ended: Bool[Tensor, "batch hypotheses"]
    """False for what was cut at the limit on length."""


@dataclasses.dataclass(frozen=True)
class _Hypothesis:
    ids: tuple[int, ...]
    log_prob: float
    score: float
    ended: bool


@dataclasses.dataclass(frozen=True)
class _Beam:
    ids: tuple[int, ...]
    log_prob: float


@torch.no_grad()
def beam_search(model: Transformer, src: Int[Tensor, "batch src_len"], *, config: BeamConfig) -> Hypotheses:
    """The likeliest translations that a beam finds (Wu et al. 2016, section 7), `config.num_hypotheses` a sentence.

    In each step the best 2·beam_size continuations of a sentence's beams are looked at: those that end among the first
    beam_size are finished and kept apart, the best beam_size that do not end go on. A row of the batch that is all
    padding has no hypothesis. The result of a sentence does not depend on its neighbours.

    Raises ValueError for a `max_len` beyond a learned position table.
    """
    if config.max_len > (model.config.sequence_limit or config.max_len):
        raise ValueError(f"max_len: expected at most {model.config.sequence_limit} positions, got {config.max_len}")
    return _as_tensors([_search(model, row, config) for row in src.unsqueeze(1)], model, src, config)


def _search(model: Transformer, src: Int[Tensor, "1 src_len"], config: BeamConfig) -> list[_Hypothesis]:
    src_mask = padding_mask(src, pad_id=model.config.pad_id)
    if not src_mask.any():
        return []
    least, limit = _length_limits(config, model, int(src_mask.sum()))
    memory = model.encode(src, src_mask=src_mask)
    alive, top_ended = [_Beam((), 0.0)], False
    pool: list[_Hypothesis] = []
    for length in range(1, limit + 1):
        forced = _forced(config, model, length, limit)
        candidates = _best_continuations(
            model, alive, memory, src_mask, config=config, may_end=length > least, forced=forced
        )
        finished = [
            _hypothesis(config, beam, ended=_ends(model, beam))
            for beam in candidates[: config.beam_size]
            if _ends(model, beam) or length == limit
        ]
        pool = sorted(pool + finished, key=lambda hypothesis: _rank(config, hypothesis))[: config.beam_size]
        alive = [beam for beam in candidates if not _ends(model, beam)][: config.beam_size]
        top_ended = top_ended or _ends(model, candidates[0])
        if _is_over(config, alive, pool, top_ended, length, limit):
            break
    return pool[: config.num_hypotheses]


def _length_limits(config: BeamConfig, model: Transformer, src_length: int) -> tuple[int, int]:
    """Pieces that must come before the end, and pieces that may come at most."""
    limit = max(config.max_len, math.floor(config.max_len_growth * src_length))
    if model.config.sequence_limit is not None:
        limit = min(limit, model.config.sequence_limit)
    if config.max_len_ratio is not None:
        limit = min(limit, math.floor(config.max_len_ratio * src_length) + 10)
    return min(max(config.min_len, math.ceil(config.min_len_ratio * src_length)), limit - 1), limit


def _forced(config: BeamConfig, model: Transformer, length: int, limit: int) -> int | None:
    """What piece number `length` has to be, if that is said."""
    if config.forced_end and length == limit:
        return model.config.eos_id
    return config.first_id if length == 1 else None


def _best_continuations(
    model: Transformer,
    alive: list[_Beam],
    memory: Tensor,
    src_mask: Tensor,
    *,
    config: BeamConfig,
    may_end: bool,
    forced: int | None,
) -> list[_Beam]:
    """The best 2·beam_size of every beam with every piece; of equals the better beam's, then the lower id.

    What is forced costs nothing.
    """
    if forced is not None:
        return [_Beam((*beam.ids, forced), beam.log_prob) for beam in alive]
    tgt = torch.tensor([(model.config.bos_id, *beam.ids) for beam in alive], device=memory.device)
    logits = model.decode(
        tgt,
        memory.expand(len(alive), -1, -1),
        src_mask=src_mask.expand(len(alive), -1),
        # Every position so far is real, even where bos_id is pad_id.
        tgt_mask=torch.ones_like(tgt, dtype=torch.bool),
    )
    log_probs = logits[:, -1].log_softmax(dim=-1)
    pad_id, bos_id, eos_id = model.config.pad_id, model.config.bos_id, model.config.eos_id
    never = {pad_id, bos_id} if config.never is None else set(config.never)
    log_probs[:, sorted(never - {eos_id})] = -math.inf
    if not may_end:
        log_probs[:, eos_id] = -math.inf
    if config.renormalize:
        log_probs = log_probs.log_softmax(dim=-1)
    totals = log_probs + log_probs.new_tensor([beam.log_prob for beam in alive]).unsqueeze(1)
    best, places = totals.flatten().sort(descending=True, stable=True)
    number = 2 * config.beam_size
    return [
        _Beam((*alive[place // totals.shape[1]].ids, place % totals.shape[1]), log_prob)
        for log_prob, place in zip(best[:number].tolist(), places[:number].tolist(), strict=True)
        if log_prob > -math.inf
    ]


def _ends(model: Transformer, beam: _Beam) -> bool:
    return beam.ids[-1] == model.config.eos_id


def _hypothesis(config: BeamConfig, beam: _Beam, *, ended: bool) -> _Hypothesis:
    return _Hypothesis(beam.ids, beam.log_prob, beam.log_prob / _penalty(config, len(beam.ids)), ended)


def _penalty(config: BeamConfig, length: int) -> float:
    """What a sum of log-probabilities is divided by."""
    if config.length_penalty == "none":
        return 1.0
    if config.length_penalty == "gnmt":
        return ((5.0 + length) / 6.0) ** config.alpha
    return float(length) ** config.alpha


def _rank(config: BeamConfig, hypothesis: _Hypothesis) -> tuple[bool, float]:
    """Smaller is better."""
    return config.stopping == "bound" and not hypothesis.ended, -hypothesis.score


def _is_over(
    config: BeamConfig, alive: list[_Beam], pool: list[_Hypothesis], top_ended: bool, length: int, limit: int
) -> bool:
    """Whether nothing of what the sentence could still bring is wanted."""
    if not alive:
        return True
    enough, full = len(pool) >= config.num_hypotheses, len(pool) == config.beam_size
    if config.stopping == "ctranslate2":
        plain = config.length_penalty == "none" or config.alpha == 0.0
        return top_ended and enough if plain else full
    if config.stopping == "transformers_early":
        return full
    if config.stopping == "transformers":
        return full and alive[0].log_prob / _penalty(config, length) <= pool[-1].score
    attainable = alive[0].log_prob / _penalty(config, limit)
    if config.stopping == "transformers_never":
        return full and attainable <= pool[-1].score
    return enough and attainable <= pool[config.num_hypotheses - 1].score


def _as_tensors(found: list[list[_Hypothesis]], model: Transformer, src: Tensor, config: BeamConfig) -> Hypotheses:
    shape = (len(found), config.num_hypotheses)
    room = max(config.max_len, *(_length_limits(config, model, length)[1] for length in range(1, src.shape[1] + 1)))
    nothing = torch.full(shape, -math.inf, dtype=next(model.parameters()).dtype, device=src.device)
    hypotheses = Hypotheses(
        ids=src.new_full((*shape, room), model.config.pad_id),
        scores=nothing,
        log_probs=nothing.clone(),
        lengths=src.new_zeros(shape),
        ended=torch.zeros(shape, dtype=torch.bool, device=src.device),
    )
    for sentence, of_sentence in enumerate(found):
        for rank, hypothesis in enumerate(of_sentence):
            hypotheses.ids[sentence, rank, : len(hypothesis.ids)] = src.new_tensor(hypothesis.ids)
            hypotheses.scores[sentence, rank] = hypothesis.score
            hypotheses.log_probs[sentence, rank] = hypothesis.log_prob
            hypotheses.lengths[sentence, rank] = len(hypothesis.ids)
            hypotheses.ended[sentence, rank] = hypothesis.ended
    return hypotheses
