"""Suspects of attention: the reference by torch's own function, the port by numpy with the fault."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from parity.diagnose import Case, diagnose_case

RNG = np.random.default_rng(1)
BATCH, LENGTH, HEADS, HEAD_DIM = 2, 6, 3, 4
WIDTH = HEADS * HEAD_DIM
Q, K, V = RNG.normal(size=(3, BATCH, LENGTH, WIDTH))
KEYS = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], bool)
"""True for keys that are no padding."""
ROW, COLUMN = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None]
CAUSAL = ROW >= COLUMN


def split(x: np.ndarray) -> np.ndarray:
    return x.reshape(BATCH, LENGTH, HEADS, HEAD_DIM).transpose(0, 2, 1, 3)


def merge(x: np.ndarray) -> np.ndarray:
    return x.transpose(0, 2, 1, 3).reshape(BATCH, LENGTH, WIDTH)


@dataclasses.dataclass(frozen=True)
class Fault:
    scale: float = HEAD_DIM**-0.5
    mask: Callable[[np.ndarray], np.ndarray] = lambda allowed: allowed
    fill: float = -np.inf
    zeroed: bool = False
    """After the softmax."""
    axis: int = -1
    parts: str = "qkv"
    split: Callable[[np.ndarray], np.ndarray] = split
    merge: Callable[[np.ndarray], np.ndarray] = merge


def attend(fault: Fault, allowed: np.ndarray) -> np.ndarray:
    named = {"q": Q, "k": K, "v": V}
    q, k, v = (fault.split(named[part]) for part in fault.parts)
    scores = np.where(fault.mask(allowed), q @ k.swapaxes(-1, -2) * fault.scale, fault.fill)
    weights = np.exp(scores - scores.max(fault.axis, keepdims=True))
    weights = weights / weights.sum(fault.axis, keepdims=True)
    return fault.merge(np.where(allowed | ~np.array(fault.zeroed), weights, 0.0) @ v)


def case(got: np.ndarray, allowed: np.ndarray, **changes: Any) -> Case:
    expected = F.scaled_dot_product_attention(
        *(torch.from_numpy(split(x).copy()) for x in (Q, K, V)), attn_mask=torch.from_numpy(allowed.copy())
    ).numpy()
    inside = {f"attn.{name}_proj": (array, array) for name, array in zip("qkv", (Q, K, V), strict=True)}
    made = Case(module="attn", child="attn.out_proj", expected=merge(expected), got=got, inside=inside)
    return dataclasses.replace(made, **changes)


PADDED = np.broadcast_to(KEYS[:, None, None, :], (BATCH, 1, LENGTH, LENGTH))
FAULTS = {
    "no scale": (Fault(scale=1.0), "score scale missing"),
    "d_model": (Fault(scale=WIDTH**-0.5), "score scale by another width"),
    "scaled twice": (Fault(scale=1 / HEAD_DIM), "score scale applied twice"),
    "no mask": (Fault(mask=np.ones_like), "mask missing"),
    "queries": (Fault(mask=lambda a: a.swapaxes(-1, -2), fill=-1e9), "padding mask on queries"),
    "fill": (Fault(fill=-10.0), "mask fill"),
    "fill, then zero": (Fault(fill=-5.0, zeroed=True), "mask fill"),
    "over queries": (Fault(axis=-2, fill=-1e9), "softmax axis"),
    "k and v": (Fault(parts="qvk"), "q/k/v permuted"),
    "k twice": (Fault(parts="qkk"), "projection used twice"),
    "merged by reshape": (Fault(merge=lambda x: x.reshape(BATCH, LENGTH, WIDTH)), "heads not transposed"),
    "head_dim first": (
        Fault(
            split=lambda x: x.reshape(BATCH, LENGTH, HEAD_DIM, HEADS).transpose(0, 3, 1, 2),
            merge=lambda x: x.transpose(0, 2, 3, 1).reshape(BATCH, LENGTH, WIDTH),
        ),
        "heads split in the other order",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_padding_mask(name: str) -> None:
    fault, kind = FAULTS[name]
    diagnosis = diagnose_case(case(attend(fault, PADDED), PADDED, given_ids=(KEYS,)))
    assert diagnosis is not None
    assert diagnosis.kind == kind
    assert diagnosis.module == "attn"


def test_a_padding_mask_that_is_inverted() -> None:
    keys = KEYS.copy()
    keys[0, :2] = False  # no row may be without any key, on either side
    allowed = np.broadcast_to(keys[:, None, None, :], PADDED.shape)
    diagnosis = diagnose_case(case(attend(Fault(mask=np.logical_not), allowed), allowed, given_ids=(keys,)))
    assert diagnosis is not None
    assert diagnosis.kind == "mask inverted"


CAUSAL_FAULTS = {
    "missing": (ROW >= -1 + 0 * COLUMN, "look-ahead mask missing"),
    "next": (COLUMN <= ROW + 1, "look-ahead mask off by one"),
    "transposed": (COLUMN >= ROW, "mask transposed"),
}


@pytest.mark.parametrize("name", CAUSAL_FAULTS)
def test_look_ahead_mask(name: str) -> None:
    mask, kind = CAUSAL_FAULTS[name]
    allowed = np.broadcast_to(CAUSAL, (BATCH, 1, LENGTH, LENGTH))
    diagnosis = diagnose_case(case(attend(Fault(mask=lambda a: np.broadcast_to(mask, a.shape)), allowed), allowed))
    assert diagnosis is not None
    assert diagnosis.kind == kind


def test_window_of_another_width() -> None:
    allowed, got = (np.broadcast_to(np.abs(ROW - COLUMN) <= width, PADDED.shape) for width in (2, 1))
    diagnosis = diagnose_case(case(attend(Fault(), got), allowed))
    assert diagnosis is not None
    assert diagnosis.kind == "window"


def test_rows_in_which_every_key_is_masked() -> None:
    keys = np.array([[1] * LENGTH, [0] * LENGTH], bool)
    allowed = np.broadcast_to(keys[:, None, None, :], PADDED.shape)
    expected = np.where(keys[:, :1, None], attend(Fault(), np.ones_like(allowed)), 0.0)
    got = np.where(keys[:, :1, None], expected, np.broadcast_to(V.mean(1, keepdims=True), V.shape))
    diagnosis = diagnose_case(dataclasses.replace(case(got, allowed, given_ids=(keys,)), expected=expected))
    assert diagnosis is not None
    assert diagnosis.kind == "fully masked rows"
    nan = np.where(keys[:, :1, None], expected, np.nan)
    diagnosis = diagnose_case(dataclasses.replace(case(nan, allowed, given_ids=(keys,)), expected=expected))
    assert diagnosis is not None
    assert diagnosis.kind == "fully masked rows"
    assert "NaN" in diagnosis.sentence


def rotate(x: np.ndarray, *, interleaved: bool = False, base: float = 1e4) -> np.ndarray:
    half = HEAD_DIM // 2
    angles = np.arange(LENGTH)[:, None] * base ** (-np.arange(half) / half)
    turned = np.exp(1j * angles)
    if interleaved:
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * turned
        return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)
    z = (x[..., :half] + 1j * x[..., half:]) * turned
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize(
    ("kind", "turn"),
    [
        ("rotary layout", lambda x: rotate(x, interleaved=True)),
        ("rotary base", lambda x: rotate(x, base=1e3)),
        ("rotary positions missing", lambda x: x),
    ],
)
def test_rotary_positions(kind: str, turn: Callable[[np.ndarray], np.ndarray]) -> None:
    def causal(turn: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        q, k, v = split(Q), split(K), split(V)
        scores = np.where(CAUSAL, turn(q) @ turn(k).swapaxes(-1, -2) * HEAD_DIM**-0.5, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return merge(weights / weights.sum(-1, keepdims=True) @ v)

    allowed = np.broadcast_to(CAUSAL, PADDED.shape)
    diagnosis = diagnose_case(dataclasses.replace(case(causal(turn), allowed), expected=causal(rotate)))
    assert diagnosis is not None
    assert diagnosis.kind == kind


def test_by_the_weights_of_a_module_without_submodules() -> None:
    """torch's own attention has one fused matrix and calls nothing that could be watched."""
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    x = RNG.normal(size=(BATCH, LENGTH, WIDTH))
    with torch.no_grad():
        module.in_proj_bias.normal_()
        expected = module(*[torch.from_numpy(x)] * 3, need_weights=False)[0].numpy()
    kernels = [a.T for a in np.split(module.in_proj_weight.detach().numpy(), 3)]
    biases = np.split(module.in_proj_bias.detach().numpy(), 3)
    out, bias = module.out_proj.weight.detach().numpy().T, module.out_proj.bias.detach().numpy()
    weights = {"out.kernel": out.reshape(HEADS, HEAD_DIM, WIDTH), "out.bias": bias}
    for name, kernel, offset in zip(("query", "key", "value"), kernels, biases, strict=True):
        weights |= {f"{name}.kernel": kernel.reshape(WIDTH, HEADS, HEAD_DIM), f"{name}.bias": offset}
    q, k, v = (split(x @ kernel + offset) for kernel, offset in zip(kernels, biases, strict=True))
    scores = q @ k.swapaxes(-1, -2)
    attended = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True) @ v
    got = merge(attended) @ out + bias
    diagnosis = diagnose_case(Case(module="attn", expected=expected, got=got, given=(x,), weights=weights))
    assert diagnosis is not None
    assert diagnosis.kind == "score scale missing"


def test_a_fused_projection_read_head_by_head() -> None:
    fused = np.concatenate([Q, K, V], axis=-1)
    parts = np.moveaxis(fused.reshape(BATCH, LENGTH, HEADS, 3, HEAD_DIM), 3, 0)
    q, k, v = (part.transpose(0, 2, 1, 3) for part in parts)
    scores = q @ k.swapaxes(-1, -2) * HEAD_DIM**-0.5
    got = merge(np.exp(scores) / np.exp(scores).sum(-1, keepdims=True) @ v)
    allowed = np.ones(PADDED.shape, bool)
    diagnosis = diagnose_case(dataclasses.replace(case(got, allowed), inside={"attn.c_attn": (fused, fused)}))
    assert diagnosis is not None
    assert diagnosis.kind == "fused q/k/v layout"


@pytest.mark.parametrize(
    ("kind", "dropped"),
    [
        ("dropout off", lambda weights, mask: weights),
        ("dropout scale missing", lambda weights, mask: weights * mask),
        ("dropout mask inverted", lambda weights, mask: weights * ~mask / 0.9),
        ("dropout rate", lambda weights, mask: weights * mask / 0.8),
    ],
)
def test_dropout_of_the_weights_with_masks_handed_in(kind: str, dropped: Callable[..., np.ndarray]) -> None:
    mask = RNG.random((BATCH, HEADS, LENGTH, LENGTH)) > 0.1
    scores = split(Q) @ split(K).swapaxes(-1, -2) * HEAD_DIM**-0.5
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected, got = (merge(w @ split(V)) for w in (weights * mask / 0.9, dropped(weights, mask)))
    made = case(got, np.ones(PADDED.shape, bool), masks={"attn.weights": mask})
    diagnosis = diagnose_case(dataclasses.replace(made, expected=expected))
    assert diagnosis is not None
    assert diagnosis.kind == kind


def test_noise_is_not_explained() -> None:
    noise = RNG.normal(size=Q.shape)
    assert diagnose_case(case(attend(Fault(), PADDED) + 1e-2 * noise, PADDED, given_ids=(KEYS,))) is None


def test_every_explanation_fits_both_sides() -> None:
    """Of two faults at once neither is named: one alone does not give the port's values."""
    for one, other in itertools.pairwise(("no scale", "k and v", "over queries", "merged by reshape")):
        changed = {
            field.name: getattr(FAULTS[name][0], field.name)
            for name in (one, other)
            for field in dataclasses.fields(Fault)
            if getattr(FAULTS[name][0], field.name) != field.default
        }
        diagnosis = diagnose_case(case(attend(Fault(**changed), PADDED), PADDED, given_ids=(KEYS,)))
        if diagnosis is not None:
            assert "; the port's" in diagnosis.sentence, "both are said, or nothing"
