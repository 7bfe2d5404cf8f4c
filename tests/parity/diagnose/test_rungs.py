"""Suspects of rungs without a failing module: loss, gradients, optimizer, clipping, schedule, and the others."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from parity.compare import Comparison
from parity.diagnose import Case, diagnose_case
from parity.diagnose.clipping import explain_clipping
from parity.diagnose.decoding import explain_decoding
from parity.diagnose.dropout import explain_dropout
from parity.diagnose.gradients import explain_gradients
from parity.diagnose.initial import explain_initialisation
from parity.diagnose.loss import explain_loss
from parity.diagnose.optimizer import explain_optimizer
from parity.diagnose.schedule import explain_schedule
from parity.diagnose.settings import explain_inventory
from parity.diagnose.updates import explain_statistics, explain_trajectory

RNG = np.random.default_rng(3)
LOGITS = RNG.normal(size=(3, 5, 11))
TARGETS = np.where(RNG.random((3, 5)) < 0.3, 0, RNG.integers(1, 11, (3, 5)))


def smoothed(*, amount: float = 0.1, spread: str = "K", reduction: str = "token", padding: bool = False) -> np.ndarray:
    costs = -np.log(np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True))
    nll = np.take_along_axis(costs, TARGETS[..., None], -1)[..., 0]
    others = {
        "K": costs.sum(-1) / 11,
        "K - 1": (costs.sum(-1) - nll) / 10,
        "K - 2": (costs.sum(-1) - nll - costs[..., 0]) / 9,
    }
    cost = (1 - amount) * nll + amount * others[spread]
    counts = np.ones_like(TARGETS, bool) if padding else TARGETS != 0
    cost = np.where(counts, cost, 0.0)
    means = {"token": cost.sum() / counts.sum(), "sum": cost.sum(), "batch": cost.sum() / 3}
    means["sentence"] = (cost.sum(1) / counts.sum(1)).mean()
    return np.array([means[reduction]])


@pytest.mark.parametrize(
    ("kind", "got"),
    [
        ("label smoothing spread", smoothed(spread="K - 1")),
        ("label smoothing spread", smoothed(spread="K - 2")),
        ("label smoothing missing", smoothed(amount=0.0)),
        ("padding counted in the loss", smoothed(padding=True)),
        ("loss reduction", smoothed(reduction="sentence")),
        ("loss reduction", smoothed(reduction="batch")),
    ],
)
def test_loss(kind: str, got: np.ndarray) -> None:
    logits, targets = torch.from_numpy(LOGITS).flatten(0, 1), torch.from_numpy(TARGETS).flatten()
    expected = F.cross_entropy(logits, targets, label_smoothing=0.1, ignore_index=0).numpy()[None]
    diagnosis = explain_loss([LOGITS], [{"ids": TARGETS}], expected, got)
    assert diagnosis is not None
    assert diagnosis.kind == kind


def test_a_loss_in_bfloat16_is_told_by_its_bits() -> None:
    count = np.count_nonzero(TARGETS)
    mantissa, exponent = np.frexp(smoothed() * count)
    got = np.ldexp(np.round(mantissa * 2**8) / 2**8, exponent) / count
    found = explain_loss([LOGITS], [{"ids": TARGETS}], smoothed(), got)
    assert found is not None
    assert found.kind == "bfloat16 inside"


def test_a_loss_of_another_kind_is_not_explained() -> None:
    assert explain_loss([LOGITS], [{"ids": TARGETS}], smoothed(), smoothed() * 1.0123) is None


def test_squared_error_as_a_sum() -> None:
    targets = RNG.normal(size=LOGITS.shape)
    squares = (LOGITS - targets) ** 2
    diagnosis = explain_loss([LOGITS], [{"y": targets}], np.array([squares.mean()]), np.array([squares.sum()]))
    assert diagnosis is not None
    assert diagnosis.kind == "loss reduction"


TABLE_IDS = np.array([[1, 2, 0], [4, 2, 0]])
GRADIENT = RNG.normal(size=(6, 4))


def gradients(got: np.ndarray, expected: np.ndarray = GRADIENT) -> str:
    found = explain_gradients(
        ["e.weight"], {"e.weight": expected}, {"e.weight": got}, {"ids": TABLE_IDS}, nearest="e.weight"
    )
    assert found is not None
    assert found.module == "e.weight"
    return found.kind


def test_gradients() -> None:
    row = np.arange(6)[:, None]
    used = np.isin(row, TABLE_IDS)
    assert gradients(np.zeros_like(GRADIENT)) == "gradient stopped"
    assert gradients(2 * GRADIENT) == "gradient scaled"
    assert gradients(-GRADIENT) == "gradient reversed"
    assert gradients(GRADIENT, np.where(row == 0, 0.0, GRADIENT)) == "padding row gradient"
    assert gradients(np.where(used, GRADIENT, 0.0)) == "tied gradient counted once"
    assert gradients(np.where(used, 0.3 * GRADIENT + 1, GRADIENT)) == "tied gradient counted once"
    assert gradients(GRADIENT[::-1] + 1) == "backward pass"


def updates(optimizer: Any, steps: list[np.ndarray], weights: np.ndarray) -> list[np.ndarray]:
    """By optax in float64, with weights that follow the reference's updates."""
    with jax.enable_x64(True):
        state, found = optimizer.init(jnp.asarray(weights)), []
        for gradient, w in zip(steps, REFERENCE_WEIGHTS, strict=True):
            update, state = optimizer.update(jnp.asarray(gradient), state, jnp.asarray(w))
            found.append(np.asarray(update))
    return found


STEPS = [10 ** RNG.uniform(-9, 0, 12) * RNG.normal(size=12) for _ in range(4)]
START = RNG.normal(size=12)


def torch_updates(**options: Any) -> list[np.ndarray]:
    parameter = torch.nn.Parameter(torch.from_numpy(START.copy()))
    optimizer = torch.optim.Adam([parameter], lr=1e-3, betas=(0.9, 0.98), eps=1e-9, **options)
    found = []
    for gradient in STEPS:
        before = parameter.detach().clone()
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        found.append((parameter.detach() - before).numpy())
    return found


REFERENCE = torch_updates()
REFERENCE_WEIGHTS = [START + sum(REFERENCE[:i], np.zeros(12)) for i in range(4)]
ADAM: dict[str, Any] = {"b1": 0.9, "b2": 0.98, "eps": 1e-9}


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("Adam eps", optax.adam(1e-3, **{**ADAM, "eps": 1e-8})),
        ("Adam eps placement", optax.adam(1e-3, **{**ADAM, "eps": 0.0}, eps_root=1e-9)),
        ("Adam betas", optax.adam(1e-3, **{**ADAM, "b2": 0.999})),
        ("weight decay", optax.adamw(1e-3, **ADAM, weight_decay=0.01)),
        ("optimizer learning rate", optax.adam(2e-3, **ADAM)),
        ("optimizer rule", optax.sgd(1e-3)),
        ("Adam bias correction", optax.chain(optax.scale_by_rms(0.98, 1e-9), optax.scale(-1e-3))),
    ],
)
def test_optimizer(kind: str, optimizer: Any) -> None:
    got = updates(optimizer, STEPS, START)
    found = explain_optimizer({"gradients": STEPS, "weights": START, "reference": REFERENCE, "port": got})
    if kind == "Adam bias correction":  # without a first moment it is no Adam at all
        assert found is None or found.kind in (kind, "Adam betas")
        return
    assert found is not None
    assert found.kind == kind


def test_l2_inside_the_gradient_is_not_decoupled_decay() -> None:
    reference = torch_updates(weight_decay=0.01)
    weights = [START + sum(reference[:i], np.zeros(12)) for i in range(4)]
    with jax.enable_x64(True):
        optimizer = optax.adamw(1e-3, **ADAM, weight_decay=0.01)
        state, got = optimizer.init(jnp.asarray(START)), []
        for gradient, w in zip(STEPS, weights, strict=True):
            update, state = optimizer.update(jnp.asarray(gradient), state, jnp.asarray(w))
            got.append(np.asarray(update))
    found = explain_optimizer({"gradients": STEPS, "weights": START, "reference": reference, "port": got})
    assert found is not None
    assert found.kind == "weight decay placement"


def test_updates_that_are_scaled_and_a_state_that_is_lost() -> None:
    scaled = [1.07 * update for update in REFERENCE]
    found = explain_optimizer({"gradients": STEPS, "weights": START, "reference": REFERENCE, "port": scaled})
    assert found is not None
    assert found.kind == "optimizer learning rate"
    lost = [-1e-3 * g / (np.abs(g) + 1e-9) for g in STEPS]
    found = explain_optimizer({"gradients": STEPS, "weights": START, "reference": REFERENCE, "port": lost})
    assert found is not None
    assert found.kind == "optimizer state lost"


def test_an_optimizer_that_leaves_a_parameter_out() -> None:
    still = [np.zeros(12)] * 4
    evidence = {"gradients": STEPS, "weights": START, "reference": REFERENCE, "port": still, "parameter": "norm.bias"}
    found = explain_optimizer(evidence)
    assert found is not None
    assert (found.kind, found.module) == ("parameter not updated", "norm.bias")


GRADIENTS = {"a": 3 * RNG.normal(size=(4, 3)), "b": RNG.normal(size=7)}
NORM = math.sqrt(sum((g**2).sum() for g in GRADIENTS.values()))


@pytest.mark.parametrize(
    ("kind", "clip"),
    [
        ("clip constant", lambda g: g / (NORM + 1e-6)),
        ("clip per tensor", lambda g: g / max(1.0, np.linalg.norm(g))),
        ("clip by value", lambda g: np.clip(g, -1.0, 1.0)),
        ("clipping missing", lambda g: g),
        ("clip limit", lambda g: 2 * g / NORM),
    ],
)
def test_clipping(kind: str, clip: Any) -> None:
    reference = {name: g / NORM for name, g in GRADIENTS.items()}
    port = {name: clip(g) for name, g in GRADIENTS.items()}
    evidence = {"gradients": GRADIENTS, "reference": reference, "port": port, "max_norm": 1.0, "norm": NORM}
    found = explain_clipping(evidence)
    assert found is not None
    assert found.kind == kind


TABLE_STEPS = np.array([1, 2, 3, 39, 40, 41, 80, 1000, 100_000])


def noam(steps: np.ndarray, *, warmup: float = 40.0, factor: float = 0.2) -> np.ndarray:
    steps = np.maximum(steps.astype(float), 1e-30)
    return factor * np.minimum(steps**-0.5, steps * warmup**-1.5)


@pytest.mark.parametrize(
    ("kind", "got"),
    [
        ("learning-rate step", np.where(TABLE_STEPS > 1, noam(TABLE_STEPS - 1), 0.0)),
        ("learning-rate step", noam(TABLE_STEPS + 1)),
        ("learning-rate scale", 3 * noam(TABLE_STEPS)),
        ("learning-rate warm-up", noam(TABLE_STEPS, warmup=50.0)),
        ("learning-rate warm-up", 0.2 * TABLE_STEPS**-0.5),
        ("learning-rate decay", np.minimum(noam(TABLE_STEPS), noam(TABLE_STEPS) * (40 / TABLE_STEPS) ** 0.25)),
    ],
)
def test_schedule(kind: str, got: np.ndarray) -> None:
    found = explain_schedule({"steps": TABLE_STEPS, "reference": noam(TABLE_STEPS), "port": got})
    assert found is not None
    assert found.kind == kind


def test_initialisation() -> None:
    limit = math.sqrt(6 / (20 + 30))
    xavier = RNG.uniform(-limit, limit, 40_000)
    for kind, got in (
        ("initialisation scale", RNG.uniform(-1, 1, 40_000) * math.sqrt(3 / 20)),
        ("initialisation distribution", RNG.normal(size=40_000) * math.sqrt(2 / 50)),
        ("initialisation constant", np.zeros(40_000)),
    ):
        found = explain_initialisation({"parameter": "w", "shape": (20, 30), "reference": xavier, "port": got})
        assert found is not None
        assert found.kind == kind
        assert "Xavier" in found.fix
    same = RNG.uniform(-limit, limit, 40_000)
    assert explain_initialisation({"parameter": "w", "shape": (20, 30), "reference": xavier, "port": same}) is None


def test_decoding() -> None:
    ids = np.array([[5, 6, 7, 2, 0, 0], [8, 9, 4, 3, 5, 2]])
    for kind, got in (
        ("decoding off by one", np.concatenate([[[1], [1]], ids[:, :-1]], axis=1)),
        ("decoding stops early", np.array([[5, 6, 7, 2, 0, 0], [8, 9, 4, 0, 0, 0]])),
        ("decoding does not stop", np.array([[5, 6, 7, 2, 9, 9], [8, 9, 4, 3, 5, 2]])),
        ("decoded ids", np.array([[5, 6, 7, 2, 0, 0], [8, 9, 4, 6, 1, 3]])),
        # The reference goes on with padding after a 7, which ends nothing: it is what it decodes.
        ("decoded ids", np.array([[5, 6, 7, 2, 9, 0], [8, 9, 4, 3, 5, 9]])),
        ("decoding starts otherwise", np.array([[6, 6, 7, 2, 0, 0], [4, 8, 9, 3, 1, 2]])),
    ):
        found = explain_decoding({"reference": ids, "port": got})
        assert found is not None
        assert found.kind == kind


def test_dropout() -> None:
    sites = {"drop": 0.9, "layers.0.drop": 0.9}
    axes = {side: {site: frozenset[int]() for site in sites} for side in ("reference", "port")}
    rates = dict.fromkeys(sites, 0.1)
    clean = {"rates": rates, "reference": sites, "port": dict(sites), "shared_axes": axes}
    assert explain_dropout(clean) is None
    shared = {**axes, "port": {"drop": frozenset(), "layers.0.drop": frozenset({0})}}
    for kind, module, evidence in (
        ("dropout mask shared", "layers.0.drop", {**clean, "shared_axes": shared}),
        ("dropout rate", "drop", {**clean, "port": {**sites, "drop": 0.8}}),
        ("dropout off", "drop", {**clean, "port": {**sites, "drop": 1.0}}),
    ):
        found = explain_dropout(evidence)
        assert found is not None
        assert (found.kind, found.module) == (kind, module)
    lost = Comparison(tensor="drop", error=math.inf, bound=0.0, detail="only the reference drops out here")
    found = explain_dropout({}, [lost])
    assert found is not None
    assert found.kind == "dropout in another place"


def test_dropout_with_the_same_masks() -> None:
    x, y = RNG.normal(size=(2, 3, 5, 4))
    mask = RNG.random((3, 5, 4)) > 0.25
    for kind, got in (
        ("dropout scale missing", x + y * mask),
        ("dropout off", x + y / 0.75),
        ("dropout mask inverted", x + y * ~mask / 0.75),
        ("dropout in another place", x * mask / 0.75 + y),
    ):
        case = Case(
            module="layer",
            child="layer.norm",
            expected=x + y * mask / 0.75,
            got=got,
            given=(x,),
            inside={"layer.attn": (y, y)},
            masks={"layer.drop": mask},
        )
        found = diagnose_case(case)
        assert found is not None
        assert found.kind == kind


def test_inventory() -> None:
    for kind, tensor, detail in (
        ("norm eps", "layers.0.norm: eps", "reference 1e-05, port 1e-06"),
        ("momentum convention", "bn: momentum", "reference 0.1, port 0.1"),
        ("gelu approximation", "ff: activation", "reference gelu (erf), port gelu (tanh)"),
        ("dropout rate", "drop: dropout rate", "reference 0.1, port 0.2"),
        ("trained on one side only", "bias", "bias is not trained in the reference, trained in the port"),
        ("norm extra", "encoder.final_norm", "only the port has it: LayerNorm with scale, bias"),
        ("norm missing", "encoder.final_norm", "only the reference has it: LayerNorm with weight, bias"),
    ):
        found = explain_inventory([Comparison(tensor=tensor, error=math.inf, bound=0.0, detail=detail)])
        assert found is not None
        assert found.kind == kind
    shapes = {"src_embedding.weight": (31, 8), "output_projection.kernel": (8, 31)}
    line = "missing 'output_projection.kernel' (8, 31) float32: nothing gives it"
    tied = explain_inventory([Comparison(tensor="output_projection.kernel", error=1.0, bound=0.0, detail=line)], shapes)
    assert tied is not None
    assert tied.kind == "tied on one side only"
    assert explain_inventory([Comparison(tensor="x", error=1.0, bound=0.0, detail="something else")]) is None


def test_running_statistics_and_steps_that_change_nothing() -> None:
    old, batch = RNG.normal(size=(2, 6))
    found = explain_statistics(old, old + 0.1 * (batch - old), old + 0.9 * (batch - old))
    assert found is not None
    assert found.kind == "momentum convention"
    after = old + 0.1 * (batch * 8 / 7 - old)
    biased = explain_statistics(old, after, old + 0.1 * (batch - old), name="bn.var", count=8)
    assert biased is not None
    assert biased.kind == "running variance biased"
    found = explain_statistics(old, old + 0.1 * (batch - old), old)
    assert found is not None
    assert found.kind == "running statistics not updated"
    evidence = {
        "unchanged": {"reference": [], "port": []},
        "still": ["b"],
        "distances": {"a": [0.0, 1e-3], "b": [1e-2, 2e-2]},
        "bounds": {"a": [1e-10, 1e-10], "b": [1e-10, 1e-10]},
        "first": 1,
        "departure": "jump",
    }
    found = explain_trajectory(evidence)
    assert found is not None
    assert (found.kind, found.module) == ("parameter not updated", "b")
    found = explain_trajectory({**evidence, "still": []})
    assert found is not None
    assert (found.kind, found.module) == ("first step differs", "b")
    found = explain_trajectory({"unchanged": {"reference": [], "port": [1, 2]}, "first": 1, "departure": "jump"})
    assert found is not None
    assert found.kind == "step changes nothing"
