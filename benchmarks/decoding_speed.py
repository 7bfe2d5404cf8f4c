"""How fast decoding is: ours, `transformers` and CTranslate2, with the same trained weights on the same sentences.

    pip install -e '.[torch,bench]'
    python benchmarks/decoding_speed.py --run RUN [--data FOLDER] [--split test_2016_flickr] [--json FILE]

RUN is a training run whose model the others can be (relu, one matrix of embeddings). A beam of 4, alpha
0.6, float32, two threads, everything in one process in turns; seconds are medians over the rounds, without compiling,
which is stated apart. Ours is measured with its own rule for when a sentence is over, and with the rule of each of the
others; translations are compared under the same rule. Each gets lines of text and gives lines of text.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from train.cpu_devices import one_device_a_core
from train.host_memory import keep_freed_memory

keep_freed_memory()
one_device_a_core()

import ctranslate2  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from decoding_peers import transformers_model  # noqa: E402

from parity.convert import convert  # noqa: E402
from parity.twins_proof import prove, sinusoids  # noqa: E402
from parity.weights.piece_names import piece_names  # noqa: E402
from parity.weights.twins import twin_mapping  # noqa: E402
from train.corpus import load_split  # noqa: E402
from train.evaluate import score  # noqa: E402
from train.translate import TrainedRun, load_run  # noqa: E402
from train.translator import Translator  # noqa: E402
from transformer_config import BOS_ID, EOS_ID, PAD_ID, BeamConfig  # noqa: E402

BEAM, ALPHA, MAX_LEN = 4, 0.6, 80
THREADS = 2


class Ours:
    """The translator with one rule."""

    def __init__(self, trained: TrainedRun, lines: list[str], stopping: str, *, max_len_ratio: float | None):
        search = BeamConfig(
            beam_size=BEAM,
            alpha=ALPHA,
            max_len=MAX_LEN,
            stopping=stopping,  # type: ignore[arg-type]
            max_len_ratio=max_len_ratio,
        )
        self.trained, self.lines = trained, lines
        self.translator = Translator(trained.config, trained.tokenizer, trained.devices, search=search)

    def __call__(self) -> list[tuple[str, float]]:
        """Best translation and score of each line."""
        found = self.translator.translate(self.trained.params, self.lines)
        return [(translations[0].text, translations[0].score) for translations in found.of_lines]


class Transformers:
    """`generate`, which decodes the batches it is given: in the order of the file, or sorted by length beforehand."""

    def __init__(self, trained: TrainedRun, model: Any, lines: list[str], batch_size: int, *, by_length: bool):
        self.model = model
        self.trained, self.lines, self.batch_size, self.by_length = trained, lines, batch_size, by_length

    def __call__(self) -> list[tuple[str, float]]:
        """Best translation and score of each line."""
        encoded = _encoded(self.trained, self.lines)
        order = np.argsort([len(ids) for ids in encoded], kind="stable") if self.by_length else range(len(encoded))
        output: list[Any] = [None] * len(encoded)
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            src = torch.full((len(rows), max(len(encoded[i]) for i in rows)), PAD_ID)
            for row, i in enumerate(rows):
                src[row, : len(encoded[i])] = torch.tensor(encoded[i])
            with torch.inference_mode():
                found = self.model.generate(
                    src,
                    attention_mask=(src != PAD_ID).long(),
                    num_beams=BEAM,
                    length_penalty=ALPHA,
                    max_new_tokens=MAX_LEN,
                    return_dict_in_generate=True,
                    output_scores=True,
                )
            for row, i in enumerate(rows):
                output[i] = (found.sequences[row].tolist(), float(found.sequences_scores[row]))
        texts = self.trained.tokenizer.decode(
            [[i for i in ids if i not in (PAD_ID, BOS_ID, EOS_ID)] for ids, _ in output]
        )
        return list(zip(texts, (score for _, score in output), strict=True))


class CTranslate2:
    """`translate_batch`, which sorts by length and leaves out what is done by itself."""

    def __init__(self, trained: TrainedRun, run: Path, lines: list[str], batch_size: int, folder: Path):
        convert(
            run,
            folder,
            source_format="flax",
            target_format="ctranslate2",
            settings={},
            sinusoids=sinusoids,
            prove=prove,
        )
        self.trained, self.lines, self.batch_size = trained, lines, batch_size
        self.pieces = piece_names(run, trained.tokenizer.size) or ()
        self.numbers = {piece: number for number, piece in enumerate(self.pieces)}
        self.translator = ctranslate2.Translator(
            str(folder), device="cpu", compute_type="float32", intra_threads=THREADS, inter_threads=1
        )

    def __call__(self) -> list[tuple[str, float]]:
        """Best translation and score of each line."""
        found = self.translator.translate_batch(
            [[self.pieces[i] for i in ids] for ids in _encoded(self.trained, self.lines)],
            beam_size=BEAM,
            length_penalty=ALPHA,
            max_decoding_length=MAX_LEN,
            max_batch_size=self.batch_size,
            return_scores=True,
        )
        texts = self.trained.tokenizer.decode([[self.numbers[piece] for piece in each.hypotheses[0]] for each in found])
        return [(text, each.scores[0]) for text, each in zip(texts, found, strict=True)]


def _encoded(trained: TrainedRun, lines: list[str]) -> list[list[int]]:
    return trained.tokenizer.encode_sources([line.strip() for line in lines])


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="folder of the corpus, if not where the run had it")
    parser.add_argument("--split", default="test_2016_flickr")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    trained = load_run(arguments.run, num_devices=None).with_batch_size(arguments.batch_size)
    corpus = trained.config.corpus
    if arguments.data is not None:
        corpus = dataclasses.replace(corpus, path=arguments.data)
    text = load_split(corpus, arguments.split)
    lines = list(text.source)
    weights = twin_mapping(tied=True).inverse().apply({name: np.asarray(a) for name, a in trained.params.items()})
    with tempfile.TemporaryDirectory() as folder:
        theirs = transformers_model(trained.config.model, weights, Path(folder) / "transformers")
        systems: dict[str, Callable[[], list[tuple[str, float]]]] = {
            "ours, bound": Ours(trained, lines, "bound", max_len_ratio=2.0),
            "ours, by CTranslate2's rule": Ours(trained, lines, "ctranslate2", max_len_ratio=None),
            "ours, by transformers' rule": Ours(trained, lines, "transformers", max_len_ratio=None),
            "CTranslate2": CTranslate2(trained, arguments.run, lines, arguments.batch_size, Path(folder) / "model"),
            "transformers, by length": Transformers(trained, theirs, lines, arguments.batch_size, by_length=True),
            "transformers, as the file": Transformers(trained, theirs, lines, arguments.batch_size, by_length=False),
        }
        figures = measure(systems, list(text.target), arguments)
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(
    systems: dict[str, Callable[[], list[tuple[str, float]]]], references: list[str], arguments: argparse.Namespace
) -> dict[str, Any]:
    """All figures."""
    first, found = {}, {}
    for name, system in systems.items():
        started = time.perf_counter()
        found[name] = system()
        first[name] = time.perf_counter() - started
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(arguments.rounds):
        for name, system in systems.items():
            started = time.perf_counter()
            system()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}

    def ratio(one: str, other: str) -> float:
        return round(statistics.median(b / a for a, b in zip(seconds[one], seconds[other], strict=True)), 3)

    return {
        "command": f"--split {arguments.split} --batch-size {arguments.batch_size} --rounds {arguments.rounds}",
        "versions": {
            "python": platform.python_version(),
            **{m.__name__: m.__version__ for m in (jax, torch, transformers, ctranslate2)},
        },
        "sentences": len(references),
        "seconds": {name: round(value, 2) for name, value in medians.items()},
        "spread": {name: [round(min(v), 2), round(max(v), 2)] for name, v in seconds.items()},
        "compiling, seconds": {
            name: round(first[name] - medians[name], 1) for name in systems if name.startswith("ours")
        },
        "programs": {
            name: [system.translator.compilations, system.translator.max_compilations]
            for name, system in systems.items()
            if isinstance(system, Ours)
        },
        "speed of ours over CTranslate2, by its rule": ratio("ours, by CTranslate2's rule", "CTranslate2"),
        "speed of ours over CTranslate2, bound": ratio("ours, bound", "CTranslate2"),
        **{
            f"speed of {ours} over {theirs}": ratio(ours, theirs)
            for ours in ("ours, by transformers' rule", "ours, bound")
            for theirs in ("transformers, by length", "transformers, as the file")
        },
        "BLEU": {name: round(score([text for text, _ in each], references).bleu, 2) for name, each in found.items()},
        "CTranslate2, by its rule": compared(found["ours, by CTranslate2's rule"], found["CTranslate2"]),
        "transformers, by its rule": compared(found["ours, by transformers' rule"], found["transformers, by length"]),
    }


def compared(ours: list[tuple[str, float]], theirs: list[tuple[str, float]]) -> dict[str, Any]:
    """How many translations are the same, how far their scores are apart, and what the others are."""
    same = [a[0] == b[0] for a, b in zip(ours, theirs, strict=True)]
    apart = [abs(a[1] - b[1]) for a, b, equal in zip(ours, theirs, same, strict=True) if equal]
    others = [{"sentence": i, "ours": ours[i], "theirs": theirs[i]} for i, equal in enumerate(same) if not equal]
    return {"identical": sum(same), "scores apart by at most": max(apart), "others": others[:20]}


if __name__ == "__main__":
    main()
