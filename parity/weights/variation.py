"""Weights slightly other than they are: moved by a rounding, or with noise where they are constant. Noise to add."""

from collections.abc import Mapping

import numpy as np


def moved_by_a_rounding(weights: Mapping[str, np.ndarray], *, seed: int) -> dict[str, np.ndarray]:
    """Each float32 weight moved to one of its neighbours, or not at all."""
    rng = np.random.default_rng(seed)
    directions = (np.float32(-np.inf), np.float32(np.inf))
    moved: dict[str, np.ndarray] = {}
    for name, weight in weights.items():
        which = rng.integers(0, 3, weight.shape)
        moved[name] = np.where(
            which == 2, weight, np.where(which == 1, *(np.nextafter(weight, limit) for limit in directions))
        )
    return moved


class Noise:
    """Arrays of independent normal numbers, each array of about the same norm."""

    def __init__(self, norm: float, *, seed: int):
        self._norm = norm
        self._rng = np.random.default_rng(seed)

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray:
        """The next one, in float64."""
        drawn = self._rng.standard_normal(shape)
        return np.asarray(drawn * (self._norm / max(1, drawn.size) ** 0.5))


def without_constants(weights: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Noise on tensors of one value: at their initial 0 and 1, two biases that were exchanged would look alike."""
    rng = np.random.default_rng(seed)
    varied: dict[str, np.ndarray] = {}
    for name, array in weights.items():
        constant = array.size > 0 and bool((array == array.flat[0]).all())
        if constant and array.flat[0] == 0.0:
            varied[name] = array + 0.1 * rng.standard_normal(array.shape)
        elif constant:  # positive stays positive: it may be a variance
            varied[name] = array * (1.0 + 0.5 * rng.random(array.shape))
        else:
            varied[name] = array
    return {name: np.asarray(array, np.float32) for name, array in varied.items()}
