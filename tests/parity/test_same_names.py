"""A port of a model of many module types, whose modules bear the same names, needs no mapping."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from parity import ladder
from parity.pair import Pair

RUNGS = ("inventory", "buffers", "weights", "forward", "gradients")


class Reference(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(11, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.rms = torch.nn.RMSNorm(6, eps=1e-6)
        self.conv = torch.nn.Conv1d(6, 8, 3, padding=1)
        self.bn = torch.nn.BatchNorm1d(8)
        self.gn = torch.nn.GroupNorm(2, 8)
        self.up = torch.nn.ConvTranspose1d(8, 4, 2, stride=2)
        self.conv2 = torch.nn.Conv2d(1, 3, (3, 2), stride=(2, 1), groups=1)
        self.lstm = torch.nn.LSTM(4, 5, batch_first=True)
        self.gru = torch.nn.GRU(5, 3, batch_first=True)
        self.cell = torch.nn.LSTMCell(3, 7)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.GELU(), torch.nn.Linear(9, 2))
        self.dropout = torch.nn.Dropout(0.2)
        self.attn = torch.nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.dropout(self.rms(self.norm(self.embed(ids))))
        y = self.gn(self.bn(self.conv(x.transpose(1, 2))))
        image = self.conv2(y[:, None])
        y, _ = self.lstm(self.up(y).transpose(1, 2))
        y, _ = self.gru(y)
        zeros = y.new_zeros(y.shape[0], 7)
        h, c = self.cell(y[:, -1], (zeros, zeros))
        attended, _ = self.attn(x, x, x)
        return {"c": c, "image": image.permute(0, 2, 3, 1), "logits": self.mlp(h), "seen": attended}


class Port(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, 6, rngs=rngs)
        self.norm = nnx.LayerNorm(6, epsilon=1e-5, rngs=rngs)
        self.rms = nnx.RMSNorm(6, rngs=rngs)
        self.conv = nnx.Conv(6, 8, (3,), rngs=rngs)
        self.bn = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.gn = nnx.GroupNorm(8, num_groups=2, epsilon=1e-5, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 4, (2,), strides=(2,), padding="VALID", rngs=rngs)
        self.conv2 = nnx.Conv(1, 3, (3, 2), strides=(2, 1), padding="VALID", rngs=rngs)
        self.lstm = nnx.RNN(nnx.OptimizedLSTMCell(4, 5, rngs=rngs))
        self.gru = nnx.RNN(nnx.GRUCell(5, 3, rngs=rngs))
        self.cell = nnx.LSTMCell(3, 7, rngs=rngs)
        gelu = functools.partial(nnx.gelu, approximate=False)
        self.mlp = nnx.Sequential(nnx.Linear(7, 9, rngs=rngs), gelu, nnx.Linear(9, 2, rngs=rngs))
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> dict[str, jax.Array]:
        x = self.dropout(self.rms(self.norm(self.embed(ids))))
        y = self.gn(self.bn(self.conv(x)))
        image = self.conv2(jnp.swapaxes(y, 1, 2)[..., None])
        y = self.gru(self.lstm(self.up(y)))
        zeros = jnp.zeros((y.shape[0], 7), y.dtype)
        (c, _), h = self.cell((zeros, zeros), y[:, -1])
        return {"c": c, "image": image, "logits": self.mlp(h), "seen": self.attn(x)}


def pair(build_port: Callable[[], nnx.Module]) -> Pair:
    ids = np.random.default_rng(0).integers(0, 11, (3, 5))
    return Pair(name="many types", reference=Reference, port=build_port, inputs={"ids": ids})


def test_a_port_of_thirteen_types_needs_no_mapping() -> None:
    report = ladder.check(pair(Port), rungs=RUNGS)
    assert {rung.name: rung.status for rung in report.rungs if rung.name in RUNGS} == dict.fromkeys(RUNGS, "passed")
    kinds = {known.kind for known in report.known}
    assert kinds == {"GRU hidden bias", "two biases for one", "running variance"}
    compared = {c.tensor for c in report.rung("forward").outcome.sections[0].comparisons}
    named = {name.partition("[")[0] for name in compared}
    assert {name for name, _ in Reference().named_children() if name != "mlp"} <= named
    assert {"mlp", "mlp.0", "mlp.2"} <= named
    # What is on one side only is named, not passed over.
    notes = " ".join(report.rung("forward").outcome.notes)
    assert "attn[1]" in notes
    assert "lstm.cell" in notes


class PortWithAnotherGate(Port):
    def __init__(self) -> None:
        super().__init__()
        self.lstm.cell.gate_fn = nnx.hard_sigmoid


def test_what_a_cell_computes_is_read_off_it() -> None:
    report = ladder.check(pair(PortWithAnotherGate), rungs=("inventory",))
    (failure,) = report.rung("inventory").failures
    assert failure.tensor == "lstm: gate activation"
    assert failure.detail == "reference sigmoid, port hard_sigmoid"
    assert report.first_difference.module == "lstm"
