"""A small decoder-only language model as one finds it in PyTorch: fused qkv, rotary positions, RMSNorm, SwiGLU."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


def rotate(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) on (batch, heads, length, head_dim), the two halves of a head as pairs."""
    length, half = x.shape[-2], x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class CausalSelfAttention(nn.Module):
    """One projection for queries, keys and values."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(width, dim=-1)
        )
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float):
        super().__init__()
        self.ln_1 = nn.RMSNorm(width, eps=1e-6)
        self.attn = CausalSelfAttention(width, heads)
        self.ln_2 = nn.RMSNorm(width, eps=1e-6)
        self.mlp = MLP(width, hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.mlp(self.ln_2(x))


class LanguageModel(nn.Module):
    """Logits of the next token."""

    def __init__(self, vocab: int = 53, width: int = 24, heads: int = 4, hidden: int = 40, depth: int = 3):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width, heads, hidden, dropout=0.1) for _ in range(depth)])
        self.ln_f = nn.RMSNorm(width, eps=1e-6)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))
