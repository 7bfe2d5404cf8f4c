"""Records a golden file: runs the reference, and keeps what the Flax side is judged by elsewhere (see golden.py)."""

import datetime
import json
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parity.facts import to_json
from parity.golden import FORMAT, HEADER, WORDS, GoldenError, crc, kept, pack
from parity.pair import Inputs, Pair, Precision, Side
from parity.report.environment import versions
from parity.rungs import NotComparedError, adversarial
from parity.runs import GATES, Runs, moved_by_a_rounding
from parity.tolerances import FLOAT32_DRAWS
from parity.trace import Trace
from parity.weights.checkpoint import Checkpoint
from parity.weights.problems import MappingError
from parity.weights.store_safetensors import write_safetensors

FIELDS = ("loss", "draw_dropout", "call_with_dropout", "clip", "optimizer", "schedule", "decode")
"""Of a Side: what `Golden.brings` answers for."""


def record(
    pair: Pair,
    path: Path,
    *,
    seed: int = 0,
    modules: tuple[str, ...] = ("*",),
    draws: int = FLOAT32_DRAWS,
    hard: bool = True,
    overwrite: bool = False,
) -> dict[str, int]:
    """Runs the reference and writes `path`, whole or not at all. Returns how many bytes each part takes.

    `modules`: patterns (`encoder.*`) of the modules whose inputs and outputs are kept. `draws`: further float32 runs
    for each batch. `hard`: the runs on hard inputs too. Raises ValueError if the pair has no reference, or no module is
    left; GoldenError if `path` exists and is not to be overwritten; and whatever the reference raises.
    """
    if pair.reference is None:
        raise ValueError(f"{pair.name}: expected a reference to record, got none")
    if path.is_dir() or (path.exists() and not overwrite):
        raise GoldenError(f"{path}: expected to write a new file, got one that is there; --overwrite replaces a file")
    runs = Runs(pair, seed=seed)
    book = _Book(_weights(runs), modules)
    for number, inputs in enumerate(runs.batches):
        book.add_batch(number, inputs, runs, draws=draws)
    for name, inputs in (adversarial.cases(runs) if hard else {}).items():
        book.add_case(name, inputs, runs)
    if not book.captured:
        raise ValueError(f"--modules: expected patterns that some module's path fits, got {' '.join(modules)}")
    book.write(path, _about(pair, runs, modules=modules, draws=draws))
    return book.sizes()


class _Book:
    """Tensors by their name in the file, and what is said of them."""

    def __init__(self, weights: Mapping[str, np.ndarray], modules: tuple[str, ...]):
        self.weights = weights
        self.modules = modules
        self.tensors = {f"weights/{name}": np.asarray(array) for name, array in weights.items()}
        self.batches: list[dict[str, Any]] = []
        self.cases: dict[str, dict[str, Any]] = {}
        self.captured = False

    def add_batch(self, number: int, inputs: Inputs, runs: Runs, *, draws: int) -> None:
        exact, narrow = (self._trace(inputs, runs, precision, self.weights) for precision in GATES)
        run = self._add_run(f"batch {number + 1}", inputs, exact, runs.valid(inputs))
        run["float32"] = list(exact.everything)
        self._add_float32(f"{run['key']}/float32/base", runs, narrow, exact)
        for draw in range(draws):
            moved = moved_by_a_rounding(self.weights, seed=draw)
            exact, narrow = (self._trace(inputs, runs, precision, moved) for precision in GATES)
            self._add_float32(f"{run['key']}/float32/{draw}", runs, narrow, exact)
        self.batches.append(run)

    def add_case(self, name: str, inputs: Inputs, runs: Runs) -> None:
        inputs = runs.of_part(inputs)
        trace = self._trace(inputs, runs, "float64", self.weights)
        self.cases[name] = self._add_run(f"hard inputs, {name.replace('/', ' ')}", inputs, trace, runs.valid(inputs))

    def _trace(self, inputs: Inputs, runs: Runs, precision: Precision, weights: Mapping[str, np.ndarray]) -> Trace:
        # Not runs.run_reference, which turns axes into the order of the port: the check will do that.
        options = {"weights": weights, "precision": precision, "valid": runs.valid(inputs)}
        trace: Trace = runs.reference_runner.trace(inputs, **options)
        return trace

    def _add_run(self, key: str, inputs: Inputs, trace: Trace, valid: np.ndarray | None) -> dict[str, Any]:
        fields, left_out = kept(trace, self.modules)
        fields["inputs"] = dict(_arrays(inputs))
        if valid is not None:
            self.tensors[f"{key}/valid"] = valid
        self.captured = self.captured or bool(fields["outputs"]) or not trace.outputs
        for field, arrays in fields.items():
            self.tensors |= {f"{key}/{field}/{name}": array for name, array in arrays.items()}
        self.tensors[f"{key}/loss"] = trace.loss
        # A safetensors file has an order of its own.
        run: dict[str, Any] = {"key": key, **{field: list(arrays) for field, arrays in fields.items()}}
        return run | {"left_out": left_out, "words": {name: dict(getattr(trace, name)) for name in WORDS}}

    def _add_float32(self, prefix: str, runs: Runs, run: Trace, exact: Trace) -> None:
        self.tensors[f"{prefix}/outputs"] = np.array(list(runs.errors(run, exact).values()))
        difference = {name: run.gradients[name].astype(np.float64) - array for name, array in exact.gradients.items()}
        self.tensors[f"{prefix}/difference"] = pack(difference)
        self.tensors[f"{prefix}/exact"] = pack(exact.gradients)

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        # Tied tensors and views share memory, which the format does not know.
        self.tensors = {name: np.array(array, copy=True, order="C") for name, array in self.tensors.items()}
        description = {
            "format": FORMAT,
            **about,
            "weights": list(self.weights),
            "batches": self.batches,
            "cases": self.cases,
            "checksums": {name: crc(array) for name, array in self.tensors.items()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
        try:
            header = {HEADER: json.dumps(description)}
            write_safetensors(part, Checkpoint(tensors=self.tensors, metadata=header))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def sizes(self) -> dict[str, int]:
        """Bytes, by run and field."""
        sizes: Counter[str] = Counter()
        for name, array in self.tensors.items():
            sizes[_part(name)] += array.nbytes
        return dict(sizes)


def _arrays(inputs: Inputs) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in inputs.items():
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"expected inputs of a golden file to be arrays, got {name}: {type(value).__name__}")
        yield name, array


def _part(name: str) -> str:
    run, _, rest = name.partition("/")
    return f"{run}: {rest.partition('/')[0]}" if run.startswith("batch") else run


def _weights(runs: Runs) -> dict[str, np.ndarray]:
    """Those the check will use: as the port can hold them, where there is a port that fits."""
    try:
        return runs.weights
    except (NotComparedError, MappingError):
        return runs.reference_weights


def _about(pair: Pair, runs: Runs, *, modules: tuple[str, ...], draws: int) -> dict[str, Any]:
    runner = runs.reference_runner
    return {
        "name": pair.name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: version for name, version in versions().items() if name in ("torch", "numpy", "twinformer")},
        "modules": list(modules),
        "draws": draws,
        "trained": sorted(runner.trained()),
        "facts": to_json(runner.facts()),
        "brings": list(_brought(pair.reference)),
    }


def _brought(side: Side) -> Iterator[str]:
    yield from (field for field in FIELDS if getattr(side, field) is not None)
