"""A module casts to float32 inside: from there on the float32 rule judges, and the report says where."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from flax import nnx
from torch.nn import functional

from parity.compare import Comparison
from parity.pair import Pair
from parity.rungs import Outcome
from parity.tolerances import FLOAT64_RELATIVE
from tests.parity.one_layer import X, climb, failures


class Attention(torch.nn.Module):
    """Casts where it is told to."""

    def __init__(self, cast: bool = False) -> None:
        super().__init__()
        self.cast = cast
        self.before = torch.nn.Linear(5, 5)
        self.attend = Softmax(cast)
        self.after = torch.nn.Linear(5, 2)

    def forward(self, x: Any) -> Any:
        return self.after(self.attend(self.before(x)))


class Softmax(torch.nn.Module):
    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.cast = cast

    def forward(self, x: Any) -> Any:
        scores = x @ x.mT
        return functional.softmax(scores, -1, dtype=torch.float32 if self.cast else None).to(x.dtype) @ x


class FlaxAttention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, cast: bool, error: float = 0.0):
        self.before = nnx.Linear(5, 5, rngs=rngs)
        self.attend = FlaxSoftmax(cast, error)
        self.after = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.after(self.attend(self.before(x)))


class FlaxSoftmax(nnx.Module):
    def __init__(self, cast: bool, error: float):
        self.cast = cast
        self.error = error

    def __call__(self, x: Any) -> Any:
        scores = (x @ x.mT) * (1 + self.error)
        wanted = jnp.float32 if self.cast else x.dtype
        return jax.nn.softmax(scores.astype(wanted)).astype(x.dtype) @ x


def casting(*, reference: bool, port: bool, error: float = 0.0) -> Pair:
    return Pair(
        reference=lambda: Attention(reference),
        port=lambda: FlaxAttention(nnx.Rngs(0), cast=port, error=error),
        inputs=X,
    )


@pytest.mark.parametrize(("reference", "port", "side"), [(False, True, "port"), (True, False, "reference")])
def test_float64_ends_at_a_module_that_casts_and_float32_judges_from_there(
    reference: bool, port: bool, side: str
) -> None:
    runs, found, passed = climb(casting(reference=reference, port=port))
    assert passed, failures(found)
    (note,) = [note for note in found.notes if "float64 ends" in note]
    assert note.startswith(f"float64 ends at attend of the {side} (test_float64_end.py:")
    bounds = _bounds(found)
    assert bounds["before"] == FLOAT64_RELATIVE
    assert all(bounds[name] > 1e-7 for name in ("attend", "after", "output"))
    assert min(runs.float64_gradient_bounds(0).values()) > 1e-7
    assert _errors(found)["attend"] > FLOAT64_RELATIVE, "without the rule it would have failed"


def _bounds(outcome: Outcome) -> dict[str, float]:
    return {c.tensor: c.bound for c in _exact(outcome)}


def _errors(outcome: Outcome) -> dict[str, float]:
    return {c.tensor: c.error for c in _exact(outcome)}


def _exact(outcome: Outcome) -> tuple[Comparison, ...]:
    return outcome.sections[0].comparisons


def test_a_fault_beyond_float32_is_found_where_float64_has_ended() -> None:
    runs, found, passed = climb(casting(reference=False, port=True, error=1e-4))
    assert not passed
    assert failures(found)[:1] == ["attend"]
    assert runs.float64_ends(0) is not None


def test_a_fault_before_the_cast_is_judged_by_float64() -> None:
    pair = casting(reference=False, port=True)

    def build() -> nnx.Module:
        module = FlaxAttention(nnx.Rngs(0), cast=True)
        module.before = OffLinear(5, 5, rngs=nnx.Rngs(0))
        return module

    _, found, passed = climb(dataclasses.replace(pair, port=build))
    assert not passed
    assert failures(found)[0] == "before"


class OffLinear(nnx.Linear):
    def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
        return super().__call__(inputs) * (1 + 1e-9)


def test_float64_does_not_end_where_nobody_casts() -> None:
    runs, found, passed = climb(casting(reference=False, port=False))
    assert passed
    assert runs.float64_ends(0) is None
    assert runs.float64_bounds(0) == {}
    assert runs.float64_gradient_bounds(0) == {}
    assert not any("float64 ends" in note for note in found.notes)
