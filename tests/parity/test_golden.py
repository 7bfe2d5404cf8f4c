"""Golden files: recorded here, they prove the port where torch is missing, and fail where a weight is changed."""

import dataclasses
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from parity import ladder
from parity.golden import HEADER, Golden, GoldenError, pack, unpack
from parity.pair import Pair, Side
from parity.record import record
from parity.rungs import NotComparedError
from parity.runs import Runs
from parity.twins import preset_pair
from parity.user_file import load_pair
from parity.weights.biases import SumBiases
from parity.weights.mapping import Rule, WeightMapping
from parity.weights.rules import Transpose
from transformer_config import TransformerConfig

# The reference fuses what the port keeps apart, so that errors of gradients must be told for each piece; and it has two
# biases where the port has one.
MY_PORT = """
import os

import jax.numpy as jnp
import numpy as np
from flax import nnx

from parity import Pair, Rule, Side
from parity.weights.biases import SumBiases
from parity.weights.mapping import WeightMapping
from parity.weights.rules import Split, Transpose


class Toy(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(5, 7, rngs=rngs)
        self.query = nnx.Linear(7, 3, rngs=rngs)
        self.value = nnx.Linear(7, 3, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.embed(x))
        return {"out": jnp.tanh(self.query(x)) * self.value(x)}


def reference():
    import torch

    class TwoBiases(torch.nn.Linear):
        def __init__(self):
            super().__init__(5, 7)
            self.more = torch.nn.Parameter(torch.randn(7))

        def forward(self, x):
            return super().forward(x) + self.more

    class Toy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = TwoBiases()
            self.fused = torch.nn.Linear(7, 6)

        def forward(self, x):
            query, value = self.fused(torch.tanh(self.embed(x))).chunk(2, dim=-1)
            return {"out": torch.tanh(query) * value}

    torch.manual_seed(3)
    return Toy()


def call(module, inputs):
    return module(inputs["x"])


def call_port(module, inputs):
    if os.environ.get("PLANT"):
        module.embed.kernel[...] = module.embed.kernel[...].at[2, 3].add(1e-7)
    return module(inputs["x"])


def loss(output, inputs):
    return ((output["out"] - inputs["target"]) ** 2).mean()


def inputs(seed):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(4, 5)), "target": rng.normal(size=(4, 3))}


def pair():
    return Pair(
        name="fused toy",
        reference=Side(build=reference, call=call, loss=loss),
        port=Side(build=lambda: Toy(nnx.Rngs(0)), call=call_port, loss=loss),
        inputs=inputs,
        mapping=WeightMapping([
            Rule("embed.weight", "embed.kernel", (Transpose(),)),
            Rule(("embed.bias", "embed.more"), "embed.bias", (SumBiases(),)),
            Rule("fused.weight", ("query.kernel", "value.kernel"), (Split(2), Transpose())),
            Rule("fused.bias", ("query.bias", "value.bias"), (Split(2),)),
        ]),
    )
"""

NO_TORCH = """
import os, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
from parity.__main__ import main
"""

WITHOUT_TORCH = f"""{NO_TORCH}
port, golden, folder = sys.argv[1:]
assert main(["check", port, "--against", golden, "--json", f"{{folder}}/equal.json"]) == 0
assert main(["check", port, "--rungs", "forward"]) == 2, "without torch and without a golden file"
os.environ["PLANT"] = "1"
assert main(["check", port, "--against", golden, "--json", f"{{folder}}/planted.json"]) == 1
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def port_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("port") / "my_port.py"
    path.write_text(textwrap.dedent(MY_PORT), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def pair(port_file: Path) -> Pair:
    return load_pair(port_file)


@pytest.fixture(scope="module")
def golden(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "toy.golden"
    record(pair, path, draws=2)
    return path


def test_without_torch_it_passes_and_fails_located_where_a_weight_is_changed(
    port_file: Path, golden: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(port_file), str(golden), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "without it, check --against a golden file" in done.stderr
    equal = json.loads((tmp_path / "equal.json").read_text())
    status = {rung["name"]: rung["status"] for rung in equal["rungs"]}
    assert {status[name] for name in ("weights", "forward", "loss", "gradients")} == {"passed"}
    assert equal["golden"]["golden file"] == "toy.golden"
    assert equal["golden"]["recorded"].startswith("20")
    assert "torch" in equal["golden"]["with"]
    for rung in equal["rungs"]:
        assert rung["status"] == "passed" or rung["skipped"], rung["name"]
    planted = json.loads((tmp_path / "planted.json").read_text())
    assert planted["verdict"] == "NOT EQUAL"
    assert planted["first_difference"]["module"].startswith("embed")


def test_our_own_twins_too(tmp_path: Path) -> None:
    fields = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    twins = preset_pair(TransformerConfig.tiny(**fields), name="preset tiny")
    record(twins, tmp_path / "tiny.golden", draws=1)
    settings = [f"{name}={value}" for name, value in fields.items()]
    code = f"""{NO_TORCH}
rungs = ["--rungs", "weights", "forward", "gradients"]
sys.exit(main(["check", "--preset", "tiny", "--set", *{settings}, "--against", sys.argv[1], *rungs]))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "tiny.golden")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "golden file: tiny.golden" in done.stdout


def test_rungs_that_need_a_live_reference_are_skipped_with_a_reason(pair: Pair, golden: Path) -> None:
    report = ladder.check(pair, rungs=("weights", "forward", "half_width"), golden=Golden.read(golden))
    assert report.passed
    assert report.rung("half_width").status == "skipped"
    assert "golden file" in report.rung("half_width").skipped


def test_float32_errors_are_those_of_the_live_reference(pair: Pair, golden: Path) -> None:
    """Of each piece of a fused gradient too, although the file holds sums of squares only."""
    recorded, live = Runs(pair, golden=Golden.read(golden)), Runs(pair)
    for draw in (None, 0, 1):
        outputs, gradients = recorded.reference_errors(0, draw)
        expected_outputs, expected_gradients = live.reference_errors(0, draw)
        assert outputs == expected_outputs
        assert gradients == pytest.approx(expected_gradients, rel=1e-6)
        assert {"query.kernel", "value.kernel", "embed.bias"} <= gradients.keys()
    assert recorded.reference_errors(0, 2) == recorded.reference_errors(0, 0), "no more were recorded"


@given(
    shape=st.lists(st.integers(1, 5), max_size=4).map(tuple),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=40)
def test_sums_of_squares_survive_along_every_axis(shape: tuple[int, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensors = {"a": rng.normal(size=shape) * 10.0 ** rng.integers(-9, 9), "zero": np.zeros(shape)}
    back = unpack(pack(tensors), {name: array.shape for name, array in tensors.items()})
    for name, array in tensors.items():
        assert back[name].shape == shape
        for axis in range(len(shape)):
            others = tuple(a for a in range(len(shape)) if a != axis)
            np.testing.assert_allclose((back[name] ** 2).sum(others), (array**2).sum(others), rtol=1e-12)


def test_a_run_that_was_not_recorded_is_no_comparison(pair: Pair, golden: Path) -> None:
    file = Golden.read(golden)
    inputs, weights = file.batches[0], file.weights()
    assert file.trace(inputs, weights=weights, precision="float64").outputs.keys() >= {"embed", "fused"}
    with pytest.raises(NotComparedError, match="float32"):
        file.trace(inputs, weights=weights, precision="float32")
    with pytest.raises(NotComparedError, match="on these inputs"):
        file.trace({**inputs, "x": inputs["x"] + 1.0}, weights=weights, precision="float64")
    with pytest.raises(NotComparedError, match=r"another embed\.bias"):
        file.trace(inputs, weights={**weights, "embed.bias": weights["embed.bias"] + 1}, precision="float64")


def test_modules_that_were_left_out_are_named_not_failed(pair: Pair, golden: Path, tmp_path: Path) -> None:
    sizes = record(pair, tmp_path / "few.golden", modules=("fused",), draws=0, hard=False)
    assert sizes["batch 1: outputs"] == 4 * 6 * 8
    report = ladder.check(pair, rungs=("weights", "forward", "gradients"), golden=Golden.read(tmp_path / "few.golden"))
    assert report.passed
    forward = report.rung("forward").outcome
    assert all(c.tensor != "embed" for section in forward.sections for c in section.comparisons)
    assert any("embed" in note for note in forward.notes)
    assert not any(name.startswith("hard inputs") for name in sizes)
    with pytest.raises(ValueError, match="--modules: expected patterns that some module's path fits, got enc"):
        record(pair, tmp_path / "none.golden", modules=("enc*",), draws=0)
    assert not (tmp_path / "none.golden").exists()


def test_hard_inputs_are_recorded_too(pair: Pair, golden: Path) -> None:
    file = Golden.read(golden)
    assert "exact zeros" in file.cases
    report = ladder.check(pair, rungs=("weights", "forward", "adversarial"), golden=file)
    assert {section.title for section in report.rung("adversarial").outcome.sections} == file.cases.keys()
    assert report.rung("adversarial").passed


def test_a_pair_without_a_port_can_be_recorded_and_one_without_a_reference_cannot(
    pair: Pair, golden: Path, tmp_path: Path
) -> None:
    folded = Golden.read(golden).weights()  # the second bias added to the first: as a port can hold them
    record(dataclasses.replace(pair, port=None, weights=folded), tmp_path / "alone.golden", draws=0, hard=False)
    checked = dataclasses.replace(pair, reference=None)
    rungs = ("weights", "forward", "gradients")
    assert ladder.check(checked, rungs=rungs, golden=Golden.read(tmp_path / "alone.golden")).passed
    with pytest.raises(ValueError, match="expected a reference to record, got none"):
        record(checked, tmp_path / "none.golden")


def test_weights_that_the_port_cannot_hold_must_be_recorded_with_it(pair: Pair, tmp_path: Path) -> None:
    record(dataclasses.replace(pair, port=None), tmp_path / "alone.golden", draws=0, hard=False)
    report = ladder.check(pair, rungs=("weights", "forward"), golden=Golden.read(tmp_path / "alone.golden"))
    assert not report.passed
    assert "record it again, with the port at hand" in report.rung("forward").skipped


def test_positions_that_do_not_count_are_recorded(pair: Pair, tmp_path: Path) -> None:
    """The last row of the port's output is another; without a loss, gradients are those of the rows that count."""

    def call(module: Any, inputs: Any) -> Any:
        out = module(inputs["x"])["out"]
        return {"out": out.at[3].add(1.0)}

    port = dataclasses.replace(pair.port, call=call, loss=None)
    padded = dataclasses.replace(pair, port=port, reference=dataclasses.replace(pair.reference, loss=None))
    rungs = ("weights", "forward", "gradients")
    for name, valid in (("some", lambda inputs: np.arange(4) < 3), ("all", None)):
        path = tmp_path / f"{name}.golden"
        record(dataclasses.replace(padded, valid=valid), path, draws=0, hard=False)
        report = ladder.check(padded, rungs=rungs, golden=Golden.read(path))
        assert report.passed == (valid is not None)


def test_a_part_is_recorded_with_what_it_is_given(pair: Pair, tmp_path: Path) -> None:
    rules = [Rule("weight", "kernel", (Transpose(),)), Rule(("bias", "more"), "bias", (SumBiases(),))]
    port = Side(build=lambda: nnx.Linear(5, 7, rngs=nnx.Rngs(0)))
    part = dataclasses.replace(pair, part="embed", port=port, mapping=WeightMapping(rules))
    record(part, tmp_path / "part.golden", draws=0, hard=False)
    golden = Golden.read(tmp_path / "part.golden")
    report = ladder.check(part, rungs=("weights", "forward", "gradients"), golden=golden)
    assert report.passed, report.rungs
    assert golden.trained() == {"weight", "bias", "more"}


def test_what_is_there_is_not_overwritten_unasked(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "toy.golden"
    path.write_bytes(b"precious")
    with pytest.raises(GoldenError, match="--overwrite"):
        record(pair, path)
    assert path.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [path]


def _truncated(path: Path, whole: bytes) -> str:
    path.write_bytes(whole[:-20])
    return "damaged or foreign"


def _of_zero_bytes(path: Path, whole: bytes) -> str:
    path.write_bytes(b"")
    return "damaged or foreign"


def _with_a_flipped_bit(path: Path, whole: bytes) -> str:
    path.write_bytes(whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:])
    return "got other bytes"


def _of_other_tensors(path: Path, whole: bytes) -> str:
    safetensors.numpy.save_file({"w": np.zeros(3)}, str(path))
    return "got other tensors"


def _of_a_later_format(path: Path, whole: bytes) -> str:
    header = {HEADER: json.dumps({"format": 99})}
    safetensors.numpy.save_file({"w": np.zeros(3)}, str(path), metadata=header)
    return "got 99: record it again"


@pytest.mark.parametrize(
    "damage", [_truncated, _of_zero_bytes, _with_a_flipped_bit, _of_other_tensors, _of_a_later_format]
)
def test_a_file_that_cannot_be_used_is_named(damage: Any, golden: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken.golden"
    message = damage(path, golden.read_bytes())
    with pytest.raises(GoldenError, match=message) as caught:
        Golden.read(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_missing_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.golden"):
        Golden.read(tmp_path / "nowhere.golden")
    with pytest.raises(GoldenError, match="got a folder"):
        Golden.read(tmp_path)
