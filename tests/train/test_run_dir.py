"""The folder of a run: files written whole, and one process that trains in it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.train.conftest import Ended, listing, train
from train.bpe import BPETokenizer
from train.run_dir import RunDir, write_whole
from train.sentences import encode_text

HOLD = """
import sys
from pathlib import Path
from train.run_dir import RunDir
with RunDir(Path(sys.argv[1])).locked():
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path, whole: Ended) -> None:
    config = whole.copy(tmp_path)
    before = listing(tmp_path)
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "locked\n"
            with pytest.raises(ValueError, match=rf"{tmp_path}: expected a run that nobody else trains, but a proces"):
                train(config.replace(max_steps=1))
            assert listing(tmp_path) == before  # nothing written, not even the config
        finally:
            process.kill()
    # The lock has gone with the process that held it.
    with RunDir(tmp_path).locked(), pytest.raises(ValueError, match="nobody else"), RunDir(tmp_path).locked():
        pass
    with RunDir(tmp_path).locked():
        pass


def test_inference_needs_no_lock(whole: Ended) -> None:
    from train.translate import load_run

    with RunDir(whole.config.run_dir).locked():
        assert load_run(whole.config.run_dir).step == whole.result.step


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "new" / "config.json"
    write_whole(file, "first")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "second \udcff")
    assert file.read_text() == "first"
    write_whole(file, "ü")
    assert file.read_bytes() == "ü".encode()
    assert [path.name for path in file.parent.iterdir()] == ["config.json"]


def test_metrics_are_set_back(tmp_path: Path) -> None:
    """What a continued run writes again goes, and so does a line that a kill cut short."""
    run_dir = RunDir(tmp_path)
    assert run_dir.metrics() == ""
    lines = [json.dumps({"kind": "train", "step": step}) + "\n" for step in (1, 2, 3)]
    for left in ("".join(lines).encode(), b"".join([lines[0].encode(), b'{"kind": "tra']), b"\xff\x00", None):
        if left is None:
            run_dir.metrics_file.unlink()
        else:
            run_dir.metrics_file.write_bytes(left)
        run_dir.set_metrics("".join(lines[:2]))
        assert run_dir.metrics() == "".join(lines[:2])
    untouched = run_dir.metrics_file.stat().st_ino
    run_dir.set_metrics("".join(lines[:2]))
    assert run_dir.metrics_file.stat().st_ino == untouched


def test_starts_add_up(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    for devices in ("one", "two"):
        run_dir.write_start({"devices": devices})
    starts = [json.loads(line) for line in run_dir.starts_file.read_text().splitlines()]
    assert [start["devices"] for start in starts] == ["one", "two"]
    assert {"jax", "numpy", "orbax-checkpoint", "twinformer"} <= starts[0]["versions"].keys()
    assert starts[0]["python"] == sys.version.split()[0]


def test_the_pairs_of_a_batch_are_written_as_text(tmp_path: Path, whole: Ended) -> None:
    from train.corpus import load_corpus

    corpus = load_corpus(whole.config.corpus)
    tokenizer = BPETokenizer.load(whole.config.run_dir / "tokenizer.json")
    data = encode_text(corpus.validation, tokenizer)
    file = RunDir(tmp_path).write_batch(7, pairs=np.array([3, 0]), data=data, tokenizer=tokenizer)
    assert file == tmp_path / "batch-of-step-7.json"
    source, target = corpus.validation.source, corpus.validation.target
    assert json.loads(file.read_text(encoding="utf-8")) == {
        "step": 7,
        "pairs": [{"pair": i, "source": source[i], "target": target[i]} for i in (3, 0)],
    }
