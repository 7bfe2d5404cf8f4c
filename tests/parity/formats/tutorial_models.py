"""Models as the tutorials' layouts are described: their names, their formulas, small."""

import math

import torch
from torch import nn

PAD = 0


def sinusoids(rows, d_model):
    """Interleaved, in float32, as tutorials compute them."""
    table = torch.zeros(rows, d_model)
    position = torch.arange(rows, dtype=torch.float).unsqueeze(1)
    divisor = torch.exp(torch.arange(0, d_model, 2).float() * (-math.log(10000.0) / d_model))
    table[:, 0::2], table[:, 1::2] = torch.sin(position * divisor), torch.cos(position * divisor)
    return table


def attend(query, key, value, mask, heads):
    """(batch, length, d_model) each; the mask is broadcast to (batch, heads, queries, keys), 0 where forbidden."""
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(mask == 0, -1e9).softmax(-1)
    return (weights @ value).transpose(1, 2).flatten(2)


def masks(src, tgt):
    """Of keys of the source, and of keys of the target and the past."""
    past = torch.ones(tgt.shape[1], tgt.shape[1]).tril()
    return (src != PAD)[:, None, None], (tgt != PAD)[:, None, None] * past


class PositionBuffer(nn.Module):
    """`pe`, with an axis for the batch or without."""

    def __init__(self, rows, d_model, *, batch_axis):
        super().__init__()
        table = sinusoids(rows, d_model)
        self.register_buffer("pe", table.unsqueeze(0) if batch_axis else table)

    def forward(self, x):
        return x + self.pe.reshape(-1, x.shape[-1])[: x.shape[1]]


# L2 and L4: "tiny", "theory to code".


class AttentionW(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, memory, mask):
        return self.W_o(attend(self.W_q(query), self.W_k(memory), self.W_v(memory), mask, self.heads))


class Inner(nn.Module):
    def __init__(self, d_model, d_ff, names):
        super().__init__()
        self.names = names
        setattr(self, names[0], nn.Linear(d_model, d_ff))
        setattr(self, names[1], nn.Linear(d_ff, d_model))

    def forward(self, x):
        return getattr(self, self.names[1])(torch.relu(getattr(self, self.names[0])(x)))


class LayerW(nn.Module):
    def __init__(self, d_model, d_ff, heads, *, cross, inner):
        super().__init__()
        self.self_attn = AttentionW(d_model, heads)
        if cross:
            self.cross_attn = AttentionW(d_model, heads)
        self.inner, names = inner
        setattr(self, self.inner, Inner(d_model, d_ff, names))
        for i in range(3 if cross else 2):
            setattr(self, f"norm{i + 1}", nn.LayerNorm(d_model))

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.norm1(x + self.self_attn(x, x, mask))
        if memory is not None:
            x = self.norm2(x + self.cross_attn(x, memory, memory_mask))
        last = self.norm2 if memory is None else self.norm3
        return last(x + getattr(self, self.inner)(x))


class ModelW(nn.Module):
    """L2, and with `theory` L4."""

    def __init__(self, *, src, tgt, d_model, d_ff, heads, layers, rows, theory=False):
        super().__init__()
        inner = ("feed_forward", ("fc1", "fc2")) if theory else ("ffn", ("linear1", "linear2"))
        self.names = ("positional_encoding", "fc") if theory else ("pos_encoding", "fc_out")
        self.encoder_embedding, self.decoder_embedding = nn.Embedding(src, d_model), nn.Embedding(tgt, d_model)
        setattr(self, self.names[0], PositionBuffer(rows, d_model, batch_axis=theory))
        self.encoder_layers = nn.ModuleList(
            LayerW(d_model, d_ff, heads, cross=False, inner=inner) for _ in range(layers[0])
        )
        self.decoder_layers = nn.ModuleList(
            LayerW(d_model, d_ff, heads, cross=True, inner=inner) for _ in range(layers[1])
        )
        setattr(self, self.names[1], nn.Linear(d_model, tgt))

    def forward(self, src, tgt):
        src_mask, tgt_mask = masks(src, tgt)
        positions, output = (getattr(self, name) for name in self.names)
        memory = positions(self.encoder_embedding(src))
        for layer in self.encoder_layers:
            memory = layer(memory, src_mask)
        x = positions(self.decoder_embedding(tgt))
        for layer in self.decoder_layers:
            x = layer(x, tgt_mask, memory, src_mask)
        return output(x)


# L1: "from-scratch reproduction", assembled.


class AttentionLinear(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.q_linear, self.k_linear, self.v_linear, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, memory, mask):
        return self.out(attend(self.q_linear(query), self.k_linear(memory), self.v_linear(memory), mask, self.heads))


class LayerFromScratch(nn.Module):
    def __init__(self, d_model, d_ff, heads, *, cross):
        super().__init__()
        self.self_attn = AttentionLinear(d_model, heads)
        if cross:
            self.src_attn = AttentionLinear(d_model, heads)
        self.feed_forward = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        for i in range(3 if cross else 2):
            setattr(self, f"norm{i + 1}", nn.LayerNorm(d_model))

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.norm1(x + self.self_attn(x, x, mask))
        if memory is None:
            return self.norm2(x + self.feed_forward(x))
        x = self.norm2(x + self.src_attn(x, memory, memory_mask))
        return self.norm3(x + self.feed_forward(x))


class ModelFromScratch(nn.Module):
    def __init__(self, *, src, tgt, d_model, d_ff, heads, layers, rows):
        super().__init__()
        self.src_embedding, self.tgt_embedding = nn.Embedding(src, d_model), nn.Embedding(tgt, d_model)
        self.encoder_layers = nn.ModuleList(
            LayerFromScratch(d_model, d_ff, heads, cross=False) for _ in range(layers[0])
        )
        self.decoder_layers = nn.ModuleList(
            LayerFromScratch(d_model, d_ff, heads, cross=True) for _ in range(layers[1])
        )
        self.output_projection = nn.Linear(d_model, tgt)
        self.register_buffer("pe", sinusoids(rows, d_model).unsqueeze(0))

    def forward(self, src, tgt):
        src_mask, tgt_mask = masks(src, tgt)
        memory = self.src_embedding(src) + self.pe[:, : src.shape[1]]
        for layer in self.encoder_layers:
            memory = layer(memory, src_mask)
        x = self.tgt_embedding(tgt) + self.pe[:, : tgt.shape[1]]
        for layer in self.decoder_layers:
            x = layer(x, tgt_mask, memory, src_mask)
        return self.output_projection(x)


# L3: "annotated".


class AnnotatedNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b_2


class AnnotatedAttention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, memory, mask):
        projected = [linear(x) for linear, x in zip(self.linears, (query, memory, memory), strict=False)]
        return self.linears[3](attend(*projected, mask, self.heads))


class Sublayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = AnnotatedNorm(width)

    def forward(self, x, function):
        return x + function(self.norm(x))


class AnnotatedLayer(nn.Module):
    def __init__(self, d_model, d_ff, heads, *, cross):
        super().__init__()
        self.self_attn = AnnotatedAttention(d_model, heads)
        if cross:
            self.src_attn = AnnotatedAttention(d_model, heads)
        self.feed_forward = Inner(d_model, d_ff, ("w_1", "w_2"))
        self.sublayer = nn.ModuleList(Sublayer(d_model) for _ in range(3 if cross else 2))

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.sublayer[0](x, lambda y: self.self_attn(y, y, mask))
        if memory is not None:
            x = self.sublayer[1](x, lambda y: self.src_attn(y, memory, memory_mask))
        return self.sublayer[-1](x, self.feed_forward)


class AnnotatedStack(nn.Module):
    def __init__(self, layers, d_model):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), AnnotatedNorm(d_model)

    def forward(self, x, *arguments):
        for layer in self.layers:
            x = layer(x, *arguments)
        return self.norm(x)


class Lut(nn.Module):
    def __init__(self, vocab, d_model):
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)

    def forward(self, ids):
        return self.lut(ids) * math.sqrt(self.lut.embedding_dim)


class Generator(nn.Module):
    def __init__(self, d_model, vocab):
        super().__init__()
        self.proj = nn.Linear(d_model, vocab)

    def forward(self, x):
        return self.proj(x)


class ModelAnnotated(nn.Module):
    """With `tied` embeddings and generator share one matrix."""

    def __init__(self, *, src, tgt, d_model, d_ff, heads, layers, rows, tied=False):
        super().__init__()
        of_layers = [
            [AnnotatedLayer(d_model, d_ff, heads, cross=cross) for _ in range(number)]
            for number, cross in zip(layers, (False, True), strict=True)
        ]
        self.encoder, self.decoder = (AnnotatedStack(each, d_model) for each in of_layers)
        self.src_embed = nn.Sequential(Lut(src, d_model), PositionBuffer(rows, d_model, batch_axis=True))
        self.tgt_embed = nn.Sequential(Lut(tgt, d_model), PositionBuffer(rows, d_model, batch_axis=True))
        self.generator = Generator(d_model, tgt)
        if tied:
            self.src_embed[0].lut.weight = self.tgt_embed[0].lut.weight
            self.generator.proj.weight = self.tgt_embed[0].lut.weight

    def forward(self, src, tgt):
        src_mask, tgt_mask = masks(src, tgt)
        memory = self.encoder(self.src_embed(src), src_mask)
        return self.generator(self.decoder(self.tgt_embed(tgt), tgt_mask, memory, src_mask))


class ModelTorch(nn.Module):
    """`torch.nn.Transformer` with embeddings, learned positions not among them: sinusoids that are computed."""

    def __init__(self, *, src, tgt, d_model, d_ff, heads, layers, rows, norm_first=False, bias=True, activation="relu"):
        super().__init__()
        self.src_embedding, self.tgt_embedding = nn.Embedding(src, d_model), nn.Embedding(tgt, d_model)
        self.transformer = nn.Transformer(
            d_model,
            heads,
            *layers,
            dim_feedforward=d_ff,
            batch_first=True,
            norm_first=norm_first,
            bias=bias,
            activation=activation,
        )
        self.output_projection = nn.Linear(d_model, tgt, bias=bias)
        self.d_model = d_model

    def forward(self, src, tgt):
        def embed(embedding, ids):
            position = torch.arange(ids.shape[1], dtype=torch.float64)[:, None]
            angles = position / 10_000.0 ** (torch.arange(self.d_model // 2, dtype=torch.float64) * 2 / self.d_model)
            table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
            return embedding(ids) * math.sqrt(self.d_model) + table.to(embedding.weight.dtype)

        forbidden = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1]) < 0
        return self.output_projection(
            self.transformer(
                embed(self.src_embedding, src),
                embed(self.tgt_embedding, tgt),
                tgt_mask=forbidden,
                src_key_padding_mask=src == PAD,
                tgt_key_padding_mask=tgt == PAD,
                memory_key_padding_mask=src == PAD,
            )
        )
