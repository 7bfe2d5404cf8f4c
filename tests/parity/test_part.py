"""Only a part of the reference is ported: an encoder, or an inner module."""

from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx

from parity import ladder
from parity.pair import Pair
from parity.runs import Runs
from tests.parity.one_layer import FlaxLayer, FlaxLayerOffByABillionth, Layer, X, climb, failures

RNG = np.random.default_rng(0)


class Whole(torch.nn.Module):
    """An encoder of two layers and a decoder of which no port exists."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(5, 5)
        self.encoder = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Layer(), Layer()])})
        self.layer = Layer()
        self.never = Layer()
        self.decoder = torch.nn.GRU(5, 6)

    def forward(self, x: Any) -> Any:
        x = self.embed(x)
        mask = x > 0
        for layer in self.encoder["layers"]:
            x = layer(x, mask=mask, scale=2.0)
        x = self.layer(x, None, scale=0.5, flag=True)
        return self.decoder(x)[0]


def part_pair(part: str, port: Any = FlaxLayer, **changes: Any) -> Pair:
    return Pair(reference=Whole, port=lambda: port(nnx.Rngs(0)), inputs=X, part=part, **changes)


@pytest.mark.parametrize("part", ["layer", "encoder.layers.1"])
def test_only_a_part_is_ported_and_both_are_given_what_the_reference_gives_it(part: str) -> None:
    runs, found, passed = climb(part_pair(part))
    assert passed, failures(found)
    (batch,) = runs.batches
    assert list(batch) == ["x", "mask", "scale"], "what only repeats a default at the end is left out"
    assert runs.reference("float64").outputs.keys() == {"lin"}
    assert runs.reference("float64").results["output"].shape == (3, 4, 5)
    # Hard inputs of the whole model lead to the part too.
    other = {"x": np.zeros((1, 2, 5))}
    assert runs.run_port(other, "float64").results["output"].shape == (1, 2, 5)
    expected = runs.run_reference(other, "float64").results["output"]
    np.testing.assert_allclose(runs.run_port(other, "float64").results["output"], expected, rtol=1e-12)


@pytest.mark.parametrize("part", ["layer", "encoder.layers.1"])
def test_a_part_climbs_the_whole_ladder(part: str) -> None:
    report = ladder.check(part_pair(part), keep_going=True)
    # nnx draws another distribution than torch does, as any part that is left as nnx makes it.
    assert [rung.name for rung in report.failed] == ["initialisation"]
    assert report.rung("adversarial").status == report.rung("modes").status == "passed"


def test_a_fault_in_the_part_is_found() -> None:
    _, found, passed = climb(part_pair("layer", FlaxLayerOffByABillionth))
    assert not passed
    assert failures(found)[:1] == ["output"]


def test_weights_of_the_whole_model_fill_the_part() -> None:
    weights = {name: RNG.normal(size=p.shape).astype(np.float32) for name, p in Whole().named_parameters()}
    runs = Runs(part_pair("layer", weights=weights))
    np.testing.assert_array_equal(runs.port_weights["lin.bias"], weights["layer.lin.bias"])
    whole = Whole().double()
    whole.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    given: list[Any] = []
    whole.layer.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    whole(torch.tensor(X["x"]))
    np.testing.assert_allclose(runs.batches[0]["x"], given[0].detach().numpy(), rtol=1e-12)
    assert climb(part_pair("layer", weights=weights))[2]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("encodre", r"expected part to be a submodule of the reference \(embed, encoder, .*got 'encodre'"),
        ("never", "expected the reference to call its submodule 'never', got no call"),
    ],
)
def test_a_part_that_is_not_there_or_not_called_is_an_error(part: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Runs(part_pair(part))
