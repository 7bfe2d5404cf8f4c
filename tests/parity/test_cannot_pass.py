"""Ways in which checks of others could not fail (P23): here each is planted, and the harness does fail.

One reference, and ports that an inattentive comparison would wave through.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import parity
from parity import ladder
from parity.pair import Pair, Side
from parity.rungs import Outcome, Rung

CORE = ("weights", "forward", "loss", "gradients")


class Reference(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Port(nnx.Module):
    def __init__(self, change: Callable[[jax.Array], jax.Array]):
        self.layer = nnx.Linear(5, 6, rngs=nnx.Rngs(0))
        self.change = change

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.change(self.layer(x))


def pair(change: Callable[[jax.Array], jax.Array] = lambda y: y, reference: type[torch.nn.Module] = Reference) -> Pair:
    x = np.random.default_rng(0).standard_normal((4, 5))
    return Pair(reference=reference, port=lambda: Port(change), inputs={"x": x})


def antisymmetric(y: jax.Array) -> jax.Array:
    """Large differences, the sum of which is exactly zero."""
    return y + jnp.where(jnp.arange(6) % 2 == 0, 0.5, -0.5)


PORTS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "a permutation, which has the same mean": lambda y: y[:, ::-1],
    "rows permuted": lambda y: y[::-1],
    "the sign": lambda y: -y,
    "differences that cancel": antisymmetric,
    "NaN, which zeroing would hide": lambda y: y.at[1, 2].set(jnp.nan),
    "infinity": lambda y: y.at[1, 2].set(jnp.inf),
    "all NaN": lambda y: y * jnp.nan,
    "zeros, within rtol=1": lambda y: y * 0.0,
    "twice as much, within rtol=1": lambda y: y * 1.999,
    "one part in a billion": lambda y: y * (1.0 + 1e-9),
    "one element of many": lambda y: y.at[3, 5].add(1e-9),
    "another shape that broadcasts": lambda y: y[:1],
    "an axis more": lambda y: y[None],
    "nothing": lambda y: y[:0],
}


@pytest.mark.parametrize("name", PORTS)
def test_it_fails(name: str) -> None:
    outcome = ladder.check(pair(PORTS[name]), rungs=CORE)
    assert not outcome.passed
    assert [rung.name for rung in outcome.failed] == ["forward"]


def test_the_same_pair_without_a_fault_passes() -> None:
    assert ladder.check(pair(), rungs=CORE).passed


def test_nan_on_both_sides_everywhere_is_no_proof() -> None:
    class NaN(Reference):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float("nan")

    assert not ladder.check(pair(lambda y: y * jnp.nan, NaN), rungs=CORE).passed


def test_nan_at_another_place_is_no_excuse() -> None:
    class NaN(Reference):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return torch.where(torch.arange(6) == 0, float("nan"), y)

    assert not ladder.check(pair(lambda y: y.at[:, 1].set(jnp.nan), NaN), rungs=CORE).passed


def test_the_assertion_is_raised_and_not_printed() -> None:
    with pytest.raises(AssertionError, match="forward"):
        parity.assert_parity(pair(PORTS["one part in a billion"]), rungs=CORE)
    parity.assert_parity(pair(), rungs=CORE)


def test_a_comparison_that_was_left_out_is_not_a_pass() -> None:
    outcome = ladder.check(pair(), rungs=("weights",))
    assert not outcome.passed
    assert not outcome.rung("forward").passed
    with pytest.raises(AssertionError):
        parity.assert_parity(pair(), rungs=("weights",))


def test_a_rung_without_anything_to_compare_is_not_a_pass() -> None:
    outcome = ladder.check(pair(), rungs=(*CORE, "decoding"))
    assert outcome.rung("decoding").status == "skipped"
    assert not outcome.rung("decoding").passed
    with pytest.raises(AssertionError, match="decod"):
        parity.assert_parity(pair(), rungs=(*CORE, "decoding"), require=("decoding",))
    empty = Rung(number=1, name="empty", title="", outcome=Outcome(sections=()))
    assert empty.status == "failed"


def test_a_model_that_returns_no_numbers_is_no_proof() -> None:
    port = Side(build=lambda: Port(lambda y: y), call=lambda module, inputs: {})
    reference = Side(build=Reference, call=lambda module, inputs: {})
    nothing = Pair(reference=reference, port=port, inputs={"x": np.ones((2, 5))})
    with pytest.raises(ValueError, match=r"expected .* to return"):
        ladder.check(nothing, rungs=CORE)


PORT_FILE = """
import flax.nnx as nnx
import numpy as np
import torch

import parity


class Port(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(5, 6, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(x) {change}


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 6)

    def forward(self, x):
        return self.layer(x)


def pair():
    return parity.Pair(reference=Reference, port=Port, inputs={{"x": np.random.default_rng(0).normal(size=(4, 5))}})
"""


@pytest.mark.parametrize(("change", "status"), [("", 0), ("* (1 + 1e-9)", 1)])
def test_the_exit_status_tells(change: str, status: int, tmp_path: Path) -> None:
    file = tmp_path / "my_port.py"
    file.write_text(PORT_FILE.format(change=change), encoding="utf-8")
    command = [sys.executable, "-m", "parity", "check", str(file), "--rungs", *CORE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, done.stdout + done.stderr
