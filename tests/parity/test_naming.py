"""The port's names for the reference's modules, and arrays under other keys."""

import numpy as np
import pytest

from parity.naming import Names, by_position, selected
from parity.trace import Trace

NAMES = Names(
    {"encoder.final": "encoder.norm"},
    {"encoder.layers": ("encoder.blocks.0", "encoder.blocks.1")},
    (("encoder.blocks.{i}.attn", "encoder.layers.{i}.attention"), ("{a,b}.x", "{c,d}.x")),
)


def trace(**fields: dict[str, np.ndarray]) -> Trace:
    empty: dict[str, dict[str, np.ndarray]] = {
        name: {} for name in ("given", "given_ids", "outputs", "results", "gradients", "buffers", "summed")
    }
    return Trace(loss=np.zeros(()), **(empty | fields))


@pytest.mark.parametrize(
    ("port", "reference"),
    [
        ("encoder.final", "encoder.norm"),
        ("encoder.layers.1", "encoder.blocks.1"),
        ("encoder.layers.1.lin", "encoder.blocks.1.lin"),
        ("encoder.layers.1.attention.q", "encoder.blocks.1.attn.q"),
        ("encoder.layers.7", "encoder.layers.7"),
        ("encoder.layersx.0", "encoder.layersx.0"),
        ("head", "head"),
        ("", ""),
    ],
)
def test_names_of_modules(port: str, reference: str) -> None:
    assert NAMES.of(port) == reference


def test_a_path_inside_stacked_layers_stands_for_every_layer() -> None:
    assert NAMES.every("encoder.layers.attention") == ["encoder.blocks.0.attn", "encoder.blocks.1.attn"]
    assert NAMES.every("encoder.final") == ["encoder.norm"]


def test_and_back() -> None:
    assert NAMES.port_names(["encoder.norm", "head", "other"], ["encoder.final", "head"]) == {
        "encoder.norm": "encoder.final",
        "head": "head",
    }


def test_everything_of_a_trace_is_renamed_but_gradients() -> None:
    one = np.ones(2)
    run = trace(
        outputs={"encoder.final:norm#2[a]": one}, given={"encoder.final": one}, gradients={"encoder.final": one}
    )
    run.narrow["encoder.final"] = "encoder.final at x.py:3"
    run.not_captured["encoder.layers"] = "why"
    renamed = NAMES.apply(run)
    assert list(renamed.outputs) == ["encoder.norm:norm#2[a]"]
    assert list(renamed.given) == list(renamed.narrow) == ["encoder.norm"]
    assert list(renamed.gradients) == ["encoder.final"]
    assert renamed.not_captured == {"encoder.blocks.0": "why", "encoder.blocks.1": "why"}


def test_keys_are_exchanged_only_where_as_many_arrays_bear_others() -> None:
    run = trace(outputs={f"{call}[{i}]": np.full(1, i) for call in ("a", "b", "c") for i in range(2)})
    expected = {"a": ["a[x]", "a[y]"], "b": ["b[1]", "b[0]"], "c": ["c[x]", "c[y]", "c[z]"]}
    changed, calls = by_position(run, expected)
    assert calls == ["a"]
    assert {name: int(array[0]) for name, array in changed.outputs.items()} == {
        "a[x]": 0,
        "a[y]": 1,
        "b[0]": 0,
        "b[1]": 1,
        "c[0]": 0,
        "c[1]": 1,
    }


def test_valid_positions_are_selected_where_the_leading_axes_are_theirs() -> None:
    valid = np.array([[True, False], [True, True]])
    run = trace(outputs={"here": np.arange(12.0).reshape(2, 2, 3), "elsewhere": np.zeros((2, 3))})
    run.outputs["here"][0, 1] = np.nan
    picked = selected(run, valid).outputs
    assert picked["here"].shape == (3, 3)
    assert np.isfinite(picked["here"]).all()
    assert picked["elsewhere"].shape == (2, 3)
