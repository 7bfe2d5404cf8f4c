"""Known porting faults, planted in a copy of the Flax twin: the check exits with 1 and names the first module."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flax_transformer


@dataclasses.dataclass(frozen=True)
class Fault:
    file: str
    right: str
    wrong: str
    module: str


FAULTS = {
    "norm eps 1e-6": Fault("primitives.py", "self.eps = config.norm_eps", "self.eps = 1e-6", "encoder.layers.0.norm1"),
    "tanh gelu": Fault("feed_forward.py", "approximate=False", "approximate=True", "encoder.layers.0.feed_forward"),
    "missing transpose": Fault(
        "attention.py",
        "query, key_value = self.split_heads(self.q_proj(queries)), self.key_value(keys)",
        "projected = queries @ self.q_proj.kernel[...].T + self.q_proj.bias[...]\n"
        "        query, key_value = self.split_heads(projected), self.key_value(keys)",
        "encoder.layers.0.self_attn.q_proj",
    ),
    "look-ahead mask inverted": Fault(
        "masks.py",
        "return key_positions[..., None, :] <= query_positions",
        "return key_positions[..., None, :] > query_positions",
        "decoder.layers.0.self_attn",
    ),
    "embedding not scaled": Fault("embedding.py", " * self.scale", "", "src_embedding"),
    "q and k swapped in one layer": Fault(
        "transformer.py",
        "        for i, layer in enumerate(self.layers):\n            x, layer_weights = run(layer, x, mask,",
        "        for i, layer in enumerate(self.layers):\n"
        "            if i == 1:\n"
        "                attention = layer.self_attn\n"
        "                attention.q_proj, attention.k_proj = attention.k_proj, attention.q_proj\n"
        "            x, layer_weights = run(layer, x, mask,",
        "encoder.layers.1.self_attn",
    ),
    "norm before the residual": Fault(
        "layers.py",
        'return norm(x) if self.norm_order == "post" else x',
        "return x",
        "encoder.layers.0.norm1",
    ),
    "scale of the scores missing": Fault(
        "attention.py", " / math.sqrt(query.shape[-1])", "", "encoder.layers.0.self_attn"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_and_located(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    shutil.copytree(Path(flax_transformer.__file__).parent, tmp_path / "flax_transformer")
    file = tmp_path / "flax_transformer" / fault.file
    text = file.read_text(encoding="utf-8")
    assert text.count(fault.right) == 1, "the planting does not fit the code any more"
    file.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
    # From the folder of the copy, so that it is found before the original.
    done = subprocess.run(
        [sys.executable, "-m", "parity", "check", "--preset", "tiny", "--json", "report.json"],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = re.search(r"First module that differs: (\S+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert found.group(1) == fault.module
    assert (tmp_path / "report.json").exists()
