"""The first day of a real port: half of it exists, returns other containers, is scanned, casts, has padding."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity.follow import follow
from parity.pair import Pair
from parity.runs import Runs
from parity.trace import call_of
from tests.parity.one_layer import FlaxLayer, FlaxLayerOffByABillionth, Layer, X, climb, failures

RNG = np.random.default_rng(0)


class Boxes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = BoxesInside()

    def forward(self, x: Any) -> Any:
        inside = self.inner(x)
        return inside["b"], {"sum": inside["a"] + inside["b"]}


class BoxesInside(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(5, 6)

    def forward(self, x: Any) -> Any:
        x = self.lin(x)
        return {"b": torch.tanh(x), "a": torch.sin(x), "note": "no array", "nothing": None}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Both:
    first: Any
    second: Any


class FlaxBoxes(nnx.Module):
    swapped = False

    def __init__(self, rngs: nnx.Rngs):
        self.inner = FlaxBoxesInside(rngs, self.swapped)

    def __call__(self, x: Any) -> Any:
        b, a = self.inner(x)
        return Both(first=a if self.swapped else b, second=a + b)


class FlaxBoxesInside(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, swapped: bool):
        self.lin = nnx.Linear(5, 6, rngs=rngs)
        self.swapped = swapped

    def __call__(self, x: Any) -> Any:
        x = self.lin(x)
        both = (jnp.tanh(x), jnp.sin(x))
        return both[::-1] if self.swapped else both


class FlaxBoxesSwapped(FlaxBoxes):
    swapped = True


def test_a_dictionary_and_a_tuple_are_matched_by_position_and_the_report_says_so() -> None:
    runs, found, passed = climb(Pair(reference=Boxes, port=lambda: FlaxBoxes(nnx.Rngs(0)), inputs=X))
    assert passed, failures(found)
    assert "keys differ, matched by position: inner, output" in found.notes
    assert runs.port("float64").outputs.keys() == {"inner.lin", "inner[b]", "inner[a]"}
    _, found, passed = climb(Pair(reference=Boxes, port=lambda: FlaxBoxesSwapped(nnx.Rngs(0)), inputs=X))
    assert not passed
    assert {"inner[b]", "inner[a]"} <= set(failures(found))


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer(), Layer()])
        self.head = torch.nn.Linear(5, 2)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class FlaxStack(nnx.Module):
    axes: Any = 0
    layer: type[FlaxLayer] = FlaxLayer

    def __init__(self, rngs: nnx.Rngs):
        make = nnx.split_rngs(splits=3)(nnx.vmap(self.layer, in_axes=0, out_axes=0))
        self.layers = make(rngs)
        self.head = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        scan = nnx.scan(lambda layer, x: layer(x), in_axes=(self.axes, nnx.Carry), out_axes=nnx.Carry)
        return self.head(scan(self.layers, x))


class FlaxStackOff(FlaxStack):
    layer = FlaxLayerOffByABillionth


class FlaxStackThatKeepsItsValues(FlaxStack):
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})


def test_layers_under_scan_are_compared_one_by_one() -> None:
    runs, found, passed = climb(Pair(reference=Stack, port=lambda: FlaxStack(nnx.Rngs(0)), inputs=X))
    assert passed, failures(found)
    assert not runs.uncompared
    compared = {comparison.tensor for section in found.sections for comparison in section.comparisons}
    assert {f"layers.{i}.lin" for i in range(3)} | {f"layers.{i}" for i in range(3)} | {"head"} <= compared


def test_a_fault_under_scan_is_located_in_the_first_layer() -> None:
    runs = Runs(Pair(reference=Stack, port=lambda: FlaxStackOff(nnx.Rngs(0)), inputs=X))
    port, reference = runs.port("float64"), runs.reference("float64")
    found = follow(port, reference, names=runs.comparable(reference, port))
    assert found is not None
    assert found.call == "layers.0"


def test_what_scan_keeps_is_named_and_the_rest_is_compared() -> None:
    pair = Pair(reference=Stack, port=lambda: FlaxStackThatKeepsItsValues(nnx.Rngs(0)), inputs=X)
    _, found, passed = climb(pair)
    assert passed, failures(found)
    (note,) = [note for note in found.notes if "keeps its values" in note]
    assert all(f"layers.{i}.lin, " in note for i in range(3)), note
    compared = {comparison.tensor for section in found.sections for comparison in section.comparisons}
    assert {"head", "output"} <= compared
    assert not any(name.startswith("layers") for name in compared)


def test_what_is_not_captured_does_not_hide_a_fault() -> None:
    class Off(FlaxStackThatKeepsItsValues):
        layer = FlaxLayerOffByABillionth

    _, found, passed = climb(Pair(reference=Stack, port=lambda: Off(nnx.Rngs(0)), inputs=X))
    assert not passed
    assert {"head", "output"} <= set(failures(found))


class Methods(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 5)
        self.table = Table()

    def encode(self, x: Any) -> Any:
        return torch.tanh(self.first(x))

    def only_here(self, x: Any) -> Any:
        return 2 * x

    def forward(self, x: Any) -> Any:
        return self.table.scores(self.only_here(self.encode(x)))


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 5)

    def scores(self, x: Any) -> Any:
        return x @ self.embedding.weight.T


class FlaxMethods(nnx.Module):
    error = 0.0

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(5, 5, rngs=rngs)
        self.table = FlaxTable(rngs, self.error)

    def encode(self, x: Any) -> Any:
        return jnp.tanh(self.first(x))

    def __call__(self, x: Any) -> Any:
        return self.table.scores(2 * self.encode(x))


class FlaxTable(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, error: float):
        self.embedding = nnx.Embed(7, 5, rngs=rngs)
        self.error = error

    def scores(self, x: Any) -> Any:
        return self.embedding.attend(x) * (1 + self.error)


class FlaxMethodsOff(FlaxMethods):
    error = 1e-9


def test_methods_of_both_sides_are_compared_and_one_sided_ones_noted() -> None:
    runs, found, passed = climb(Pair(reference=Methods, port=lambda: FlaxMethods(nnx.Rngs(0)), inputs=X))
    assert passed, failures(found)
    compared = {comparison.tensor for section in found.sections for comparison in section.comparisons}
    assert {":encode", "table:scores"} <= compared
    assert runs.uncompared == {":only_here", "table.embedding:attend"}
    off = Runs(Pair(reference=Methods, port=lambda: FlaxMethodsOff(nnx.Rngs(0)), inputs=X))
    port, reference = off.port("float64"), off.reference("float64")
    located = follow(port, reference, names=off.comparable(reference, port))
    assert located is not None
    assert located.call == "table:scores"


def test_a_root_that_differs_is_found_where_all_its_modules_are_equal() -> None:
    class Scaled(FlaxStack):
        def __call__(self, x: Any) -> Any:
            return super().__call__(x) * (1 + 1e-9)

    runs, found, passed = climb(Pair(reference=Stack, port=lambda: Scaled(nnx.Rngs(0)), inputs=X))
    assert not passed
    assert set(failures(found)) >= {"output"}
    port, reference = runs.port("float64"), runs.reference("float64")
    located = follow(port, reference, names=runs.comparable(reference, port))
    assert located is not None
    assert located.call == "", "the model itself"


VALID = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]], bool)


class Padded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(5, 6)

    def forward(self, x: Any, keep: Any) -> Any:
        return self.lin(x).where(keep[..., None], 0.0)


class FlaxPadded(nnx.Module):
    error = 0.0

    def __init__(self, rngs: nnx.Rngs):
        self.lin = nnx.Linear(5, 6, rngs=rngs)

    def __call__(self, x: Any, keep: Any) -> Any:
        x = jnp.where(keep[..., None], self.lin(x), jnp.nan)
        return x.at[2, 3].multiply(1 + self.error)


class FlaxPaddedOff(FlaxPadded):
    error = 1e-9


def padded(port: Any, valid: Callable[[Any], Any] | None) -> Pair:
    return Pair(reference=Padded, port=lambda: port(nnx.Rngs(0)), inputs=X | {"keep": VALID}, valid=valid)


def test_positions_that_do_not_count_may_hold_anything() -> None:
    runs, found, passed = climb(padded(FlaxPadded, lambda inputs: inputs["keep"]))
    assert passed, failures(found)
    assert runs.port("float64").results["output"].shape == (9, 6)
    assert np.isfinite(runs.port("float64").results["output"]).all()


@pytest.mark.parametrize("port", [FlaxPadded, FlaxPaddedOff])
def test_positions_that_count_are_compared(port: Any) -> None:
    valid = None if port is FlaxPadded else lambda inputs: inputs["keep"]
    _, found, passed = climb(padded(port, valid))
    assert not passed
    assert "output" in failures(found)


def test_handed_inputs_keep_errors_from_adding_up() -> None:
    runs = Runs(
        Pair(
            reference=Stack,
            port=lambda: FlaxList(nnx.Rngs(0)),
            inputs=X,
            modules=(("layers.{i}", "blocks.{i}"),),
        )
    )
    reference, port, handed = runs.reference("float64"), runs.port("float64"), runs.handed()
    assert handed is runs.handed(0)

    def equal(trace: Any, name: str) -> bool:
        return bool(np.allclose(trace.outputs[name], reference.outputs[name], rtol=1e-12, atol=1e-13))

    assert [name for name in reference.outputs if not equal(port, name)] == [
        "layers.1",
        "layers.2.lin",
        "layers.2",
        "head",
    ]
    assert [name for name in reference.outputs if not equal(handed, name)] == ["layers.1"]
    np.testing.assert_array_equal(handed.given["layers.2"], handed.outputs["layers.1"])
    assert {call_of(name) for name in handed.given} == {call_of(name) for name in reference.given}


class FlaxList(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        blocks = [FlaxLayer(rngs), FlaxLayerOffByABillionth(rngs), FlaxLayer(rngs)]
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return self.head(x)
