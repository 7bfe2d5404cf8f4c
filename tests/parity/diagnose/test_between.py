"""What a module's own code does between its submodules, and what can be said of any value."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from parity.diagnose import Case, Diagnosis, diagnose_case
from parity.diagnose.activations import FUNCTIONS
from parity.diagnose.expression import Finder

RNG = np.random.default_rng(2)
SHAPE = (3, 5, 8)
X, ATTENDED, NORMED, MEMORY, OTHER = RNG.normal(size=(5, *SHAPE))
POSITIONS = RNG.normal(size=SHAPE[1:])


def found(expected: np.ndarray, got: np.ndarray, **options: Any) -> Diagnosis:
    inside = {name: (array, array) for name, array in options.pop("inside", {}).items()}
    case = Case(module="layer", expected=expected, got=got, inside=inside, **options)
    diagnosis = diagnose_case(case)
    assert diagnosis is not None
    assert diagnosis.module == "layer"
    return diagnosis


RESIDUALS: dict[str, tuple[str, np.ndarray]] = {
    "missing": ("residual missing", ATTENDED),
    "elsewhere": ("residual from another place", ATTENDED + OTHER),
    "minus": ("sign", X - ATTENDED),
    "dropout": ("dropout scale in evaluation", X + ATTENDED / 0.9),
    "scaled": ("scale between modules", X + 0.3 * ATTENDED),
}


@pytest.mark.parametrize("fault", RESIDUALS)
def test_residual(fault: str) -> None:
    kind, got = RESIDUALS[fault]
    inside = {"layer.other": OTHER, "layer.attn": ATTENDED}
    diagnosis = found(X + ATTENDED, got, given=(X,), inside=inside, child="layer.ff")
    assert diagnosis.kind == kind
    assert "gives to ff" in diagnosis.sentence


def test_norm_before_instead_of_after() -> None:
    types = {"layer.norm1": "LayerNorm"}
    later = {"layer.norm1": NORMED}
    diagnosis = found(X, NORMED, given=(X,), later=later, inside_types=types, child="layer.attn")
    assert diagnosis.kind == "norm order"
    assert diagnosis.sentence == "What layer gives to attn is norm1 in the port, its input in the reference"
    assert diagnosis.fix == "give attn its input"


def test_norm_twice_and_sublayers_in_the_other_order() -> None:
    types = {"layer.norm1": "LayerNorm", "layer.norm2": "LayerNorm"}
    inside = {"layer.attn": ATTENDED, "layer.norm1": NORMED}
    later = {"layer.norm1#2": OTHER}
    twice = found(NORMED, OTHER, given=(X,), inside=inside, later=later, inside_types=types, child="layer.ff")
    assert twice.kind == "norm applied twice"
    # The port calls the other sublayer first: its norm is given that one's output, not what the layer is given.
    options = {"later": {"layer.norm2": NORMED}, "afterwards": {"layer.norm2": OTHER}, "inside_types": types}
    assert found(X, NORMED, given=(X,), child="layer.attn", **options).kind == "sublayer order"


def test_a_layer_that_returns_what_it_is_given() -> None:
    diagnosis = found(NORMED, X, given=(X,), inside={"layer.norm2": NORMED}, inside_types={"layer.norm2": "LayerNorm"})
    assert diagnosis.kind == "layer skipped"


def test_dropout_in_evaluation_is_seen_by_what_it_leaves() -> None:
    kept = RNG.random(SHAPE) > 0.1
    diagnosis = found(
        X + ATTENDED, X + ATTENDED * kept / 0.9, given=(X,), inside={"layer.attn": ATTENDED}, child="layer.n"
    )
    assert diagnosis.kind == "dropout off"


def test_what_is_made_of_a_value_does_not_explain_it() -> None:
    """The port's own copy of the value, handed on to a later module, is no source of it."""
    noise = X + ATTENDED + 1e-3 * OTHER
    case = Case(module="layer", child="layer.norm", expected=X + ATTENDED, got=noise, given=(X,))
    assert diagnose_case(dataclasses.replace(case, inside={"layer.attn": (ATTENDED, ATTENDED)})) is None


def test_wrong_memory() -> None:
    given = (X, MEMORY)
    diagnosis = found(MEMORY, NORMED, given=given, inside={"layer.norm1": NORMED}, child="layer.cross")
    assert diagnosis.kind == "wrong memory"


@pytest.mark.parametrize(
    ("kind", "got"),
    [
        ("positions missing", X),
        ("positions added twice", X + 2 * POSITIONS),
        ("embedding scale missing", X / math.sqrt(8) + POSITIONS),
    ],
)
def test_embedding_and_positions(kind: str, got: np.ndarray) -> None:
    inside = {"embed": X, "positions": POSITIONS}
    case = Case(
        module="",
        child="encoder",
        expected=X + POSITIONS,
        got=got,
        inside={name: (array, array) for name, array in inside.items()},
    )
    diagnosis = diagnose_case(case)
    assert diagnosis is not None
    assert diagnosis.kind == kind


ACTIVATIONS: dict[str, tuple[str, Any]] = {
    "tanh form": ("gelu approximation", lambda x: F.gelu(x, approximate="tanh")),
    "quick": ("gelu approximation", lambda x: x * torch.sigmoid(1.702 * x)),
    "relu": ("activation", torch.relu),
    "silu": ("activation", F.silu),
    "none": ("activation missing", lambda x: x),
    "twice": ("activation applied twice", lambda x: F.gelu(F.gelu(x))),
}


@pytest.mark.parametrize("fault", ACTIVATIONS)
def test_activation(fault: str) -> None:
    kind, function = ACTIVATIONS[fault]
    x = torch.from_numpy(X)
    diagnosis = found(
        F.gelu(x).numpy(), function(x).numpy(), given=(OTHER,), inside={"layer.up": X}, child="layer.down"
    )
    assert diagnosis.kind == kind
    assert diagnosis.fix == "jax.nn.gelu(x, approximate=False)"


def test_functions_are_torchs() -> None:
    theirs = {
        "gelu": F.gelu,
        "silu": F.silu,
        "softplus": F.softplus,
        "elu": F.elu,
        "mish": F.mish,
        "selu": F.selu,
        "hard silu": F.hardswish,
        "hard sigmoid": F.hardsigmoid,
        "relu6": F.relu6,
    }
    for name, function in theirs.items():
        np.testing.assert_allclose(
            FUNCTIONS[name](5 * X), function(torch.from_numpy(5 * X)).numpy(), rtol=1e-12, atol=1e-12
        )


def test_gates_that_are_exchanged_and_a_concatenation_in_the_other_order() -> None:
    def silu(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-x))

    inside = {"layer.gate": X, "layer.up": OTHER}
    assert found(silu(X) * OTHER, silu(OTHER) * X, inside=inside).kind == "gate and value exchanged"
    one, other = np.concatenate([X, OTHER], -1), np.concatenate([OTHER, X], -1)
    assert found(one, other, inside=inside).kind == "concatenation order"


def test_flattened_in_another_order_and_pooled_otherwise() -> None:
    inside = {"layer.conv": X}
    flat, other = X.reshape(3, -1), X.swapaxes(1, 2).reshape(3, -1)
    assert found(flat, other, inside=inside).kind == "axes in another order"
    assert found(X.mean(1), X.max(1), inside=inside).kind == "pooling"
    assert found(X.mean(1), X[:, 0], inside=inside).kind == "pooling"


def test_a_value_that_nothing_at_hand_gives_is_not_explained() -> None:
    case = Case(module="layer", expected=X + ATTENDED, got=X + ATTENDED + 1e-3 * OTHER, given=(X,))
    assert diagnose_case(case) is None
    assert Finder(OTHER, {"x": X, "y": ATTENDED}).first() is None


def test_no_sum_is_found_among_too_few_elements() -> None:
    """Three numbers are soon a sum of three others."""
    leaves = {name: RNG.normal(size=3) for name in "abc"}
    assert Finder(RNG.normal(size=3), leaves).first() is None


@pytest.mark.parametrize(
    ("kind", "got"),
    [
        ("shifted by one", np.roll(OTHER, 1, axis=1)),
        ("axes in another order", OTHER.swapaxes(1, 2)),
        ("constant added", OTHER + np.arange(8.0)),
        ("zeros", np.zeros(SHAPE)),
        ("not finite", np.where(OTHER > 1.0, np.nan, OTHER)),
        ("another shape", OTHER[:, :4]),
        ("scale between modules", 3.3 * OTHER),
        ("float32 inside", OTHER.astype(np.float32).astype(np.float64)),
        ("float32 inside", OTHER * (1 + 5e-8 * RNG.normal(size=SHAPE))),
    ],
)
def test_what_can_be_said_of_any_value(kind: str, got: np.ndarray) -> None:
    assert found(OTHER, got, given=(X,)).kind == kind


def test_masks_and_ids_that_are_handed_on_otherwise() -> None:
    mask = RNG.random((3, 6)) > 0.4
    ids = RNG.integers(0, 9, (3, 6))
    for kind, expected, got in (
        ("mask inverted", mask, ~mask),
        ("mask missing", mask, np.ones_like(mask)),
        ("mask off by one", mask, np.roll(mask, 1, axis=1)),
        ("ids shifted", ids, ids + 1),
        ("ids shifted along the length", ids, np.roll(ids, 1, axis=1)),
    ):
        assert found(expected, got, child="layer.attn").kind == kind
    assert diagnose_case(Case(module="layer", child="layer.attn", expected=ids, got=ids[:, ::-1] * 3)) is None
