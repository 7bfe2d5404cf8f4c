"""A recurrent tagger: an embedding, an LSTM that reads forward, one that reads backward, a score for every tag."""

import torch
from torch import Tensor, nn


class Tagger(nn.Module):
    """Scores (batch, length, tags) of token ids (batch, length)."""

    def __init__(self, vocab: int = 41, width: int = 11, hidden: int = 13, tags: int = 5):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.forwards = nn.LSTM(width, hidden, batch_first=True)
        self.backwards = nn.LSTM(width, hidden, batch_first=True)
        self.norm = nn.LayerNorm(2 * hidden)
        self.scores = nn.Linear(2 * hidden, tags)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        ahead, _ = self.forwards(x)
        back, _ = self.backwards(x.flip(1))
        return self.scores(self.norm(torch.cat([ahead, back.flip(1)], dim=-1)))
