"""A trained run exported to CTranslate2: the BLEU of its translations, and of ours.

    pip install -e '.[bench]'
    python benchmarks/ctranslate2_bleu.py --run RUN [--data FOLDER] [--split test_2016_flickr] [--json FILE]

The export is that of `python -m parity convert RUN FOLDER --to ctranslate2`, proven on arrival. A beam of 4, alpha 0.6,
at most 80 pieces, float32, as in decoding_speed.py. Ours by CTranslate2's rule for when a sentence is over, and by its
own. Exit status 1 if the BLEU of one rule, cased or lowercased, is more than 0.05 apart.
"""

import argparse
import dataclasses
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

from decoding_speed import CTranslate2, Ours, compared  # first: it sets up jax

import ctranslate2  # isort: skip
import jax

from train.corpus import load_split
from train.evaluate import score
from train.translate import load_run

APART = 0.05


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    trained = load_run(arguments.run, num_devices=None).with_batch_size(arguments.batch_size)
    corpus = trained.config.corpus
    if arguments.data is not None:
        corpus = dataclasses.replace(corpus, path=arguments.data)
    text = load_split(corpus, arguments.split)
    lines, references = list(text.source), list(text.target)
    with tempfile.TemporaryDirectory() as folder:
        theirs = CTranslate2(trained, arguments.run, lines, arguments.batch_size, Path(folder) / "model")()
    found = {
        "CTranslate2": theirs,
        "ours, by CTranslate2's rule": Ours(trained, lines, "ctranslate2", max_len_ratio=None)(),
        "ours, bound": Ours(trained, lines, "bound", max_len_ratio=2.0)(),
    }
    scores = {name: score([text for text, _ in each], references) for name, each in found.items()}
    first = scores["ours, by CTranslate2's rule"]
    return {
        "run": f"{arguments.run}, step {trained.step}",
        "command": f"--split {arguments.split} --batch-size {arguments.batch_size}",
        "versions": {
            "python": platform.python_version(),
            **{m.__name__: m.__version__ for m in (jax, ctranslate2)},
        },
        "sentences": len(lines),
        "BLEU": {name: round(each.bleu, 2) for name, each in scores.items()},
        "BLEU, lowercased": {name: round(each.bleu_lowercased, 2) for name, each in scores.items()},
        "signatures": [first.bleu_signature, first.bleu_lowercased_signature],
        "apart by its rule": round(abs(first.bleu - scores["CTranslate2"].bleu), 4),
        "apart by its rule, lowercased": round(abs(first.bleu_lowercased - scores["CTranslate2"].bleu_lowercased), 4),
        "translations": compared(found["ours, by CTranslate2's rule"], theirs),
    }


def main() -> None:
    """Exports, translates, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="folder of the corpus, if not where the run had it")
    parser.add_argument("--split", default="test_2016_flickr")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = measure(arguments)
    print(json.dumps(figures, indent=1, ensure_ascii=False))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    apart = max(figures["apart by its rule"], figures["apart by its rule, lowercased"])
    raise SystemExit(0 if apart <= APART else 1)


if __name__ == "__main__":
    main()
