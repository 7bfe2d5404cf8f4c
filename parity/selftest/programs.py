"""The programs that a pair's port is traced to: two sources with the same programs compute the same.

A program is a jaxpr, written out, with the values of its constants: forward and backward without and with dropout masks
handed in, the drawing of masks, decoding, each in every precision.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from parity.capture_flax import FlaxRunner
from parity.pair import Inputs, Pair, Precision

_ADDRESS = re.compile(r"0x[0-9a-f]+|\bid=\d+")

Programs = dict[str, str]
"""What is run -> a digest of its program."""


def programs(pair: Pair, *, seed: int = 0) -> Programs:
    """Every program of the port. Raises what the model raises."""
    return dict(one_by_one(pair, seed=seed))


def one_by_one(pair: Pair, *, seed: int = 0) -> Iterator[tuple[str, str]]:
    """(what is run, digest): on the pair's first batch; on its hard inputs the forward and backward pass in float64."""
    for precision in get_args(Precision):
        runner = FlaxRunner(pair.port, precision=precision)
        batches = {"batch": pair.batches(seed=seed)[0]}
        if precision == "float64" and pair.adversarial is not None:
            batches |= pair.adversarial(seed)
        for name, inputs in batches.items():
            with runner.numerics():
                traced = _Traced(runner, inputs, seed)
                yield f"forward and backward, {name}, {precision}", traced.of_call()
                for what, digest in traced.of_the_rest() if name == "batch" else ():
                    yield f"{what}, {name}, {precision}", digest
    if pair.port.initial is not None:
        # By value: a jit with options of its own cannot be traced into another program.
        yield "initial values", _of_arrays(jax.tree.leaves(pair.port.initial(seed)))


class _Traced:
    """Programs of one batch in one precision."""

    def __init__(self, runner: FlaxRunner, inputs: Inputs, seed: int):
        self.runner, self.side, self.seed = runner, runner.side, seed
        zeros = {name: np.zeros(spec.shape, np.float32) for name, spec in runner.specs().items()}
        arrays, trained = runner.cast(zeros), runner.trained()
        self.fixed = {name: array for name, array in arrays.items() if name not in trained}
        self.arrays = {name: array for name, array in arrays.items() if name in trained}
        self.given = runner.inputs(inputs)

    def of_the_rest(self) -> Iterator[tuple[str, str]]:
        """Whatever else the side brings."""
        draw, call, decode = self.side.draw_dropout, self.side.call_with_dropout, self.side.decode
        given, model = self.given, self.runner.merged(self.arrays | self.fixed)
        if draw is not None:
            # By value, as initial values are.
            masks = draw(model, given, self.seed)
            yield "masks", _of_arrays(jax.tree.leaves(masks))
            if call is not None:
                yield "dropout", self._both(lambda module, masks: call(module, given, masks), masks)
        if decode is not None:
            merged = self.runner.merged
            program = jax.make_jaxpr(lambda t: decode(merged(dict(t) | self.fixed), given))(self.arrays)
            yield "decoding", _digest(program)

    def of_call(self) -> str:
        """Forward and backward, without dropout."""
        return self._both(lambda module, masks: self.side.call(module, self.given), ())

    def _both(self, call: Callable[[Any, Any], Any], masks: Any) -> str:
        def loss(trained: Any, masks: Any) -> Any:
            output = call(self.runner.merged(dict(trained) | self.fixed), masks)
            value = jax.tree.leaves(output)[0].sum() if self.side.loss is None else self.side.loss(output, self.given)
            return (value[0] / value[1] if isinstance(value, tuple) else value), output

        return _digest(jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(self.arrays, masks))


def _digest(program: Any) -> str:
    digest = hashlib.sha256(_ADDRESS.sub("", str(program)).encode())
    for constant in _constants(program):
        digest.update(np.asarray(constant).tobytes())
    return digest.hexdigest()


def _of_arrays(arrays: list[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()


def _constants(program: Any) -> Iterator[Any]:
    """Of a closed jaxpr and of those inside it; text shows only their shapes."""
    for constant in getattr(program, "consts", ()):
        if hasattr(constant, "dtype") and not jnp.issubdtype(constant.dtype, jax.dtypes.extended):
            yield constant
    for equation in getattr(getattr(program, "jaxpr", program), "eqns", ()):
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from _constants(value)
