"""The port's clipping, optimizer and training step, on numpy arrays by name, in float64."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from parity.capture_flax import FlaxRunner
from parity.compilation import jit
from parity.pair import Inputs, Masks, Training
from parity.rungs import NotComparedError

MAX_AT_ONCE = 1 << 22
"""Elements of initial parameters that are drawn in one go."""

MOMENTS: Mapping[str, tuple[str, ...]] = {
    "exp_avg": ("mu",),
    "momentum_buffer": ("trace",),
    "exp_avg_sq": ("nu",),
    "max_exp_avg_sq": ("nu_max",),
    "square_avg": ("nu",),
}
"""What torch calls it, and what the fields of optax's states are called."""


class FlaxClipping:
    """The port's clipping, compiled if it can be."""

    def __init__(self, runner: FlaxRunner):
        clip = runner.side.clip
        assert clip is not None
        self.runner, self._clip = runner, clip
        self._compiled = jit(lambda gradients: dict(clip(gradients)))

    def __call__(self, gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What it makes of these gradients."""
        with self.runner.numerics():
            tensors = {name: jnp.asarray(array) for name, array in gradients.items()}
            try:
                arrays = self._compiled(tensors)
            except jax.errors.JAXTypeError:  # it decides by a value, in Python
                arrays = self._clip(tensors)
            return {name: np.asarray(array) for name, array in arrays.items()}


class OptaxOptimizer:
    """The port's optimizer. Raises TypeError if it is no optax.GradientTransformation."""

    def __init__(self, runner: FlaxRunner, transformation: Any, weights: Mapping[str, np.ndarray]):
        if not hasattr(transformation, "init") or not hasattr(transformation, "update"):
            raise TypeError(f"expected an optax.GradientTransformation from the port's side, got {transformation!r}")
        self.runner = runner
        self._update = jit(transformation.update)
        with runner.numerics():
            self.state = transformation.init({name: jnp.asarray(array) for name, array in weights.items()})

    def update(
        self, gradients: Mapping[str, np.ndarray], *, weights: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """What one step adds to these weights, at the optimizer's own learning rate."""
        with self.runner.numerics():
            updates, self.state = self._update(
                {name: jnp.asarray(gradients[name]) for name in weights},
                self.state,
                {name: jnp.asarray(array) for name, array in weights.items()},
            )
            return {name: np.asarray(array) for name, array in updates.items()}

    def moments(self, called: str) -> dict[str, np.ndarray] | None:
        """Those that torch calls so, by parameter; None if the state has no such field, or several."""
        for field in MOMENTS[called]:
            found = [value for _, value in optax.tree.get_all_with_path(self.state, field) if isinstance(value, dict)]
            if len(found) == 1:
                return {name: np.asarray(array) for name, array in found[0].items()}
        return None


class FlaxTraining:
    """The port, trained by its own training step."""

    def __init__(self, runner: FlaxRunner, training: Training, weights: Mapping[str, np.ndarray]):
        self.runner, self.training = runner, training
        with runner.numerics():
            model = runner.merged(runner.cast(weights))
            model.train()
            self.state = training.start(model)

    def step(self, inputs: Inputs, masks: Masks) -> float:
        """Takes a step; the loss before it."""
        with self.runner.numerics():
            arrays = {site: jnp.asarray(mask) for site, mask in masks.items()}
            self.state, loss = self.training.step(self.state, self.runner.inputs(inputs), arrays)
            return float(loss)

    def parameters(self) -> dict[str, np.ndarray]:
        """As they are until the next step, in float64."""
        with self.runner.numerics():
            return {name: np.asarray(p, np.float64) for name, p in self.training.parameters(self.state).items()}


class Initial:
    """Freshly drawn parameters of the port in float32, by seed: by the side's `initial`, or by building it once more.

    A builder that takes a seed is compiled, for many of them at once, where it can be. Raises NotComparedError for a
    port that is built of shapes only.
    """

    def __init__(self, runner: FlaxRunner, names: frozenset[str]):
        self.runner, self.names = runner, names
        elements = sum(int(np.prod(spec.shape)) for spec in runner.specs().values())
        self._at_once = max(1, min(64, MAX_AT_ONCE // max(1, elements)))
        self._compiled = jit(jax.vmap(self._built))
        self._drawn: tuple[int, dict[str, np.ndarray]] | None = None

    def __call__(self, seed: int) -> dict[str, np.ndarray]:
        """Of this seed."""
        with self.runner.numerics():
            initial = self.runner.side.initial
            if initial is None and self.runner.side.takes_seed is not None:
                return self._of_many(seed)
            drawn = dict(initial(seed)) if initial is not None else self._built(seed)
            return {name: np.asarray(array, np.float32) for name, array in drawn.items() if name in self.names}

    def _of_many(self, seed: int) -> dict[str, np.ndarray]:
        number, place = divmod(seed, self._at_once)
        if self._drawn is None or self._drawn[0] != number:
            seeds = number * self._at_once + np.arange(self._at_once, dtype=np.int32)
            drawn = self._at_a_time(jnp.asarray(seeds))
            self._drawn = number, {name: np.asarray(array, np.float32) for name, array in drawn.items()}
        return {name: array[place] for name, array in self._drawn[1].items()}

    def _at_a_time(self, seeds: jax.Array) -> dict[str, Any]:
        """Compiled with keys, which `nnx.Rngs` takes as it takes integers; else with integers; else one by one."""
        for given in (jax.vmap(jax.random.key)(seeds), seeds):
            try:
                return dict(self._compiled(given))
            except Exception:  # it draws on the host, say, or decides by a value
                continue
        keys = self.runner.side.takes_seed == "rngs"
        each = [self._built(jax.random.key(int(seed)) if keys else int(seed)) for seed in seeds]
        return {name: np.stack([arrays[name] for arrays in each]) for name in each[0]}

    def _built(self, seed: Any) -> dict[str, Any]:
        state = nnx.to_flat_state(nnx.state(self.runner.side.module("float32", seed=seed), nnx.Param))
        drawn = {".".join(map(str, path)): variable.get_value() for path, variable in state}
        if any(isinstance(array, jax.ShapeDtypeStruct) for array in drawn.values()):
            raise NotComparedError("the port is built of shapes only, and its side brings no `initial`")
        return {name: array for name, array in drawn.items() if name in self.names}
