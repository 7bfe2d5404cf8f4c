"""Whoever trains on a TPU does not install torch."""

import json
import subprocess
import sys

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "torch_reference"):
            raise ImportError(f"{name} is blocked here")

sys.meta_path.insert(0, Blocked())
from train.__main__ import main
sys.exit(main(sys.argv[1:]))
"""

IMPORT_ALL = """
import importlib, pkgutil, sys
import flax_transformer, train
for package in (flax_transformer, train):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print(len(sys.modules), sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "torch_reference")))
assert "train.loop" in sys.modules and "train.translate" in sys.modules
"""


def python(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], check=False, capture_output=True, text=True, timeout=300, **options
    )


def test_importing_every_module_leaves_torch_out():
    done = python("-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" []\n"), done.stdout


def test_a_run_and_a_translation_without_torch(corpus_dir, tmp_path):
    arguments = f"""run multi30k-de-en --run-dir {tmp_path} --corpus.path {corpus_dir} --corpus.test-split test
        --tokenizer.vocab-size 280 --model.d-model 12 --model.d-ff 20 --model.num-heads 2 --model.num-encoder-layers 1
        --model.num-decoder-layers 1 --batch.num-buckets 1 --evaluation.max-decode-len 8 --max-steps 2
        --report.log-every-steps 1 --parallel.num-devices 1 --parallel.compile-cache {tmp_path}/programs
        --corpus.cache {tmp_path}/cache"""
    done = python("-c", BLOCKED, *arguments.split())
    assert done.returncode == 0, done.stderr
    assert "Greedy translations of held-out text" in done.stdout
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kinds[:1] == ["train"]
    assert kinds[-2:] == ["final_validation", "final_test"]
    done = python("-c", BLOCKED, "translate", "--run", str(tmp_path), input="eins zwei\n\ndrei\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split("\n")) == 4
    assert done.stdout.split("\n")[1] == ""
