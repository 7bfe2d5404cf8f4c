import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from train.tensorboard import TensorBoard

RECORDS = [
    {"kind": "train", "step": 20, "epoch": 0, "loss": 7.5, "num_tokens": 2211.0, "learning_rate": 0.00015},
    {"kind": "validation_scores", "step": 40, "epoch": 1, "bleu": 32.5, "bleu_signature": "nrefs:1", "whole": True},
]
TORCH_STAYS_OUT = """
import sys
from pathlib import Path
from train.tensorboard import TensorBoard
with TensorBoard(Path(sys.argv[1])) as board:
    board.write({"kind": "train", "step": 1, "loss": 2.0})
assert not [name for name in sys.modules if name.split(".")[0] == "torch"], "torch was imported"
import torch
assert torch.ones(2).sum().item() == 2
with TensorBoard(Path(sys.argv[1]), step=1) as board:
    board.write({"kind": "train", "step": 2, "loss": 1.5})
assert sys.modules["torch"] is torch
"""


def records(file: Path) -> list[bytes]:
    """TFRecords: length (8 bytes), its checksum (4), data, its checksum (4)."""
    data, found = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert len(data) >= length + 16, "a record is cut short"
        found.append(data[12 : 12 + length])
        data = data[length + 16 :]
    return found


def events(folder: Path) -> list[list]:
    """The events of every file, in the order in which TensorBoard reads them."""
    from tensorboardX.proto.event_pb2 import Event

    files = sorted(folder.iterdir(), key=lambda file: file.name)
    assert all("tfevents" in file.name for file in files)
    return [[Event.FromString(data) for data in records(file)] for file in files]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What is shown: a file that starts at a step hides what earlier ones have from there on."""
    shown: dict[str, dict[int, float]] = {}
    for event in (event for file in events(folder) for event in file):
        if event.session_log.status == event.session_log.START:
            shown = {tag: {s: v for s, v in points.items() if s < event.step} for tag, points in shown.items()}
        for value in event.summary.value:
            points = shown.setdefault(value.tag, {})
            assert event.step not in points, f"{value.tag} twice at step {event.step}"
            points[event.step] = value.simple_value
    return shown


def test_numbers_are_written_at_their_steps(tmp_path):
    with TensorBoard(tmp_path / "new" / "folder") as board:
        for record in RECORDS:
            board.write(record)
    assert scalars(tmp_path / "new" / "folder") == {
        "train/epoch": {20: 0.0},
        "train/loss": {20: 7.5},
        "train/num_tokens": {20: 2211.0},
        "train/learning_rate": {20: pytest.approx(0.00015)},
        "validation_scores/epoch": {40: 1.0},
        "validation_scores/bleu": {40: 32.5},
    }


def test_a_continued_run_shows_no_step_twice(tmp_path):
    """Within one second, too: tensorboardX's own names of files would be the same."""
    for start, end in ((0, 5), (3, 6), (4, 7)):
        with TensorBoard(tmp_path, step=start) as board:
            for step in range(start + 1, end + 1):
                board.write({"kind": "train", "step": step, "loss": 10.0 * start + step})
    assert len(events(tmp_path)) == 3
    assert scalars(tmp_path) == {"train/loss": {1: 1.0, 2: 2.0, 3: 3.0, 4: 34.0, 5: 45.0, 6: 46.0, 7: 47.0}}


def test_torch_is_not_imported_and_can_be_later(tmp_path):
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", TORCH_STAYS_OUT, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONWARNINGS": "error::ResourceWarning"},
    )
    assert done.returncode == 0, done.stderr
    assert scalars(tmp_path) == {"train/loss": {1: 2.0, 2: 1.5}}


def test_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"pip install 'twinformer\[tensorboard\]'"):
        TensorBoard(tmp_path)
    assert list(tmp_path.iterdir()) == []
