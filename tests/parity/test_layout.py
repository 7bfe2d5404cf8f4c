"""Axes of the reference's arrays in the port's order: by types and by what the pair says, never by shapes."""

import numpy as np
import pytest

from parity.facts import ModuleFacts
from parity.layout import Layouts
from parity.trace import Trace

REFERENCE = {
    "": ModuleFacts(type="Net"),
    "conv": ModuleFacts(type="Conv2d"),
    "mine": ModuleFacts(type="MyConv", bases=("Conv2d", "Module")),
    "block": ModuleFacts(type="Block"),
    "linear": ModuleFacts(type="Linear"),
}
PORT = {
    "": ModuleFacts(type="Net"),
    "conv_in": ModuleFacts(type="Conv"),
    "mine": ModuleFacts(type="Conv"),
    "block": ModuleFacts(type="Block"),
    "linear": ModuleFacts(type="Linear"),
}


def trace(**outputs: np.ndarray) -> Trace:
    empty: dict[str, np.ndarray] = {}
    return Trace(
        given=dict(outputs),
        given_ids={},
        outputs=dict(outputs),
        results={"output": np.zeros((2, 3, 4, 5))},
        loss=np.zeros(()),
        gradients=empty,
        buffers=empty,
        summed=empty,
    )


def test_axes_move_where_the_types_say_so_and_nowhere_else() -> None:
    image = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    # A square image: no shape tells which axis holds the channels.
    square = np.arange(81).reshape(3, 3, 3, 3)
    arrays = {"conv#2[0]": image, "mine": square, "block": image, "linear": image}
    layouts = Layouts(REFERENCE, PORT, modules={"conv_in": "conv"}, given={})
    moved = layouts.apply(trace(**arrays))
    assert moved.outputs["conv#2[0]"].shape == (2, 4, 5, 3)
    assert np.array_equal(moved.outputs["mine"], square.transpose(0, 2, 3, 1))
    assert np.array_equal(moved.given["mine"], square.transpose(0, 2, 3, 1))
    assert moved.outputs["block"].shape == (2, 3, 4, 5)
    assert moved.outputs["linear"].shape == (2, 3, 4, 5)
    assert moved.results["output"].shape == (2, 3, 4, 5)


def test_the_pair_names_its_own_modules() -> None:
    layouts = Layouts(REFERENCE, PORT, modules={}, given={"{any}": (0, 2, 3, 1)})
    moved = layouts.apply(trace(block=np.zeros((2, 3, 4, 5)), linear=np.zeros((2, 3))))
    assert moved.outputs["block"].shape == (2, 4, 5, 3)
    assert moved.outputs["linear"].shape == (2, 3), "of another rank than the axes"


def test_without_a_counterpart_of_a_known_type_nothing_moves() -> None:
    layouts = Layouts(REFERENCE, {"conv": ModuleFacts(type="TheirConv")}, modules={}, given={})
    assert layouts.apply(trace(conv=np.zeros((2, 3, 4, 5)))).outputs["conv"].shape == (2, 3, 4, 5)


def test_axes_that_are_no_permutation_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"layouts\['block'\]: expected each of 3 axes once, got \(0, 2, 2\)"):
        Layouts(REFERENCE, PORT, modules={}, given={"block": (0, 2, 2)})
