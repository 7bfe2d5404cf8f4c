"""Golden files: the reference's side, run once where torch is installed, kept for machines where it is not.

One safetensors file holds inputs, weights, facts, every module's inputs and outputs, results, loss and gradients in
float64, and how far the reference's float32 runs are from them. Nothing in it depends on the port: that may be changed,
renamed or fused otherwise afterwards, and is still judged by the same file.
"""

import dataclasses
import fnmatch
import functools
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parity.facts import Facts, from_json
from parity.pair import Inputs, Precision
from parity.rungs import NotComparedError
from parity.trace import Trace, module_of
from parity.weights.checkpoint import StoreError
from parity.weights.store_safetensors import LazyTensors

HEADER = "parity_golden"
FORMAT = 1
TENSORS = ("given", "given_ids", "outputs", "results", "gradients", "buffers", "summed")
"""Fields of a Trace that hold arrays by name."""
WORDS = tuple(f.name for f in dataclasses.fields(Trace) if f.name not in (*TENSORS, "loss"))
"""Those that hold words by name."""


class GoldenError(ValueError):
    """A file that is no golden file, or is damaged. The message names it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float32:
    """A float32 run of the reference, measured by its float64 run."""

    outputs: dict[str, float]
    """Relative error of every output, result and the loss."""
    difference: dict[str, np.ndarray]
    """Magnitudes of the gradients' errors, by the reference's names and in its layouts; see `spread`."""
    exact: dict[str, np.ndarray]
    """Magnitudes of the gradients themselves."""


class Golden:
    """A golden file that is open. It stands for the reference: see parity.runs.Reference.

    A run that it does not hold raises NotComparedError.
    """

    def __init__(self, path: Path, tensors: LazyTensors, description: Mapping[str, Any]):
        self.path = path
        self._tensors = tensors
        self._description = description

    @classmethod
    def read(cls, path: Path) -> "Golden":
        """Opens the file, and reads it once to see that no byte has changed. Raises GoldenError, FileNotFoundError."""
        if not path.exists():
            raise FileNotFoundError(f"expected a golden file, got {path}, which does not exist")
        if not path.is_file():
            raise GoldenError(f"{path}: expected a golden file, got a folder")
        try:
            tensors = LazyTensors(path)
        except StoreError as error:
            raise GoldenError(
                f"{path}: expected a whole golden file, got a damaged or foreign one ({error})"
            ) from error
        text = tensors.header.get(HEADER)
        if text is None:
            raise GoldenError(f"{path}: expected a file written by `python -m parity record`, got other tensors")
        try:
            description = json.loads(text)
        except json.JSONDecodeError as error:
            raise GoldenError(f"{path}: expected a description of its tensors, got {error}") from error
        if description.get("format") != FORMAT:
            got = description.get("format")
            raise GoldenError(f"{path}: expected format {FORMAT} of golden files, got {got!r}: record it again")
        golden = cls(path, tensors, description)
        golden._verify()
        return golden

    def _verify(self) -> None:
        checksums = self._description["checksums"]
        if checksums.keys() != set(self._tensors):
            raise GoldenError(f"{self.path}: expected the tensors it was recorded with, got others")
        for name, checksum in checksums.items():
            try:
                same = crc(self._tensors[name]) == checksum
            except StoreError:  # it has a checksum of its own
                same = False
            if not same:
                raise GoldenError(f"{self.path}: expected {name!r} as it was recorded, got other bytes")

    @property
    def recorded(self) -> dict[str, str]:
        """What a report says of the file: when and with which versions it was recorded."""
        versions = ", ".join(f"{name} {version}" for name, version in self._description["versions"].items())
        return {
            "golden file": self.path.name,
            "recorded": self._description["date"],
            "of": self._description["name"],
            "with": versions,
            "modules kept": " ".join(self._description["modules"]),
            "further float32 runs": str(self._description["draws"]),
        }

    @functools.cached_property
    def batches(self) -> tuple[Inputs, ...]:
        """The inputs of the recorded runs."""
        return tuple(self._inputs(run) for run in self._description["batches"])

    @functools.cached_property
    def cases(self) -> dict[str, Inputs]:
        """Hard inputs by name, of runs that were recorded too."""
        return {name: self._inputs(run) for name, run in self._description["cases"].items()}

    @functools.cache  # noqa: B019 - lives as long as the check
    def weights(self) -> dict[str, np.ndarray]:
        """Parameters and buffers that the runs were made with, in float32."""
        return {name: self._tensors[f"weights/{name}"] for name in self._description["weights"]}

    def trained(self) -> frozenset[str]:
        """Names of the parameters that are trained."""
        return frozenset(self._description["trained"])

    def facts(self) -> Facts:
        """Types, tensors and settings of every module."""
        return from_json(self._description["facts"])

    def brings(self, what: str) -> bool:
        """Whether the reference's side had this field, such as `loss`."""
        return what in self._description["brings"]

    def trace(self, inputs: Inputs, *, weights: Mapping[str, np.ndarray], precision: Precision, **other: Any) -> Trace:
        """The recorded float64 run of these inputs. Raises NotComparedError for any other run."""
        if precision != "float64" or any(other.values()):
            raise NotComparedError(f"the golden file holds no such run of the reference ({precision})")
        self._expect_weights(weights)
        return self._trace(self._run(inputs))

    def valid(self, inputs: Inputs) -> np.ndarray | None:
        """Which leading positions of an output count in the recorded run of these inputs; None for all."""
        return self._tensors.get(f"{self._run(inputs)['key']}/valid")

    def _run(self, inputs: Inputs) -> Mapping[str, Any]:
        runs = [*zip(self.batches, self._description["batches"], strict=True)]
        runs += [(self.cases[name], run) for name, run in self._description["cases"].items()]
        for recorded, run in runs:
            if _same(recorded, inputs):
                found: Mapping[str, Any] = run
                return found
        raise NotComparedError("the golden file holds no run of the reference on these inputs")

    def float32(self, batch: int, draw: int | None) -> Float32:
        """Of a batch; or of a further run `draw` with weights moved by a rounding. Further runs than were recorded are
        the recorded ones again: the largest error over them is then what it was."""
        if draw is not None:
            draws = self._description["draws"]
            draw = draw % draws if draws else None
        run = self._description["batches"][batch]
        prefix = f"{run['key']}/float32/{'base' if draw is None else draw}"
        shapes = {name: self._tensors.spec(f"{run['key']}/gradients/{name}").shape for name in run["gradients"]}
        return Float32(
            outputs=dict(zip(run["float32"], map(float, self._tensors[f"{prefix}/outputs"]), strict=True)),
            difference=unpack(self._tensors[f"{prefix}/difference"], shapes),
            exact=unpack(self._tensors[f"{prefix}/exact"], shapes),
        )

    def _expect_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        for name, recorded in self.weights().items():
            if name in weights and not np.array_equal(weights[name], recorded):
                raise NotComparedError(
                    f"the golden file was recorded with another {name}: record it again, with the port at hand"
                )

    def _inputs(self, run: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: self._tensors[f"{run['key']}/inputs/{name}"] for name in run["inputs"]}

    def _trace(self, run: Mapping[str, Any]) -> Trace:
        fields: dict[str, Any] = {
            field: {name: self._tensors[f"{run['key']}/{field}/{name}"] for name in run[field]} for field in TENSORS
        }
        fields |= {field: dict(run["words"].get(field, {})) for field in WORDS}
        fields["not_captured"] |= {path: "not among the modules that were recorded" for path in run["left_out"]}
        return Trace(loss=self._tensors[f"{run['key']}/loss"], **fields)


def kept(trace: Trace, patterns: tuple[str, ...]) -> tuple[dict[str, dict[str, np.ndarray]], list[str]]:
    """The arrays of a trace by field, with modules of these patterns only; and the modules that are left out."""
    left_out = {module_of(name) for name in [*trace.outputs, *trace.given]}
    left_out = {path for path in left_out if not any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)}
    fields = {field: dict(getattr(trace, field)) for field in TENSORS}
    for field in ("given", "given_ids", "outputs"):
        fields[field] = {name: array for name, array in fields[field].items() if module_of(name) not in left_out}
    return fields, sorted(left_out)


def crc(array: np.ndarray) -> int:
    """Of its bytes."""
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")


def pack(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """For every tensor and each of its axes, the sums of squares over the other axes, one after the other.

    The port may hold the tensor in another layout: cut along an axis, permuted, transposed. The errors of its pieces
    follow from these sums, and they take the space of a row and a column, not of the tensor.
    """
    sums = []
    for array in tensors.values():
        squares = np.square(np.asarray(array, np.float64))
        axes = range(squares.ndim)
        sums += [squares.sum(axis=tuple(a for a in axes if a != axis)).ravel() for axis in axes]
        if squares.ndim == 0:
            sums.append(squares.ravel())
    return np.concatenate(sums) if sums else np.zeros(0)


def unpack(packed: np.ndarray, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The inverse as far as there is one: magnitudes with the same sums of squares along every axis."""
    tensors, start = {}, 0
    for name, shape in shapes.items():
        magnitudes, total = np.ones(shape), None
        for axis, size in enumerate(shape):
            sums = packed[start : start + size]
            start += size
            total = float(sums.sum())
            across = [1] * len(shape)
            across[axis] = size
            magnitudes = magnitudes * (sums / total if total else sums).reshape(across)
        if not shape:
            total, start = float(packed[start]), start + 1
        tensors[name] = np.sqrt(magnitudes * (total or 0.0))
    return tensors


def _same(recorded: Inputs, inputs: Inputs) -> bool:
    return recorded.keys() == inputs.keys() and all(
        recorded[name].dtype == inputs[name].dtype and np.array_equal(recorded[name], inputs[name], equal_nan=False)
        for name in recorded
    )
