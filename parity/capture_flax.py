"""Runs an nnx.Module, jitted, and keeps what every submodule was given and returned, the loss, every gradient."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from parity.compilation import jit
from parity.facts import Facts
from parity.facts_flax import describe
from parity.pair import Inputs, Precision, Side
from parity.trace import OUTPUT, Trace, by_call, leaves, projection

GIVEN, GIVEN_IDS, RETURNED = "__given__", "__given_ids__", "__returned__"


class FlaxRunner:
    """The port in one precision: forward and backward passes, compiled once for each shape of inputs.

    The float64 run is traced inside `jax.enable_x64`, the float32 run freshly outside it: with x64 on, a function
    meant for float32 is another program.
    """

    def __init__(self, side: Side, *, precision: Precision):
        self.side = side
        self.precision = precision
        with self.numerics():
            self.model = side.module(precision)
            if not isinstance(self.model, nnx.Module):
                raise TypeError(f"expected the port's builder to return an nnx.Module, got {type(self.model)}")
            self.model.eval()
            self._graphdef, state, self._others = nnx.split(self.model, _is_weight, ...)
        self._variables = {".".join(map(str, path)): (path, var) for path, var in nnx.to_flat_state(state)}
        self._tapped = jit(lambda *arguments: self._run(*arguments, tap=True), precision=precision)
        self._untapped = jit(lambda *arguments: self._run(*arguments, tap=False), precision=precision)

    def specs(self) -> dict[str, Any]:
        """Name to an object with shape and dtype, for every parameter and every other floating-point variable."""
        return {name: variable.get_value() for name, (_, variable) in self._variables.items()}

    def trained(self) -> frozenset[str]:
        """Names of the parameters: those an optimizer is given."""
        return frozenset(name for name, (_, var) in self._variables.items() if isinstance(var, nnx.Param))

    def facts(self) -> Facts:
        """Types, tensors and settings of every module."""
        return describe(self.model)

    def merged(self, arrays: Mapping[str, jax.Array]) -> nnx.Module:
        """The module with these weights; call it under `numerics`."""
        filled = [(path, variable.replace(arrays[name])) for name, (path, variable) in self._variables.items()]
        return nnx.merge(self._graphdef, nnx.from_flat_state(filled), self._others)

    def cast(self, weights: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Weights in the dtypes of this precision; one that is missing keeps the value it was built with."""
        arrays = {}
        for name, (_, variable) in self._variables.items():
            dtype = variable.get_value().dtype if self.side.takes_precision else jnp.dtype(self.precision)
            arrays[name] = jnp.asarray(weights[name] if name in weights else variable.get_value(), dtype)
        return arrays

    def inputs(self, inputs: Inputs) -> dict[str, jax.Array]:
        """Inputs as arrays; floating-point ones in the precision of the run."""
        return {
            name: jnp.asarray(array, self.precision if np.issubdtype(array.dtype, np.floating) else None)
            for name, array in inputs.items()
        }

    def trace(self, inputs: Inputs, *, weights: Mapping[str, np.ndarray], tap: bool = True) -> Trace:
        """Runs with these weights, by the names of the port. Untapped, no module is watched: the program that users run.

        Tapping changes what the compiler fuses (P24).
        """
        with self.numerics():
            arrays, trained = self.cast(weights), self.trained()
            run = self._tapped if tap else self._untapped
            values, gradients = run(
                {name: array for name, array in arrays.items() if name in trained},
                {name: array for name, array in arrays.items() if name not in trained},
                self.inputs(inputs),
            )
            loss, results, calls, buffers = jax.tree.map(_to_numpy, values)
            gradients = jax.tree.map(_to_numpy, gradients)
        return Trace(
            given=by_call(_of_kind(calls, GIVEN)),
            given_ids=by_call(_of_kind(calls, GIVEN_IDS)),
            outputs=by_call(_of_kind(calls, RETURNED)),
            results=results,
            loss=loss,
            gradients=gradients,
            buffers=buffers,
            summed={},
        )

    def loss(self, output: Any, results: Mapping[str, jax.Array], inputs: Mapping[str, Any]) -> jax.Array:
        """The side's own, or the fixed random projection."""
        if self.side.loss is None:
            terms = [(x * jnp.asarray(projection(name, x.shape), x.dtype)).sum() for name, x in results.items()]
            return jnp.stack(terms).sum()
        loss = self.side.loss(output, inputs)
        return loss[0] / loss[1] if isinstance(loss, tuple) else loss

    def _run(self, trained: dict[str, jax.Array], fixed: dict[str, jax.Array], inputs: Any, *, tap: bool) -> Any:
        def loss_and_more(trained: dict[str, jax.Array]) -> Any:
            model = self.merged(trained | fixed)
            with _recorded_calls(model) if tap else contextlib.nullcontext():
                output, recorded = nnx.capture(lambda m: self.side.call(m, inputs), nnx.Intermediate)(model)
            results = {OUTPUT + suffix: array for suffix, array in leaves(output, _is_floating)}
            calls = {".".join(map(str, path)): value.get_value() for path, value in nnx.to_flat_state(recorded)}
            buffers = {
                ".".join(map(str, path)): variable.get_value()
                for path, variable in nnx.to_flat_state(nnx.state(model, _is_weight))
                if not isinstance(variable, nnx.Param)
            }
            loss = self.loss(output, results, inputs)
            return loss, (loss, results, calls, buffers)

        gradients, more = jax.grad(loss_and_more, has_aux=True)(trained)
        return more, gradients

    @contextlib.contextmanager
    def numerics(self) -> Iterator[None]:
        """x64 for the float64 run alone; matrix products in full precision (P6)."""
        with jax.enable_x64(self.precision == "float64"), jax.default_matmul_precision("highest"):
            yield


@contextlib.contextmanager
def _recorded_calls(model: nnx.Module) -> Iterator[None]:
    """Makes every submodule sow what it is given and what it returns, for `nnx.capture` to collect.

    Sowing, and not a list on the side, because values inside `nnx.remat` must leave it through the module's state.
    """
    classes = {type(module) for path, module in nnx.iter_modules(model) if path}
    # By the class that defines it, not by getattr: a class is itself callable, and a method may be inherited.
    defined = {
        cls: next((base.__dict__["__call__"] for base in cls.__mro__ if "__call__" in base.__dict__), None)
        for cls in classes
    }

    def recording(original: Any) -> Any:
        def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            returned = original(self, *args, **kwargs)
            given = (args, list(kwargs.values()))
            self.sow(nnx.Intermediate, GIVEN, dict(leaves(given, _is_floating)))
            self.sow(nnx.Intermediate, GIVEN_IDS, dict(leaves(given, _is_discrete)))
            self.sow(nnx.Intermediate, RETURNED, dict(leaves(returned, _is_floating)))
            return returned

        return call

    wrapped = {cls: recording(original) for cls, original in defined.items() if original is not None}
    own = {cls: cls.__dict__.get("__call__") for cls in wrapped}
    try:
        for cls, call in wrapped.items():
            setattr(cls, "__call__", call)  # noqa: B010
        yield
    finally:
        for cls, original in own.items():
            if original is None:
                delattr(cls, "__call__")
            else:
                setattr(cls, "__call__", original)  # noqa: B010


def _of_kind(calls: Mapping[str, Any], kind: str) -> dict[str, list[list[tuple[str, np.ndarray]]]]:
    return {
        name.removesuffix("." + kind): [list(call.items()) for call in value]
        for name, value in calls.items()
        if name.endswith("." + kind)
    }


def _is_weight(path: Any, variable: Any) -> bool:
    """A parameter, or any other variable of floating-point values: running statistics, a table kept as a variable."""
    if not isinstance(variable, nnx.Variable) or isinstance(variable, nnx.Intermediate):
        return False
    value = variable.get_value()
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def _is_floating(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)


def _is_discrete(value: Any) -> bool:
    return isinstance(value, jax.Array) and not jnp.issubdtype(value.dtype, jnp.floating)


def _to_numpy(array: jax.Array) -> np.ndarray:
    """On the host; bfloat16 as float32, which holds it exactly."""
    return np.asarray(array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array)
