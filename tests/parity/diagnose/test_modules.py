"""Suspects of single modules: the reference's values by torch itself, the port's by a formula with the fault."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from parity.diagnose import Case, Diagnosis, diagnose_case

RNG = np.random.default_rng(0)
WIDTH, BATCH, LENGTH = 6, 3, 5
X = RNG.normal(size=(BATCH, LENGTH, WIDTH))
SCALE, BIAS = 1 + 0.3 * RNG.normal(size=WIDTH), 0.2 * RNG.normal(size=WIDTH)


OTHER_SCALE, OTHER_BIAS = 1 + 0.3 * RNG.normal(size=WIDTH), 0.2 * RNG.normal(size=WIDTH)


def found(case: Case) -> Diagnosis:
    diagnosis = diagnose_case(case)
    assert diagnosis is not None, f"{case.where} is not explained"
    assert diagnosis.module == case.module
    return diagnosis


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)


def layer_norm(
    x: np.ndarray = X,
    *,
    eps: float = 1e-5,
    outside: bool = False,
    unbiased: bool = False,
    mean: bool = True,
    axis: int = -1,
    scale: np.ndarray = SCALE,
    bias: np.ndarray = BIAS,
) -> np.ndarray:
    centred = x - x.mean(axis, keepdims=True) if mean else x
    variance = (centred**2).sum(axis, keepdims=True) / (x.shape[axis] - unbiased)
    below = np.sqrt(variance) + eps if outside else np.sqrt(variance + eps)
    return centred / below * scale + bias


NORMS: dict[str, tuple[str, np.ndarray]] = {
    "eps": ("norm eps", layer_norm(eps=1e-6)),
    "an eps of one's own": ("norm eps", layer_norm(eps=3.7e-4)),
    "eps outside": ("norm eps placement", layer_norm(outside=True)),
    "n - 1": ("norm variance unbiased", layer_norm(unbiased=True)),
    "mean": ("norm mean not subtracted", layer_norm(mean=False)),
    "axis": ("norm axis", layer_norm(axis=1)),
    "bias left out": ("norm scale or bias", layer_norm(bias=np.zeros(WIDTH))),
    "exchanged": ("norm scale or bias", layer_norm(scale=BIAS, bias=SCALE)),
    "1 + scale": ("norm scale offset", layer_norm(scale=1 + SCALE)),
    "left out": ("norm missing", X),
    "another norm's": ("weights of another module", layer_norm(scale=OTHER_SCALE, bias=OTHER_BIAS)),
}


@pytest.mark.parametrize("fault", NORMS)
def test_layer_norm(fault: str) -> None:
    kind, got = NORMS[fault]
    expected = F.layer_norm(tensor(X), (WIDTH,), tensor(SCALE), tensor(BIAS), eps=1e-5).numpy()
    case = Case(
        module="a.norm1",
        expected=expected,
        got=got,
        given=(X,),
        weights={"scale": SCALE, "bias": BIAS},
        other_weights={"a.norm2.scale": OTHER_SCALE, "a.norm2.bias": OTHER_BIAS},
    )
    assert found(case).kind == kind


def test_the_fix_names_the_references_eps() -> None:
    expected, got = layer_norm(eps=1e-5), layer_norm(eps=1e-6)
    weights = {"scale": SCALE, "bias": BIAS}
    diagnosis = found(Case(module="norm", expected=expected, got=got, given=(X,), weights=weights))
    assert str(diagnosis) == "The port's eps is 1e-06, the reference's 1e-05; fix: set epsilon=1e-05."


def test_a_fast_variance_is_told_by_the_size_of_its_rounding() -> None:
    x = 1e4 + RNG.normal(size=(2, 4, WIDTH))
    variance = (x**2).mean(-1, keepdims=True) - x.mean(-1, keepdims=True) ** 2
    got = (x - x.mean(-1, keepdims=True)) / np.sqrt(variance + 1e-5) * SCALE + BIAS
    weights = {"scale": SCALE, "bias": BIAS}
    case = Case(module="norm", expected=layer_norm(x), got=got, given=(x,), weights=weights)
    assert found(case).kind == "fast variance"


STATISTICS = {"mean": RNG.normal(size=WIDTH), "var": 0.5 + RNG.random(WIDTH)}


@pytest.mark.parametrize("fault", ["norm eps", "batch norm statistics", "norm scale or bias"])
def test_batch_norm(fault: str) -> None:
    mean, variance = STATISTICS["mean"], STATISTICS["var"]
    expected = F.batch_norm(
        tensor(np.moveaxis(X, -1, 1)), *(tensor(a) for a in (mean, variance, SCALE, BIAS)), eps=1e-5
    ).numpy()
    got = {
        "norm eps": (X - mean) / np.sqrt(variance + 1e-3) * SCALE + BIAS,
        "batch norm statistics": (X - X.mean((0, 1))) / np.sqrt(X.var((0, 1)) + 1e-5) * SCALE + BIAS,
        "norm scale or bias": (X - mean) / np.sqrt(variance + 1e-5) * SCALE,
    }[fault]
    weights = {"scale": SCALE, "bias": BIAS, **STATISTICS}
    expected = np.moveaxis(expected, 1, -1)
    assert found(Case(module="bn", expected=expected, got=got, given=(X,), weights=weights)).kind == fault


KERNEL, OTHER = RNG.normal(size=(2, WIDTH, WIDTH))
OFFSET, OTHER_OFFSET = RNG.normal(size=(2, WIDTH))
HEADS_FIRST = np.arange(WIDTH).reshape(2, 3).T.ravel()


def eleven_bits(x: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 2**11) / 2**11, exponent)


LINEARS: dict[str, tuple[str, np.ndarray]] = {
    "transposed": ("kernel transposed", X @ KERNEL.T + OFFSET),
    "reshaped": ("kernel transposed", X @ KERNEL.T.reshape(KERNEL.shape) + OFFSET),
    "no bias": ("bias missing", X @ KERNEL),
    "bias twice": ("bias added twice", X @ KERNEL + 2 * OFFSET),
    "the key's": ("q/k/v permuted", X @ OTHER + OTHER_OFFSET),
    "the key's bias": ("bias of another module", X @ KERNEL + OTHER_OFFSET),
    "scaled": ("weights scaled", 0.7 * (X @ KERNEL) + OFFSET),
    "heads": ("heads split in the other order", (X @ KERNEL + OFFSET)[..., HEADS_FIRST]),
    "rows moved on": ("features in another order", X @ np.roll(KERNEL, 1, axis=0) + OFFSET),
    "TF32": ("low precision product", eleven_bits(X) @ eleven_bits(KERNEL) + OFFSET),
}


@pytest.mark.parametrize("fault", LINEARS)
def test_linear(fault: str) -> None:
    kind, got = LINEARS[fault]
    expected = F.linear(tensor(X), tensor(KERNEL.T.copy()), tensor(OFFSET)).numpy()
    case = Case(
        module="layers.0.q_proj",
        expected=expected,
        got=got,
        given=(X,),
        weights={"kernel": KERNEL, "bias": OFFSET},
        other_weights={"layers.0.k_proj.kernel": OTHER, "layers.0.k_proj.bias": OTHER_OFFSET},
    )
    assert found(case).kind == kind


def test_a_kernel_of_another_layer_is_no_exchange_of_q_and_k() -> None:
    case = Case(
        module="layers.0.q_proj",
        expected=X @ KERNEL,
        got=X @ OTHER,
        given=(X,),
        weights={"kernel": KERNEL},
        other_weights={"layers.1.q_proj.kernel": OTHER},
    )
    assert found(case).kind == "weights of another module"
    assert "layers.1.q_proj" in found(case).sentence


TABLE = RNG.normal(size=(9, WIDTH))
IDS = np.array([[1, 4, 2, 0], [8, 3, 0, 0]])
ROOT = math.sqrt(WIDTH)

EMBEDDINGS: dict[str, tuple[str, np.ndarray]] = {
    "no scale": ("embedding scale missing", TABLE[IDS]),
    "twice": ("embedding scale doubled", TABLE[IDS] * WIDTH),
    "padding": ("padding row zeroed", np.where((IDS == 0)[..., None], 0.0, ROOT * TABLE[IDS])),
    "next row": ("ids shifted", ROOT * TABLE[np.minimum(IDS + 1, 8)]),
    "neighbour": ("ids shifted along the length", ROOT * TABLE[np.roll(IDS, 1, axis=1)]),
    "other table": ("wrong embedding table", ROOT * TABLE[::-1][IDS]),
}


@pytest.mark.parametrize("fault", EMBEDDINGS)
def test_embedding(fault: str) -> None:
    kind, got = EMBEDDINGS[fault]
    expected = ROOT * F.embedding(tensor(IDS), tensor(TABLE)).numpy()
    case = Case(
        module="embed",
        expected=expected,
        got=got,
        given_ids=(IDS,),
        weights={"weight": TABLE},
        other_weights={"other.weight": TABLE[::-1]},
    )
    assert found(case).kind == kind


def sinusoids(*, base: float = 1e4, offset: int = 0, divisor: float = 4.0, interleaved: bool = True) -> np.ndarray:
    angles = (np.arange(7) + offset)[:, None] * base ** (-np.arange(4) / divisor)
    pair = [np.sin(angles), np.cos(angles)]
    return np.stack(pair, -1).reshape(7, 8) if interleaved else np.concatenate(pair, -1)


POSITIONS: dict[str, tuple[str, np.ndarray]] = {
    "concatenated": ("positions layout", sinusoids(interleaved=False)),
    "half - 1": ("positions divisor", sinusoids(divisor=3.0)),
    "from 1": ("positions offset", sinusoids(offset=1)),
    "base": ("positions base", sinusoids(base=1e3)),
    "exchanged": ("positions sine and cosine exchanged", sinusoids().reshape(7, 4, 2)[..., ::-1].reshape(7, 8)),
    "scaled": ("positions scale", 2 * sinusoids()),
    "backwards": ("positions step", sinusoids()[::-1]),
}


@pytest.mark.parametrize("fault", POSITIONS)
def test_positions(fault: str) -> None:
    kind, got = POSITIONS[fault]
    assert found(Case(module="positions", expected=sinusoids(), got=got)).kind == kind


def lstm(order: str = "ifgo", *, forget: float = 0.0, inner: Any = np.tanh) -> np.ndarray:
    """By gates in this order of blocks."""
    h = c = np.zeros((BATCH, 4))
    steps = []
    for t in range(LENGTH):
        blocks = np.split(X[:, t] @ OF_INPUT + h @ OF_STATE + GATE_BIAS, 4, axis=1)
        gate = {letter: blocks[order.index(letter)] for letter in "ifgo"}
        i, f, o = (1 / (1 + np.exp(-gate[letter] - (forget if letter == "f" else 0.0))) for letter in "ifo")
        c = f * c + i * inner(gate["g"])
        h = o * np.tanh(c)
        steps.append(h)
    return np.stack(steps, axis=1)


OF_INPUT, OF_STATE, GATE_BIAS = RNG.normal(size=(WIDTH, 16)), RNG.normal(size=(4, 16)), RNG.normal(size=16)


@pytest.mark.parametrize(
    ("kind", "got"),
    [
        ("gate order", lstm("igfo")),
        ("forget bias", lstm(forget=1.0)),
        ("gate activation", lstm(inner=lambda x: np.maximum(x, 0.0))),
    ],
)
def test_lstm(kind: str, got: np.ndarray) -> None:
    module = torch.nn.LSTM(WIDTH, 4, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        module.weight_ih_l0.copy_(tensor(OF_INPUT.T.copy()))
        module.weight_hh_l0.copy_(tensor(OF_STATE.T.copy()))
        module.bias_ih_l0.copy_(tensor(GATE_BIAS))
        module.bias_hh_l0.zero_()
        expected = module(tensor(X))[0].numpy()
    weights = {"cell.dense_i.kernel": OF_INPUT, "cell.dense_h.kernel": OF_STATE, "cell.dense_h.bias": GATE_BIAS}
    assert found(Case(module="rnn", expected=expected, got=got, given=(X,), weights=weights)).kind == kind


def test_gru_with_the_reset_gate_before_the_product() -> None:
    module = torch.nn.GRU(WIDTH, 4, batch_first=True, dtype=torch.float64)
    expected = module(tensor(X))[0].detach().numpy()
    wi, wh = (getattr(module, f"weight_{n}_l0").detach().numpy().T for n in ("ih", "hh"))
    bi, bh = (getattr(module, f"bias_{n}_l0").detach().numpy() for n in ("ih", "hh"))
    h, steps = np.zeros((BATCH, 4)), []
    for t in range(LENGTH):
        of_input, of_state = X[:, t] @ wi + bi, h @ wh + bh
        r, z = (1 / (1 + np.exp(-of_input[:, s] - of_state[:, s])) for s in (slice(0, 4), slice(4, 8)))
        n = np.tanh(of_input[:, 8:] + (r * h) @ wh[:, 8:] + bh[8:])
        h = z * h + (1 - z) * n
        steps.append(h)
    got = np.stack(steps, axis=1)
    weights = {"dense_i.kernel": wi, "dense_h.kernel": wh, "dense_i.bias": bi, "dense_h.bias": bh}
    case = Case(module="gru", expected=expected, got=got, given=(X,), weights=weights)
    assert found(case).kind == "GRU reset placement"


IMAGES, TAPS = RNG.normal(size=(2, 7, 8, 3)), RNG.normal(size=(3, 3, 3, 5))


def convolution(taps: np.ndarray, **options: Any) -> np.ndarray:
    """Channels last."""
    x, kernel = np.moveaxis(IMAGES, -1, 1), taps.transpose(3, 2, 0, 1)
    return np.moveaxis(F.conv2d(tensor(x.copy()), tensor(kernel.copy()), **options).numpy(), 1, -1)


WIDE = RNG.normal(size=(3, 5, 3, 4))
"""A kernel of 3 by 5."""


def test_height_and_width_exchanged_of_a_kernel_that_is_not_square() -> None:
    expected = convolution(WIDE, padding=(1, 2))
    turned = F.conv2d(
        tensor(IMAGES.transpose(0, 3, 2, 1).copy()), tensor(WIDE.transpose(3, 2, 0, 1).copy()), padding=(1, 2)
    )
    got = turned.numpy().transpose(0, 3, 2, 1)
    case = Case(module="conv", expected=expected, got=got, given=(IMAGES,), weights={"kernel": WIDE})
    assert found(case).kind == "convolution kernel axes"


def test_padding_that_counts_in_a_mean() -> None:
    x = tensor(np.moveaxis(IMAGES, -1, 1).copy())
    expected, got = (
        np.moveaxis(F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=counted).numpy(), 1, -1)
        for counted in (True, False)
    )
    case = Case(module="pool", expected=expected, got=got, given=(IMAGES,))
    assert found(case).kind == "padding counted in the pooling"
    largest = np.moveaxis(F.max_pool2d(x, 3, stride=2, padding=1).numpy(), 1, -1)
    assert found(dataclasses.replace(case, got=largest)).kind == "pooling"


@pytest.mark.parametrize(
    ("kind", "taps", "options"),
    [
        ("convolution kernel flipped", TAPS[::-1, ::-1], {"padding": 1}),
        ("convolution kernel axes", TAPS.swapaxes(0, 1), {"padding": 1}),
        ("convolution padding", TAPS, {"padding": 0}),
        ("convolution stride", TAPS, {"padding": 1, "stride": 2}),
        ("convolution dilation", TAPS, {"padding": 1, "dilation": 2}),
    ],
)
def test_convolution(kind: str, taps: np.ndarray, options: dict[str, Any]) -> None:
    expected, got = convolution(TAPS, padding=1), convolution(taps, **options)
    case = Case(module="conv", expected=expected, got=got, given=(IMAGES,), weights={"kernel": TAPS})
    assert found(case).kind == kind


def test_what_no_formula_gives_is_not_explained() -> None:
    noise = RNG.normal(size=X.shape)
    for module, weights in (("norm", {"scale": SCALE, "bias": BIAS}), ("linear", {"kernel": KERNEL, "bias": OFFSET})):
        expected = layer_norm() if module == "norm" else X @ KERNEL + OFFSET
        case = Case(module=module, expected=expected, got=expected + 1e-3 * noise, given=(X,), weights=weights)
        assert diagnose_case(case) is None
        case = Case(module=module, expected=noise, got=expected, given=(X,), weights=weights)
        assert diagnose_case(case) is None, "the formula must give the reference's value too"
