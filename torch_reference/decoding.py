"""Greedy decoding, written to be read: every step runs the whole decoder again, without a cache."""

import math

import torch
from jaxtyping import Int
from torch import Tensor

from torch_reference.masks import padding_mask
from torch_reference.transformer import Transformer


@torch.no_grad()
def greedy(model: Transformer, src: Int[Tensor, "batch src_len"], *, max_len: int) -> Int[Tensor, "batch max_len"]:
    """The likeliest next token, again and again, until every sentence has ended or is `max_len` pieces long.

    The output has no bos_id; it ends with eos_id where the sentence ended in time, and is pad_id from there on.
    pad_id and bos_id are never chosen, unless one of them is eos_id too. A row of the batch that is all padding is
    over at once. The result of a sentence does not depend on its neighbours.

    Raises ValueError if `max_len` is less than 1, or more than a learned position table has.
    """
    config = model.config
    if max_len < 1 or max_len > (config.sequence_limit or max_len):
        raise ValueError(f"expected max_len in [1, {config.sequence_limit or 'any'}], got {max_len}")
    src_mask = padding_mask(src, pad_id=config.pad_id)
    memory = model.encode(src, src_mask=src_mask)
    tgt = src.new_full((src.shape[0], 1), config.bos_id)
    never = sorted({config.pad_id, config.bos_id} - {config.eos_id})
    finished = ~src_mask.any(dim=1)
    while tgt.shape[1] <= max_len and not finished.all():
        # Every position so far is real, even where bos_id is pad_id; what stands in finished rows does not matter.
        logits = model.decode(tgt, memory, src_mask=src_mask, tgt_mask=torch.ones_like(tgt, dtype=torch.bool))[:, -1]
        logits[:, never] = -math.inf
        chosen = logits.argmax(dim=-1).masked_fill(finished, config.pad_id)
        finished = finished | (chosen == config.eos_id)
        tgt = torch.cat([tgt, chosen.unsqueeze(1).to(tgt.dtype)], dim=1)
    output = src.new_full((src.shape[0], max_len), config.pad_id)
    output[:, : tgt.shape[1] - 1] = tgt[:, 1:]
    return output
