"""Small PyTorch models of modules that a Transformer lacks: convolutions, recurrent cells, rotary attention."""

import torch
from torch import Tensor, nn


class Convolutional(nn.Module):
    """Two convolutions, each with a norm; average pooling; a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, (3, 3), stride=(2, 1), padding=(1, 1))
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, (3, 3), groups=2, padding=1)
        self.norm2 = nn.GroupNorm(3, 6)
        self.pool = nn.AvgPool2d(2, padding=1)
        self.norm3 = nn.BatchNorm2d(6)
        self.linear = nn.Linear(6 * 3 * 5, 5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, 9, 8) -> (batch, 5)."""
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.linear(self.norm3(self.pool(x)).flatten(1))


class Recurrent(nn.Module):
    """A tagger: an LSTM cell, then a GRU cell, over the positions of a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.lstm = nn.LSTMCell(6, 5)
        self.gru = nn.GRUCell(5, 7)
        self.head = nn.Linear(7, 4)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, length) -> (batch, length, 4)."""
        embedded = self.embedding(ids)
        hidden = cell = embedded.new_zeros(len(ids), 5)
        state = embedded.new_zeros(len(ids), 7)
        states = []
        for x in embedded.unbind(1):
            hidden, cell = self.lstm(x, (hidden, cell))
            state = self.gru(hidden, state)
            states.append(state)
        return self.head(torch.stack(states, dim=1))


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight."""

    def __init__(self, width: int):
        super().__init__()
        self.eps = 1e-5
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Over the last axis."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Rotary(nn.Module):
    """Causal attention with rotary positions; two query heads share one head of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(12, 16, bias=False)
        self.k_proj = nn.Linear(12, 8, bias=False)
        self.v_proj = nn.Linear(12, 8, bias=False)
        self.o_proj = nn.Linear(16, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, 12) -> the same."""
        length = x.shape[1]
        query = rotate(self.q_proj(x).unflatten(-1, (4, 4)).transpose(1, 2))
        key = rotate(self.k_proj(x).unflatten(-1, (2, 4)).transpose(1, 2)).repeat_interleave(2, dim=1)
        value = self.v_proj(x).unflatten(-1, (2, 4)).transpose(1, 2).repeat_interleave(2, dim=1)
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        scores = (query @ key.transpose(-1, -2) / 2.0).masked_fill(~allowed, torch.finfo(x.dtype).min)
        return self.o_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(-2))


def rotate(x: Tensor) -> Tensor:
    """Pairs (i, i + d/2) turned by position / 10000^(2i/d) (the arrangement of GPT-NeoX and Llama)."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequencies
    sine, cosine = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    first, second = x.split(half, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Gated(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 10, bias=False)
        self.up = nn.Linear(12, 10, bias=False)
        self.down = nn.Linear(10, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """At every position."""
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm attention and a gated feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = RMSNorm(12)
        self.attention = Rotary()
        self.norm2 = RMSNorm(12)
        self.feed_forward = Gated()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, 12) -> the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class DecoderOnly(nn.Module):
    """Three blocks over embedded ids, and one fused attention at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 12)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.fused = nn.MultiheadAttention(12, 3, batch_first=True)
        self.head = nn.Linear(12, 13)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, length) -> (batch, length, 13)."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        attended, _ = self.fused(x, x, x, need_weights=False)
        return self.head(attended)
