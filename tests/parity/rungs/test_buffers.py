"""The third rung: tables as built, buffers after a run, tables of positions that modules compute."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity.pair import Pair, Precision, Side
from parity.rungs import NotComparedError, Outcome, buffers
from parity.runs import Runs

WIDTH, LENGTH = 4, 5


def table(phase: float = 0.0) -> np.ndarray:
    """(length, width) sinusoids in float64."""
    return np.sin(np.arange(LENGTH)[:, None] / np.arange(1, WIDTH + 1) + phase)


class SinusoidalPositions(torch.nn.Module):
    def forward(self, length: int) -> torch.Tensor:
        return torch.from_numpy(table()[:length]).to(torch.get_default_dtype())


class Reference(torch.nn.Module):
    """A table as a buffer, one computed in a module, running statistics."""

    def __init__(self, dtype: torch.dtype = torch.float32, positions: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.register_buffer("table", torch.from_numpy(table()).to(dtype))
        self.register_buffer("ones", torch.ones(WIDTH))
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.positions = positions or torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + (self.table * self.ones).sum(0).to(x.dtype))


class Port(nnx.Module):
    def __init__(self, values: Any = None, *, training: bool = False, **more: Any) -> None:
        values = table() if values is None else values
        self.table = nnx.Variable(jnp.asarray(values))
        self.ones = nnx.Variable(jnp.ones(WIDTH))
        self.norm = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))
        self.training = training

    def __call__(self, x: jax.Array) -> jax.Array:
        average = False if self.training else None
        return self.norm(x + (self.table * self.ones).sum(0), use_running_average=average)


def climb(reference: Any, port: Any) -> Outcome:
    x = np.random.default_rng(0).standard_normal((3, WIDTH))
    return buffers.climb(Runs(Pair(reference=reference, port=port, inputs={"x": x})))


def failures(outcome: Outcome) -> dict[str, str]:
    return {failure.tensor: failure.detail for section in outcome.sections for failure in section.failures}


def test_equal_buffers() -> None:
    outcome = climb(Reference, Port)
    assert failures(outcome) == {}
    built, after = outcome.sections
    assert [c.tensor for c in built.comparisons] == ["table", "ones"]
    assert "rounded to float32" in built.comparisons[0].detail  # as torch's default dtype makes it
    assert {c.tensor for c in after.comparisons} == {"table", "ones", "norm.mean", "norm.var"}


def test_a_table_of_other_values() -> None:
    values = table()
    values[2, 1] += 1e-3
    found = failures(climb(Reference, lambda: Port(values)))
    assert found.keys() == {"table"}
    assert "first at (2, 1)" in found["table"]


def test_a_table_that_the_port_rounds() -> None:
    def reference(precision: Precision) -> torch.nn.Module:
        dtype = getattr(torch, precision)
        return Reference(dtype).to(dtype)

    # Told the precision, the reference makes its table in float64; the port always in float32.
    assert failures(climb(reference, Port)) == {}
    found = failures(climb(reference, lambda: Port(table().astype(np.float32))))
    assert found == {"table": "the port's is rounded to float32, the reference's is not"}


def test_running_statistics_that_move_in_evaluation() -> None:
    found = failures(climb(Reference, lambda: Port(training=True)))
    assert found.keys() == {"norm.mean", "norm.var"}


class PlainTable(Port):
    """The table as an array, not as a variable: no weight can be loaded into it."""

    def __init__(self, phase: float = 0.0) -> None:
        super().__init__()
        del self.table
        self.table = table(phase)


def test_a_table_that_is_no_variable() -> None:
    outcome = climb(Reference, PlainTable)
    assert failures(outcome) == {}
    assert "table" in {c.tensor for c in outcome.sections[0].comparisons}
    assert failures(climb(Reference, lambda: PlainTable(phase=1e-5))).keys() == {"table"}


def test_a_port_of_shapes_only() -> None:
    outcome = climb(Reference, lambda: nnx.eval_shape(Port))
    assert any("one of shapes only: table, ones could not" in note for note in outcome.notes)
    assert [section.title for section in outcome.sections] == ["buffers after a run"]


class ReferenceWithPositions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = SinusoidalPositions()
        self.out = torch.nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) + self.positions(x.shape[0]).to(x.dtype)[:, :3]


class Positions(nnx.Module):
    def __init__(self, phase: float) -> None:
        self.phase = phase

    def __call__(self, length: int) -> jax.Array:
        return jnp.asarray(table(self.phase)[:length])


class PortWithPositions(nnx.Module):
    def __init__(self, phase: float = 0.0) -> None:
        self.positions = Positions(phase)
        self.out = nnx.Linear(WIDTH, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x) + self.positions(x.shape[0])[:, :3].astype(x.dtype)


@pytest.fixture
def default_float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_float64")
def test_tables_that_modules_compute() -> None:
    def side(phase: float) -> Side:
        return Side(build=lambda: PortWithPositions(phase))

    outcome = climb(ReferenceWithPositions, side(0.0))
    assert failures(outcome) == {}
    assert [(s.title, [c.tensor for c in s.comparisons]) for s in outcome.sections] == [
        ("tables of positions, computed", ["positions"])
    ]
    assert failures(climb(ReferenceWithPositions, side(1e-9))).keys() == {"positions"}


def test_nothing_to_compare_is_not_a_pass() -> None:
    class WithTable(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, 3)
            self.register_buffer("alone", torch.ones(2))

    with pytest.raises(NotComparedError, match="only the reference keeps alone"):
        climb(WithTable, lambda: nnx.Linear(WIDTH, 3, rngs=nnx.Rngs(0)))
