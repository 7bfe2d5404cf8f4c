"""Rung 1: what is in force is measured, and a side that differs from itself is named."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from parity.capture_flax import FlaxRunner
from parity.capture_torch import TorchRunner
from parity.compare import Comparison
from parity.golden import Golden
from parity.pair import Pair
from parity.record import record
from parity.rungs import Outcome, preflight
from parity.runs import Runs

X = {"x": np.random.default_rng(0).normal(size=(3, 5))}


class Reference(torch.nn.Module):
    def __init__(self, drops: bool = False) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 6)
        self.noise = Noise(drops)
        self.second = torch.nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        return self.second(self.noise(self.first(x)))


class Noise(torch.nn.Module):
    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.drops = drops

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.dropout(x, 0.5) if self.drops else x


class FlaxNoise(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, drops: bool):
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.drops = drops

    def __call__(self, x: Any) -> Any:
        return self.drop(x, deterministic=not self.drops)


class Port(nnx.Module):
    def __init__(self, drops: bool = False):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(5, 6, rngs=rngs)
        self.noise = FlaxNoise(rngs, drops)
        self.second = nnx.Linear(6, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(self.noise(self.first(x)))


def climb(*, reference: Any = Reference, port: Any = Port, **changes: Any) -> Outcome:
    return preflight.climb(Runs(Pair(reference=reference, port=port, **({"inputs": X} | changes))))


def by_tensor(outcome: Outcome) -> dict[str, Comparison]:
    return {comparison.tensor: comparison for section in outcome.sections for comparison in section.comparisons}


@pytest.fixture(scope="module")
def equal() -> Outcome:
    return climb()


def test_a_sound_pair_passes_and_says_what_is_in_force(equal: Outcome) -> None:
    assert all(section.passed for section in equal.sections)
    assert equal.notes == ()
    assert equal.evidence["precision"] == {"reference": "float32", "port": "float32"}
    assert equal.evidence["differs_from_itself"] == {}
    assert by_tensor(equal)["port on cpu"].detail == "float32 is in force"
    assert {"reference", "port", "1 + 2^-40", "reference on cpu"} <= by_tensor(equal).keys()
    assert any(name.startswith("torch 2.") for name in by_tensor(equal))


@pytest.mark.parametrize("side", ["reference", "port"])
def test_a_side_that_differs_from_itself_is_named_with_its_first_module(side: str) -> None:
    drops = {"reference": lambda: Reference(drops=True), "port": lambda: Port(drops=True)}
    outcome = climb(**{side: drops[side]})
    (failure,) = [c for c in by_tensor(outcome).values() if not c.passed]
    first = "noise.drop" if side == "port" else "noise"
    assert failure.tensor == f"{side}: {first}"
    assert f"two runs on the same input differ, first at {first}" in failure.detail
    assert outcome.evidence["differs_from_itself"] == {side: first}


def test_a_random_stream_used_between_modules_is_noticed() -> None:
    class Streaming(Port):
        def __init__(self) -> None:
            super().__init__()
            self.rngs = nnx.Rngs(1)

        def __call__(self, x: Any) -> Any:
            return super().__call__(x) + jax.random.normal(self.rngs.noise(), ())

    outcome = climb(port=Streaming)
    assert [c.tensor for c in by_tensor(outcome).values() if not c.passed] == ["port: output"]


def rounded_to(bits: int) -> Any:
    """A product of matrices whose entries keep so many bits, as hardware does it."""

    def keep(x: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.round(mantissa * 2**bits) / 2**bits, exponent)

    def product(self: Any, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return (keep(left) @ keep(right)).astype(np.float32)

    return product


@pytest.mark.parametrize(
    ("bits", "name"), [(11, "TF32"), (8, "bfloat16"), (16, "three passes of bfloat16"), (24, "float32")]
)
@pytest.mark.parametrize("side", ["reference", "port"])
def test_the_precision_in_force_is_measured(side: str, bits: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = TorchRunner if side == "reference" else FlaxRunner
    monkeypatch.setattr(runner, "product", rounded_to(bits))
    found: dict[str, str] = {}
    runs = Runs(Pair(reference=Reference, port=Port, inputs=X))
    comparisons = {c.tensor: c for c in preflight._products(runs, True, found)}
    assert found[side] == name
    assert comparisons[f"{side} on cpu"].passed == (bits == 24)
    assert comparisons[f"{side} on cpu"].detail == f"{name} is in force"


def test_what_the_user_set_is_overruled_while_the_harness_runs() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        outcome = climb()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert outcome.evidence["precision"]["reference"] == "float32"


def test_float64_that_is_off_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(Pair(reference=Reference, port=Port, inputs=X))
    runs.port_runner("float64").precision = "float32"
    found = preflight._float64_of(runs)
    assert not found.passed
    assert found.detail == "expected float64 sums, got float32 ones: x64 is off"


def test_versions_too_old_fail_and_too_new_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "VERSIONS", {"jax": ("99.1", "99.2"), "flax": ("0.1", "0.2")})
    notes: list[str] = []
    jax_version, flax_version = preflight._versions(True, notes)
    assert not jax_version.passed
    assert jax_version.detail.startswith("expected 99.1 at least, got 0.")
    assert flax_version.passed
    assert notes == [f"{flax_version.tensor} has not been tried: the harness was written for 0.1 to 0.2"]


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.stack = torch.nn.TransformerEncoder(layer, 1)

    def forward(self, x: Any, padding: Any) -> Any:
        return self.stack(x, src_key_padding_mask=padding)


def test_torchs_fast_path_is_noted_where_it_changes_what_counts() -> None:
    padding = np.array([[0, 0, 0, 1], [0, 0, 1, 1]], bool)
    inputs = {"x": np.random.default_rng(0).normal(size=(2, 4, 6)), "padding": padding}

    def notes(valid: Any) -> list[str]:
        pair = Pair(reference=Encoder, port=Port, inputs=inputs, valid=valid)
        return list(preflight._fast_path(Runs(pair)))

    (note,) = notes(None)
    assert note.startswith("torch's encoder fast path changes the reference's output by ")
    assert "(Pair.valid says which positions count)" in note
    assert notes(lambda given: ~given["padding"]) == []
    (note,) = notes(lambda given: given["padding"] | True)
    assert "at positions that count" in note


def test_different_devices_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlaxRunner, "device", "tpu")
    runs = Runs(Pair(reference=Reference, port=Port, inputs=X))
    assert list(preflight._devices(runs)) == [
        "the reference runs on cpu, the port on tpu: their float32 errors are those of two machines"
    ]


def test_against_a_golden_file_only_the_port_is_looked_at(tmp_path: Path) -> None:
    pair = Pair(reference=Reference, port=Port, inputs=X)
    record(pair, tmp_path / "small.golden", draws=0, hard=False)
    runs = Runs(dataclasses.replace(pair, reference=None), golden=Golden.read(tmp_path / "small.golden"))
    outcome = preflight.climb(runs)
    assert all(section.passed for section in outcome.sections)
    assert outcome.evidence["precision"] == {"port": "float32"}
    assert not any("torch" in name or "reference" in name for name in by_tensor(outcome))


def test_where_the_mapping_does_not_fit_the_port_is_not_run_and_the_report_says_so() -> None:
    class Other(Port):
        def __init__(self) -> None:
            super().__init__()
            self.third = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    outcome = climb(port=Other)
    assert any(note.startswith("the port was not run: ") for note in outcome.notes)
    assert "port" not in by_tensor(outcome)
