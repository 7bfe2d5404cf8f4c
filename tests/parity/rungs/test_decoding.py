"""Rung 15: decoders, right and wrong."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity import ladder
from parity.pair import Pair, Side

VOCAB, EOS, STEPS = 7, 2, 6


class Next(torch.nn.Module):
    """Scores of the next token, given the last."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Embedding(VOCAB, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.scores(ids)


class FlaxNext(nnx.Module):
    def __init__(self) -> None:
        self.scores = nnx.Embed(VOCAB, VOCAB, rngs=nnx.Rngs(0))

    def __call__(self, ids: Any) -> Any:
        return self.scores(ids)


def decode_reference(model: Any, inputs: Any) -> dict[str, Any]:
    ids, total, ended = inputs["ids"], 0.0, torch.zeros(len(inputs["ids"]), dtype=torch.bool)
    path = []
    for _ in range(STEPS):
        best = model(ids).log_softmax(-1).max(-1)
        total = total + best.values.masked_fill(ended, 0.0)
        ids = best.indices.masked_fill(ended, 0)
        ended = ended | (ids == EOS)
        path.append(ids)
    return {"ids": torch.stack(path, 1), "scores": total}


def decode_port(model: Any, inputs: Any, *, heeds_eos: bool = True, scale: float = 1.0) -> dict[str, Any]:
    ids, total, ended = inputs["ids"], 0.0, jnp.zeros(len(inputs["ids"]), bool)
    path = []
    for _ in range(STEPS):
        scores = nnx.log_softmax(model(ids))
        total = total + jnp.where(ended, 0.0, scores.max(-1)) * scale
        ids = jnp.where(ended, 0, scores.argmax(-1))
        ended = ended | (ids == EOS) if heeds_eos else ended
        path.append(ids)
    return {"ids": jnp.stack(path, 1), "scores": total}


def make_pair(decode: Any) -> Pair:
    weights = np.random.default_rng(0).standard_normal((VOCAB, VOCAB)).astype(np.float32)
    weights[3, EOS] = 9.0  # some sentences end
    return Pair(
        reference=Side(build=Next, decode=decode_reference),
        port=Side(build=FlaxNext, decode=decode),
        inputs={"ids": np.arange(VOCAB)},
        weights={"scores.weight": weights},
    )


def decoding(pair: Pair) -> ladder.Rung:
    return ladder.check(pair, rungs=("decoding",)).rung("decoding")


def test_equal_decoders_pass_with_the_weights_as_given_and_with_larger_ones() -> None:
    rung = decoding(make_pair(decode_port))
    assert rung.passed, rung.failures
    assert {c.tensor for s in rung.outcome.sections for c in s.comparisons} == {
        "ids", "scores", "ids with larger matrices", "scores with larger matrices"
    }  # fmt: skip


def test_a_decoder_that_goes_on_after_the_end_fails_at_a_place() -> None:
    rung = decoding(make_pair(lambda m, i: decode_port(m, i, heeds_eos=False)))
    assert not rung.passed
    assert "first at (" in rung.failures[0].detail
    assert set(rung.outcome.evidence) == {"reference", "port", "inputs"}


def test_scores_that_are_off_by_a_billionth_fail() -> None:
    rung = decoding(make_pair(lambda m, i: decode_port(m, i, scale=1.0 + 1e-9)))
    assert [failure.tensor for failure in rung.failures] == ["scores", "scores with larger matrices"]


@pytest.mark.parametrize("side", ["reference", "port"])
def test_with_one_decoder_nothing_is_compared(side: str) -> None:
    pair = make_pair(decode_port)
    without = dataclasses.replace(getattr(pair, side), decode=None)
    rung = decoding(dataclasses.replace(pair, **{side: without}))
    assert rung.status == "skipped"
    assert f"{side} brings no decoder" in rung.skipped
