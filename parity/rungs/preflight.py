"""Rung 1: versions, the precision that is really in force, and whether either side repeats itself.

A product of matrices says what precision matrix products have (P6: TF32 on GPUs, bfloat16 on TPUs by default), whatever
was asked for. A side that differs from itself cannot equal another: dropout that was left on would show up later as a
difference between the two.

Evidence: `precision` {side: what is in force}; `differs_from_itself` {side: first module}.
"""

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from parity.compare import Comparison, relative_error
from parity.pair import Inputs
from parity.rungs import NotComparedError, Outcome, section
from parity.runs import Runs
from parity.tolerances import EXACT_RULE, FLOAT64_RELATIVE, PRODUCT_RELATIVE, PRODUCT_RULE, REPEATED_RULE
from parity.trace import Trace, module_of
from parity.weights.problems import MappingError

VERSIONS = {"jax": ("0.10.2", "0.11"), "flax": ("0.12.8", "0.13"), "torch": ("2.8", "2.14")}
"""The least that the harness needs, and from where on it has not been tried."""

_IN_FORCE = ((PRODUCT_RELATIVE, "float32"), (5e-5, "three passes of bfloat16"), (1e-3, "TF32"))
"""Up to which error of the product it is which precision; beyond them, bfloat16."""


def climb(runs: Runs) -> Outcome:
    """Against a golden file, the port's part alone."""
    notes: list[str] = []
    evidence: dict[str, Any] = {"precision": {}, "differs_from_itself": {}}
    live = runs.golden is None and runs.pair.reference is not None
    sections = [
        section("versions", "static", EXACT_RULE, _versions(live, notes)),
        section("float64 in the port", "float64", EXACT_RULE, [_float64_of(runs)]),
        section("matrix product", "float32", PRODUCT_RULE, _products(runs, live, evidence["precision"])),
    ]
    repeated = list(_repeated(runs, live, evidence["differs_from_itself"], notes))
    if repeated:
        sections.append(section("each side against itself", "float64", REPEATED_RULE, repeated))
    if live:
        notes += _devices(runs)
        notes += _fast_path(runs)
    return Outcome(sections=tuple(sections), notes=tuple(notes), evidence=evidence)


def _versions(live: bool, notes: list[str]) -> Iterator[Comparison]:
    for package, (least, untried) in VERSIONS.items():
        if package == "torch" and not live:
            continue
        version = importlib.metadata.version(package)
        detail = "" if _number(version) >= _number(least) else f"expected {least} at least, got {version}"
        if _number(version) >= _number(untried):
            notes.append(f"{package} {version} has not been tried: the harness was written for {least} to {untried}")
        yield Comparison(tensor=f"{package} {version}", error=float(bool(detail)), bound=0.0, detail=detail)


def _number(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0)."""
    parts = version.partition("+")[0].split(".")
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)


def _float64_of(runs: Runs) -> Comparison:
    """A sum that float32 cannot hold."""
    with runs.port_runner("float64").numerics():
        got = float(jnp.asarray(1.0) + jnp.asarray(2.0**-40))
    error = abs(got - (1.0 + 2.0**-40))
    detail = "" if error == 0.0 else "expected float64 sums, got float32 ones: x64 is off"
    return Comparison(tensor="1 + 2^-40", error=error, bound=0.0, detail=detail)


def _products(runs: Runs, live: bool, in_force: dict[str, str]) -> Iterator[Comparison]:
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    exact = left.astype(np.float64) @ right.astype(np.float64)
    runners: dict[str, Any] = {"port": runs.port_runner("float32")}
    if live:
        runners = {"reference": runs.live_reference()} | runners
    for side, runner in runners.items():
        error = relative_error(runner.product(left, right), exact)
        in_force[side] = next((name for bound, name in _IN_FORCE if error <= bound), "bfloat16")
        detail = f"{in_force[side]} is in force"
        yield Comparison(tensor=f"{side} on {runner.device}", error=error, bound=PRODUCT_RELATIVE, detail=detail)


def _repeated(runs: Runs, live: bool, first: dict[str, str], notes: list[str]) -> Iterator[Comparison]:
    """Runs with other random numbers than the kept ones."""
    inputs = runs.batches[0]
    if live:
        yield _reference_repeated(runs, inputs, first)
    try:
        kept = runs.port("float64")
    except (MappingError, NotComparedError) as reason:
        notes.append(f"the port was not run: {str(reason).splitlines()[0]}")
        return
    yield _against_itself("port", kept, runs.run_port(inputs, "float64", seed=1), first)


def _reference_repeated(runs: Runs, inputs: Inputs, first: dict[str, str]) -> Comparison:
    """Results alone, and only if they differ every module: the forward pass is a third of a run."""
    kept, valid = runs.reference("float64"), runs.valid(inputs)
    again = runs.live_reference().results(inputs, weights=runs.weights, seed=1)
    errors = [_error(_picked(array, valid), kept.results[name]) for name, array in again.items()]
    if max(errors, default=0.0) <= FLOAT64_RELATIVE:
        return Comparison(tensor="reference", error=max(errors, default=0.0), bound=FLOAT64_RELATIVE)
    return _against_itself("reference", kept, runs.run_reference(inputs, "float64", seed=1), first)


def _picked(array: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
    return array[valid] if valid is not None and array.shape[: valid.ndim] == valid.shape else array


def _against_itself(side: str, kept: Trace, other: Trace, first: dict[str, str]) -> Comparison:
    for name, array in {**kept.outputs, **kept.results}.items():
        got = other.everything.get(name)
        same = got is not None and np.array_equal(got, array, equal_nan=True)
        error = 0.0 if same or got is None else _error(got, array)
        if got is None or error > FLOAT64_RELATIVE:
            first[side] = module_of(name)
            detail = f"two runs on the same input differ, first at {module_of(name)}: dropout, or another random stream"
            return Comparison(
                tensor=f"{side}: {module_of(name)}",
                error=float("inf") if got is None else error,
                bound=FLOAT64_RELATIVE,
                detail=detail,
            )
    return Comparison(tensor=side, error=_error(other.loss, kept.loss), bound=FLOAT64_RELATIVE)


def _error(got: np.ndarray, expected: np.ndarray) -> float:
    """Where both are not finite at the same places, of the others: whether they should be is for the later rungs."""
    finite = np.isfinite(expected)
    if got.shape != expected.shape or not np.array_equal(finite, np.isfinite(got)):
        return float("inf")
    return relative_error(got[finite], expected[finite])


def _devices(runs: Runs) -> Iterator[str]:
    reference, port = runs.live_reference().device, runs.port_runner("float32").device
    if reference.replace("cuda", "gpu") != port:
        yield f"the reference runs on {reference}, the port on {port}: their float32 errors are those of two machines"


def _fast_path(runs: Runs) -> Iterator[str]:
    """The reference against itself at valid positions, with and without torch's encoder fast path (P18)."""
    runner = runs.live_reference()
    if not runner.has_fast_path():
        return
    inputs, valid = runs.batches[0], runs.valid(runs.batches[0])
    plain, fast = (runner.results(inputs, weights=runs.weights, fast_path=on) for on in (False, True))
    for name, array in plain.items():
        error = _error(_picked(fast[name], valid), _picked(array, valid))
        if error > FLOAT64_RELATIVE:
            where = "at positions that count" if valid is not None else "(Pair.valid says which positions count)"
            yield (
                f"torch's encoder fast path changes the reference's {name} by {error:.1e} {where}: "
                "it is off here, and on where a model is used under torch.no_grad"
            )
