"""Attention by an online softmax over blocks of keys: memory linear in length, forward and backward.

After Milakov & Gimelshein 2018 (online softmax), Rabe & Staats 2021 and Dao et al. 2022 (blocks, recomputation in the
backward pass). The same semantics as `plain_attention`, any dtype, the same treatment of rows without any key.

Without a window there is one group of all queries, and step t brings key block t. With a window, queries are grouped
into blocks as wide as the key blocks, and step t brings to every group its t-th neighbour: blocks outside the window
are never visited, so time is linear in length too. Both are one loop: step t takes the `groups` key blocks that start
at block t of a key array padded with `left` blocks in front.
"""

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_reference.dropout import NO_DROPOUT, DropoutSource, apply_keep
from torch_reference.masks import AttentionMask
from torch_reference.primitives import wide


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """How queries and keys are cut."""

    num_queries: int
    num_keys: int
    groups: int
    query_block: int
    key_block: int
    left: int
    steps: int

    @classmethod
    def of(cls, num_queries: int, num_keys: int, *, block_size: int, mask: AttentionMask) -> "_Tiling":
        if mask.window is None or num_queries != num_keys:
            return cls(num_queries, num_keys, 1, num_queries, block_size, 0, -(-num_keys // block_size))
        groups = -(-num_queries // block_size)
        left = min(-(-mask.window // block_size), groups - 1)
        right = 0 if mask.causal else left
        return cls(num_queries, num_keys, groups, block_size, block_size, left, left + 1 + right)

    def cut_queries(self, x: Float[Tensor, "batch heads queries d"]) -> Float[Tensor, "batch heads groups block d"]:
        padding = self.groups * self.query_block - self.num_queries
        return F.pad(x, (0, 0, 0, padding)).unflatten(2, (self.groups, self.query_block))

    def join_queries(self, x: Float[Tensor, "batch heads groups block d"]) -> Float[Tensor, "batch heads queries d"]:
        return x.flatten(2, 3)[:, :, : self.num_queries]

    def cut_keys(self, x: Float[Tensor, "batch heads keys d"]) -> Float[Tensor, "batch heads blocks block d"]:
        blocks = self.steps - 1 + self.groups
        before = self.left * self.key_block
        after = blocks * self.key_block - before - self.num_keys
        return F.pad(x, (0, 0, before, after)).unflatten(2, (blocks, self.key_block))

    def join_keys(self, x: Float[Tensor, "batch heads blocks block d"]) -> Float[Tensor, "batch heads keys d"]:
        return x.flatten(2, 3).narrow(2, self.left * self.key_block, self.num_keys)

    def query_index(self, device: torch.device) -> Int[Tensor, "groups block"]:
        return torch.arange(self.groups * self.query_block, device=device).unflatten(0, (self.groups, -1))

    def key_index(self, step: int, device: torch.device) -> Int[Tensor, "groups block"]:
        first = (step - self.left) * self.key_block
        index = torch.arange(first, first + self.groups * self.key_block, device=device)
        return index.unflatten(0, (self.groups, -1))

    def take(
        self, blocks: Float[Tensor, "batch heads blocks block d"], step: int
    ) -> Float[Tensor, "batch heads groups block d"]:
        """The key blocks of one step, as a view."""
        return blocks.narrow(2, step, self.groups)


def blockwise_attention(
    query: Float[Tensor, "batch heads queries d"],
    key: Float[Tensor, "batch heads keys d"],
    value: Float[Tensor, "batch heads keys d"],
    mask: AttentionMask,
    *,
    block_size: int,
    source: DropoutSource = NO_DROPOUT,
    rate: float = 0.0,
) -> Float[Tensor, "batch heads queries d"]:
    """The output of `plain_attention`, without its matrix of weights.

    `block_size` is in keys. Drawn dropout masks differ from the plain implementation's, handed-in ones are the same.
    """
    tiles = _Tiles(
        tiling=_Tiling.of(query.shape[2], key.shape[2], block_size=block_size, mask=mask),
        mask=mask,
        source=source if rate > 0.0 else NO_DROPOUT,
        rate=rate,
    )
    return _BlockwiseAttention.apply(query, key, value, tiles)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """What one step needs besides queries, keys and values; the same in the forward and the backward pass."""

    tiling: _Tiling
    mask: AttentionMask
    source: DropoutSource
    rate: float

    def scores(
        self,
        step: int,
        query_blocks: Float[Tensor, "batch heads groups queries d"],
        key_blocks: Float[Tensor, "batch heads blocks keys d"],
    ) -> Float[Tensor, "batch heads groups queries keys"]:
        """QKᵀ / √d_k of one step, -inf where attention is not allowed."""
        key = self.tiling.take(key_blocks, step)
        scores = wide(query_blocks @ key.transpose(-2, -1)) / math.sqrt(key.shape[-1])
        return scores.masked_fill(~self.allowed(step, key.device), -math.inf)

    def allowed(self, step: int, device: torch.device) -> Bool[Tensor, "#batch 1 groups queries keys"]:
        rows, columns = self.tiling.query_index(device), self.tiling.key_index(step, device)
        inside = (columns >= 0) & (columns < self.tiling.num_keys)
        return self.mask.allowed(rows, columns) & inside.unsqueeze(-2)

    def dropout(
        self, step: int, weights: Float[Tensor, "batch heads groups queries keys"]
    ) -> Float[Tensor, "batch heads groups queries keys"]:
        """Dropout of one step: the same linear map for weights and for their gradients."""
        rows = self.tiling.query_index(weights.device)
        columns = self.tiling.key_index(step, weights.device)
        lead = (weights.shape[0], weights.shape[1])
        keep = self.source.keep_tile(lead, rows, columns, rate=self.rate, step=step)
        return apply_keep(weights, keep, rate=self.rate)


class _BlockwiseAttention(torch.autograd.Function):
    """Forward: one pass over the key blocks. Backward: a second one, which computes the weights again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Float[Tensor, "batch heads queries d"],
        key: Float[Tensor, "batch heads keys d"],
        value: Float[Tensor, "batch heads keys d"],
        tiles: _Tiles,
    ) -> Float[Tensor, "batch heads queries d"]:
        tiling = tiles.tiling
        query_blocks, key_blocks, value_blocks = tiling.cut_queries(query), tiling.cut_keys(key), tiling.cut_keys(value)
        # Of the blocks seen so far: each row's greatest score, Σ exp(score - greatest), and the same sum of values.
        rows, dtype = query_blocks.shape[:-1], wide(query).dtype
        # The greatest score starts finite, so that a row without any key has no -inf - (-inf).
        greatest = query.new_full((*rows, 1), torch.finfo(dtype).min, dtype=dtype)
        total = query.new_zeros((*rows, 1), dtype=dtype)
        weighted = query.new_zeros((*rows, value.shape[-1]), dtype=dtype)
        for step in range(tiling.steps):
            scores = tiles.scores(step, query_blocks, key_blocks)
            new_greatest = torch.maximum(greatest, scores.amax(dim=-1, keepdim=True))
            exponentials = torch.exp(scores - new_greatest)
            shrink = torch.exp(greatest - new_greatest)
            dropped = tiles.dropout(step, exponentials).to(value.dtype)
            total = total * shrink + exponentials.sum(dim=-1, keepdim=True)
            weighted = weighted * shrink + wide(dropped @ tiling.take(value_blocks, step))
            greatest = new_greatest
        total = total.masked_fill(total == 0.0, 1.0)  # a row without any key: zeros, not 0/0
        output = tiling.join_queries(weighted / total).to(query.dtype)
        ctx.save_for_backward(query, key, value, output, greatest + total.log())
        ctx.tiles = tiles
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Float[Tensor, "batch heads queries d"]) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_normaliser = ctx.saved_tensors
        tiles, tiling = ctx.tiles, ctx.tiles.tiling
        query_blocks, key_blocks, value_blocks = tiling.cut_queries(query), tiling.cut_keys(key), tiling.cut_keys(value)
        grad_blocks = tiling.cut_queries(output_grad)
        # Row sums of weights · (their gradient), needed by the softmax's derivative: equal to output · output_grad.
        row_sums = tiling.cut_queries((wide(output) * wide(output_grad)).sum(dim=-1, keepdim=True))
        dtype, scale = wide(query).dtype, 1.0 / math.sqrt(query.shape[-1])
        query_grad, key_grad, value_grad = (
            torch.zeros_like(blocks, dtype=dtype) for blocks in (query_blocks, key_blocks, value_blocks)
        )
        for step in range(tiling.steps):
            weights = torch.exp(tiles.scores(step, query_blocks, key_blocks) - log_normaliser)
            dropped = tiles.dropout(step, weights).to(value.dtype)
            tiling.take(value_grad, step).add_(wide(dropped.transpose(-2, -1) @ grad_blocks))
            weights_grad = tiles.dropout(step, wide(grad_blocks @ tiling.take(value_blocks, step).transpose(-2, -1)))
            scores_grad = (weights * (weights_grad - row_sums) * scale).to(query.dtype)
            query_grad.add_(wide(scores_grad @ tiling.take(key_blocks, step)))
            tiling.take(key_grad, step).add_(wide(scores_grad.transpose(-2, -1) @ query_blocks))
        return (
            tiling.join_queries(query_grad).to(query.dtype),
            tiling.join_keys(key_grad).to(key.dtype),
            tiling.join_keys(value_grad).to(value.dtype),
            None,
        )
