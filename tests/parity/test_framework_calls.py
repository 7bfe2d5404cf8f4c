"""Calls of the frameworks' own modules whose arrays come in another order, or not at all, on one side."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from parity import ladder
from parity.facts import ModuleFacts
from parity.framework_calls import ORDERS, FrameworkCalls
from parity.pair import Pair
from parity.trace import Trace


def array(number: float) -> np.ndarray:
    return np.full((2, 3), number)


X, H, C, OUT = (array(n) for n in range(4))


def trace(given: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> Trace:
    return Trace(
        given=given,
        given_ids={},
        outputs=outputs,
        results={},
        loss=np.zeros(()),
        gradients={},
        buffers={},
        summed={},
        narrow={name: "m at file:1" for name in outputs},
    )


def calls(reference: str, port: str) -> FrameworkCalls:
    def facts(layer: str) -> dict[str, ModuleFacts]:
        return {"m": ModuleFacts(type=layer, layer=layer), "other": ModuleFacts(type="Own")}

    return FrameworkCalls(facts(reference), facts(port), {"m": "m", "other": "other"})


CASES: list[tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("MultiheadAttention", "MultiHeadAttention", {"": X}, {"": OUT}, {"[0]": X, "[1]": X, "[2]": X}, {"[0]": OUT}),
    (
        "MultiheadAttention",
        "MultiHeadAttention",
        {"[0]": X, "[1]": H},
        {"": OUT},
        {"[0]": X, "[1]": H, "[2]": H},
        {"[0]": OUT},
    ),
    ("LSTM", "RNN", {"": X}, {"": OUT}, {"": X}, {"[0]": OUT}),
    (
        "LSTM",
        "RNN",
        {"[0]": X, "[1]": C, "[2]": H},
        {"[0.0]": C, "[0.1]": H, "[1]": OUT},
        {"[0]": X, "[1]": H[None], "[2]": C[None]},
        {"[0]": OUT, "[1.0]": H[None], "[1.1]": C[None]},
    ),
    (
        "GRU",
        "RNN",
        {"[0]": X, "[1]": H},
        {"[0]": H, "[1]": OUT},
        {"[0]": X, "[1]": H[None]},
        {"[0]": OUT, "[1]": H[None]},
    ),
    ("LSTM", "Bidirectional", {"": X}, {"": OUT}, {"": X}, {"[0]": OUT}),
    (
        "LSTMCell",
        "LSTMCell",
        {"[0]": C, "[1]": H, "[2]": X},
        {"[0.0]": C, "[0.1]": OUT, "[1]": OUT},
        {"[0]": X, "[1]": H, "[2]": C},
        {"[0]": OUT, "[1]": C},
    ),
    ("GRUCell", "GRUCell", {"[0]": H, "[1]": X}, {"[0]": OUT, "[1]": OUT}, {"[0]": X, "[1]": H}, {"": OUT}),
]


def under(call: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {call + suffix: value for suffix, value in arrays.items()}


@pytest.mark.parametrize(("reference", "port", "given", "outputs", "expected_given", "expected"), CASES)
def test_in_the_order_of_the_reference(
    reference: str, port: str, given: Any, outputs: Any, expected_given: Any, expected: Any
) -> None:
    ordered = calls(reference, port)
    found = ordered.apply(trace(under("m#2", given), {**under("m#2", outputs), "other": X}), {})
    assert found.given.keys() == under("m#2", expected_given).keys()
    assert list(found.outputs) == [*under("m#2", expected), "other"]
    for name, value in {**under("m#2", expected), "other": X}.items():
        assert np.array_equal(found.outputs[name], value), name
        assert found.narrow[name] == "m at file:1"
    for name, value in under("m#2", expected_given).items():
        assert np.array_equal(found.given[name], value), name
    # And back: what the reference was given, as the port wants it.
    back = ordered.handed({"m": list(expected_given.values())})["m"]
    assert all(np.array_equal(a, b) for a, b in zip(back, given.values(), strict=False))


def test_a_single_output_of_the_reference_has_no_number() -> None:
    found = calls("MultiheadAttention", "MultiHeadAttention").apply(trace({}, {"m": OUT}), {"m": ["m"]})
    assert list(found.outputs) == ["m"]


def test_a_cell_without_its_state_is_handed_nothing() -> None:
    assert calls("LSTMCell", "OptimizedLSTMCell").handed({"m": [X]}) == {}


def test_only_calls_that_both_made_may_lack_arrays() -> None:
    ordered = calls("MultiheadAttention", "MultiHeadAttention")
    reference, port = trace({}, {"m[0]": OUT, "m[1]": X, "other": X}), trace({}, {"m[0]": OUT})
    assert ordered.of_one_side("m[1]", reference, port)
    assert not ordered.of_one_side("m[0]", reference, port)
    assert not ordered.of_one_side("other", reference, port)
    # A port that never calls the module lacks its output.
    assert not ordered.of_one_side("m[0]", reference, trace({}, {}))


def test_every_recurrent_type_has_an_order() -> None:
    from parity.weights.conversions import CELLS

    for kind, cells in CELLS.items():
        assert (kind, "RNN") in ORDERS
        assert all((f"{kind}Cell", cell) in ORDERS for cell in cells)


class Reference(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru = torch.nn.GRU(3, 4, batch_first=True)
        self.cell = torch.nn.LSTMCell(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, last = self.gru(x)
        h = x.new_zeros(x.shape[0], 5)
        for _ in range(2):
            h, c = self.cell(last[0], (h, h + 1))
        return h * c


class Port(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.gru = nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs), return_carry=True)
        self.cell = nnx.OptimizedLSTMCell(4, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        last, _ = self.gru(x)
        h = jax.numpy.zeros((x.shape[0], 5), x.dtype)
        for _ in range(2):
            (c, _), h = self.cell((h + 1, h), last)
        return h * c


class PortThatReverses(Port):
    def __init__(self) -> None:
        super().__init__()
        self.gru.reverse = True


def check(port: Any) -> Any:
    x = np.random.default_rng(0).standard_normal((2, 6, 3))
    return ladder.check(Pair(reference=Reference, port=port, inputs={"x": x}), rungs=("weights", "forward"))


def test_states_and_cells_are_compared() -> None:
    report = check(Port)
    assert report.passed, [rung.failures for rung in report.rungs]
    names = {c.tensor for c in report.rung("forward").outcome.sections[0].comparisons}
    assert names == {"gru[0]", "gru[1]", "cell[0]", "cell[1]", "cell#2[0]", "cell#2[1]", "output"}


def test_a_fault_inside_is_located() -> None:
    report = check(PortThatReverses)
    assert not report.passed
    assert report.first_difference.module == "gru"
