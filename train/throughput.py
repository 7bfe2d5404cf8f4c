"""How fast a run goes: real tokens a second, padding, and how well the devices are used (MFU)."""

import time
from collections.abc import Sequence
from functools import cached_property

import jax

from train.flops import measured_matmul_rate, peak_flops
from transformer_config import TransformerConfig


class _Interval:
    """Counts since some moment."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.tokens = self.positions = self.flops = 0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


class Throughput:
    """Counts what the steps have done; time spent on evaluation is left out."""

    def __init__(self, devices: Sequence[jax.Device], model: TransformerConfig):
        self._devices, self._dtype = devices, model.dtype
        self._lap, self._long = _Interval(), _Interval()

    @cached_property
    def peak(self) -> float | None:
        """Floating-point operations a second of all devices: what is known of them, or for a CPU measured now."""
        device = self._devices[0]
        if device.platform == "cpu":
            return measured_matmul_rate()  # of the machine, which virtual devices share
        known = peak_flops(device, dtype=self._dtype)
        return None if known is None else known * len(self._devices)

    def count(self, *, tokens: int, positions: int, flops: int) -> None:
        """Adds a step."""
        for interval in (self._lap, self._long):
            interval.tokens += tokens
            interval.positions += positions
            interval.flops += flops

    def pause(self, seconds: float) -> None:
        """Leaves out seconds that were no training, and begins a new stretch between evaluations."""
        self._lap.started += seconds
        self._long = _Interval()

    def lap(self) -> dict[str, float]:
        """Figures since the last lap."""
        lap, self._lap = self._lap, _Interval()
        return {"tokens_per_second": lap.tokens / lap.seconds, "padding": 1 - lap.tokens / max(lap.positions, 1)}

    def since_evaluation(self) -> str:
        """In words."""
        return f"{self._long.seconds:.0f} s, {self._long.tokens / self._long.seconds:,.0f} real tokens/s"

    def status(self) -> str:
        """For a progress bar."""
        long = self._long
        text = f"{long.tokens / long.seconds:,.0f} tokens/s  padding {1 - long.tokens / max(long.positions, 1):.0%}"
        return text if self.peak is None else f"{text}  MFU {long.flops / long.seconds / self.peak:.0%}"
