"""The worked examples: each passes as it is; each fault planted in a copy of its port is located and named."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A text of a file and what stands there instead."""

    example: str
    file: str
    right: str
    wrong: str
    module: str
    """Where the report has to say that the two first differ."""
    kind: str
    """What it has to call the difference."""


MODEL = "the model itself"
"""Where the code between modules is at fault; the explanation names its neighbours."""

FAULTS = {
    "rotary base": Fault("decoder_only", "decoder_flax.py", "10000.0 **", "1000.0 **", "blocks.0.attn", "rotary base"),
    "scale of the scores": Fault(
        "decoder_only", "decoder_flax.py", " / np.sqrt(q.shape[-1])", "", "blocks.0.attn", "score scale missing"
    ),
    "beta 2 of Adam": Fault(
        "decoder_only",
        "my_port.py",
        "b2=0.95",
        "b2=0.999",
        "exp_avg_sq of layers.0.attention.out.bias",
        "Adam betas",
    ),
    "padding behind alone": Fault(
        "convolutional",
        "resnet_flax.py",
        "strides=stride,\n            padding=((1, 1), (1, 1))",
        "strides=stride,\n            padding=((0, 2), (0, 2))",
        "blocks.0.conv1",
        "convolution padding",
    ),
    "momentum as torch has it": Fault(
        "convolutional", "resnet_flax.py", "MOMENTUM = 0.9", "MOMENTUM = 0.1", "blocks.0.bn1", "momentum convention"
    ),
    "height and width exchanged": Fault(
        "convolutional",
        "my_port.py",
        ".transpose(0, 2, 3, 1)",
        ".transpose(0, 3, 2, 1)",
        MODEL,
        "axes in another order",
    ),
    "not turned back": Fault(
        "tagger", "tagger_flax.py", "jnp.flip(self.backwards(jnp.flip(x, 1)), 1)", "self.backwards(jnp.flip(x, 1))",
        MODEL, "sequence direction",
    ),
    "Flax's own eps": Fault("tagger", "tagger_flax.py", "epsilon=1e-5", "epsilon=1e-6", "norm", "norm eps"),
}  # fmt: skip


def check(folder: Path) -> tuple[int, dict[str, Any], str]:
    """Exit status, report and output of the command that the example's first line gives."""
    report = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "parity", "check", "my_port.py", "--json", str(report)],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = done.stdout + done.stderr
    assert report.exists(), said
    return done.returncode, json.loads(report.read_text(encoding="utf-8")), said


ALWAYS = {"preflight", "inventory", "weights", "initialisation", "forward", "adversarial", "gradients", "modes"}
RUNGS = {
    "convolutional": ALWAYS | {"half_width", "buffers", "loss", "dropout"},
    "decoder_only": ALWAYS | {"half_width", "loss", "dropout", "optimizer", "trajectory"},
    "tagger": ALWAYS | {"half_width"},
}
"""What each of them brings something for."""


def test_every_example_is_here() -> None:
    assert {path.parent.name for path in EXAMPLES.glob("*/my_port.py")} == RUNGS.keys()


@pytest.mark.parametrize("example", sorted(RUNGS))
def test_the_example_passes(example: str, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / example, tmp_path / example)
    status, report, said = check(tmp_path / example)
    assert status == 0, said
    assert {rung["name"] for rung in report["rungs"] if rung["passed"]} == RUNGS[example], said


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_located_and_named(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    shutil.copytree(EXAMPLES / fault.example, tmp_path / fault.example)
    file = tmp_path / fault.example / fault.file
    text = file.read_text(encoding="utf-8")
    assert text.count(fault.right) == 1, "the planting does not fit the example any more"
    file.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
    status, report, said = check(tmp_path / fault.example)
    assert status == 1, said
    assert report["first_difference"]["module"] == fault.module, said
    assert report["diagnosis"] is not None, said
    assert report["diagnosis"]["kind"] == fault.kind, said
