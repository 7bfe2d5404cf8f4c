"""Runs an nnx.Module, jitted, and keeps what every submodule was given and returned, the loss, every gradient."""

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from parity.build import built
from parity.capture_flax_calls import CallRecorder, Static, calls_of, is_floating, tagged
from parity.capture_flax_dropout import drawn, handed_to, masks_of
from parity.capture_flax_precision import narrowed
from parity.compilation import jit
from parity.facts import Facts
from parity.facts_flax import describe
from parity.pair import Inputs, Masks, Precision, Side
from parity.trace import LOSS, OUTPUT, Trace, by_name, leaves, module_of, narrow_by_name, projection, substitute


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """What makes a run another program."""

    tap: bool = True
    sow: bool = True
    training: bool = False
    masks: bool = False
    backward: bool = True
    eager: bool = False


class FlaxRunner:
    """The port in one precision: forward and backward passes, compiled once for each shape of inputs.

    The float64 run is traced inside `jax.enable_x64`, the float32 run freshly outside it: with x64 on, a function
    meant for float32 is another program.
    """

    def __init__(self, side: Side, *, precision: Precision):
        self.side = side
        self.precision = precision
        with self.numerics():
            self.model = built(side, precision)
            self.model.eval()
            if not side.takes_precision:
                _follow_weights(self.model, precision)
            self._graphdef, state, others = _split(self.model)
            with tagged(self.model):
                self._tagged = _split(self.model)[0]
            self._others = nnx.from_flat_state([(p, _concrete(v)) for p, v in nnx.to_flat_state(others)])
        self._variables = {".".join(map(str, path)): (path, var) for path, var in nnx.to_flat_state(state)}
        self._compiled: dict[Any, tuple[Any, Any]] = {}
        self._options: dict[_Options, tuple[_Options, str]] = {}
        self._draw = jit(self._masks)  # what is drawn is the same however it is compiled

    def specs(self) -> dict[str, Any]:
        """Name to an object with shape and dtype, for every parameter and every other floating-point variable."""
        return {name: variable.get_value() for name, (_, variable) in self._variables.items()}

    def trained(self) -> frozenset[str]:
        """Names of the parameters: those an optimizer is given."""
        return frozenset(name for name, (_, var) in self._variables.items() if isinstance(var, nnx.Param))

    def facts(self) -> Facts:
        """Types, tensors and settings of every module."""
        return describe(self.model)

    @property
    def device(self) -> str:
        """Where it runs: `cpu`, `gpu`, `tpu`."""
        return jax.devices()[0].platform

    def merged(self, arrays: Mapping[str, jax.Array], others: Any = None, *, watched: bool = False) -> nnx.Module:
        """The module with these weights; call it under `numerics`. One that is watched knows its submodules' paths."""
        filled = [(path, variable.replace(arrays[name])) for name, (path, variable) in self._variables.items()]
        graphdef = self._tagged if watched else self._graphdef
        # Variables anew, too: a random stream that counts may only be changed inside the transformation it was made in.
        flat = nnx.to_flat_state(self._others if others is None else others)
        others = nnx.from_flat_state(
            [(p, v.replace(v.get_value()) if isinstance(v, nnx.Variable) else v) for p, v in flat]
        )
        return nnx.merge(graphdef, nnx.from_flat_state(filled), others)

    def cast(self, weights: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Weights in the dtypes of this precision; one that is missing keeps the value it was built with."""
        arrays = {}
        for name, (_, variable) in self._variables.items():
            dtype = variable.get_value().dtype if self.side.takes_precision else jnp.dtype(self.precision)
            arrays[name] = jnp.asarray(weights[name] if name in weights else variable.get_value(), dtype)
        return arrays

    def inputs(self, inputs: Inputs) -> dict[str, Any]:
        """Inputs as arrays; floating-point ones in the precision of the run. In order, which jax keeps of no plain
        dict: models are called positionally."""

        def place(array: np.ndarray) -> jax.Array:
            return jnp.asarray(array, self.precision if np.issubdtype(array.dtype, np.floating) else None)

        return OrderedDict(
            (name, substitute(value, lambda x: isinstance(x, np.ndarray), place)) for name, value in inputs.items()
        )

    def trace(
        self,
        inputs: Inputs,
        *,
        weights: Mapping[str, np.ndarray],
        tap: bool = True,
        training: bool = False,
        masks: Masks | None = None,
        handed: Mapping[str, list[np.ndarray]] | None = None,
        valid: np.ndarray | None = None,
        results: Sequence[str] = (),
        seed: int = 0,
        backward: bool = True,
        eager: bool = False,
    ) -> Trace:
        """Runs with these weights, by the names of the port, in evaluation mode unless `training`.

        Untapped, no module is watched: the program that users run; tapping changes what the compiler fuses (P24).
        `masks`: keep masks by site for the model's dropout, which implies training mode. `handed`: for a call of a
        module, by the port's names, the floating-point inputs it gets in place of the model's own, where the shapes are
        equal. `valid`: which leading positions of an output count in the loss of a pair that brings none. `results`:
        the reference's names for what the model returns, if it returns as many arrays under other names. `seed`: of the
        random numbers that the model draws by itself. `backward`: whether there are gradients; compiling them is most
        of the work. `eager`: operation by operation, without jit and without gradients.

        Raises ValueError that names masks without a place.
        """
        options = _Options(
            tap=tap,
            training=training or masks is not None,
            masks=masks is not None,
            backward=backward and not eager,
            eager=eager,
        )
        with self.numerics():
            arrays, trained = self.cast(weights), self.trained()
            given = {
                "trained": {name: array for name, array in arrays.items() if name in trained},
                "fixed": {name: array for name, array in arrays.items() if name not in trained},
                "others": self._seeded(seed),
                "inputs": substitute(self.inputs(inputs), _is_no_array, Static),
                "masks": {site: jnp.asarray(mask, bool) for site, mask in (masks or {}).items()},
                "handed": {name: [jnp.asarray(a) for a in every] for name, every in (handed or {}).items()},
                "valid": None if valid is None else Static(valid.shape),
                "named": Static(tuple(results)),
                "rows": None if valid is None else tuple(jnp.asarray(rows) for rows in np.nonzero(valid)),
            }
            values, narrow, why = self._run_tolerantly(options, given)
            values = jax.tree.map(_to_numpy, values)
        return self._trace_of(values, narrow, why)

    def product(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Of two matrices in its precision, on its device, under the settings that its runs have."""
        with self.numerics():
            return np.asarray(jax.jit(jnp.matmul)(jnp.asarray(left), jnp.asarray(right)))

    def draw_masks(
        self, inputs: Inputs, seed: int, *, weights: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """Keep masks by site, as the model's own dropout draws them: by the side's `draw_dropout`, or by watching its
        Dropout modules."""
        with self.numerics():
            arrays, others, given = self.cast(weights or {}), self._seeded(seed), self.inputs(inputs)
            if self.side.draw_dropout is not None:
                model = self.merged(arrays, others)
                model.train()
                masks = dict(self.side.draw_dropout(model, given, seed))
            else:
                masks = self._draw(
                    {"arrays": arrays, "others": others, "inputs": substitute(given, _is_no_array, Static)}
                )
        return {site: np.asarray(mask, bool) for site, mask in masks.items()}

    def _masks(self, given: Any) -> dict[str, jax.Array]:
        inputs = substitute(given["inputs"], lambda x: isinstance(x, Static), lambda x: x.value)
        model = self.merged(given["arrays"], given["others"], watched=True)
        model.train()
        with drawn(model):
            _, state = nnx.capture(lambda m: self.side.call(m, inputs), nnx.Intermediate)(model)
        return masks_of(model, state)

    def loss(self, output: Any, results: Mapping[str, jax.Array], inputs: Mapping[str, Any]) -> jax.Array:
        """The side's own, or the fixed random projection."""
        return self._loss(output, results, {"inputs": inputs, "valid": None, "rows": None, "named": Static(())})

    def _loss(self, output: Any, results: Mapping[str, jax.Array], given: Mapping[str, Any]) -> jax.Array:
        if self.side.loss is not None:
            loss = self.side.loss(output, given["inputs"])
            return loss[0] / loss[1] if isinstance(loss, tuple) else loss
        if not results:
            raise ValueError(f"expected the port to return floating-point arrays, got {type(output).__name__}")
        terms, named = [], given["named"].value
        names = named if len(named) == len(results) and set(named) != set(results) else tuple(results)
        for name, array in zip(names, results.values(), strict=True):
            counted = array
            if given["valid"] is not None and array.shape[: len(given["rows"])] == given["valid"].value:
                # By selection: an invalid position may be NaN, which times 0 is NaN.
                counted = array[given["rows"]]
            terms.append((counted * jnp.asarray(projection(name, counted.shape), counted.dtype)).sum())
        return jnp.stack(terms).sum()

    def _run_tolerantly(self, options: _Options, given: Any) -> tuple[Any, Any, str]:
        """Runs; where watching inside transformations is what makes it fail, without; else without watching at all.

        Gives the values, what is narrow, and why nothing was watched.
        """
        known = self._options.get(options)
        if known is not None:
            return *self._run(known[0], given), known[1]
        plain = dataclasses.replace(options, tap=False, sow=False)
        attempts = [options, dataclasses.replace(options, sow=False), plain]
        first: Exception | None = None
        for attempt in dict.fromkeys(attempts if options.tap and not options.masks else [options]):
            try:
                computed = self._run(attempt, given)
            except Exception as error:
                first = first or error
                continue
            why = f"watching it makes it fail ({type(first).__name__})" if attempt is plain and options.tap else ""
            self._options[options] = (attempt, why)
            return *computed, why
        assert first is not None
        raise first

    def _run(self, options: _Options, given: Any) -> tuple[Any, Any]:
        """(values, tensor -> place where float32 enters), compiled once for each structure and shape."""
        if options.eager:
            return self._program(options, given), None
        arrays, structure = jax.tree.flatten(given)
        key = (options, structure, tuple((a.shape, a.dtype) for a in arrays))
        if key not in self._compiled:
            users = self.precision == "float32" and not (options.tap or options.training)
            program: Any = jit(lambda given: self._program(options, given), quickly=not users)
            traced = program.trace(given)
            narrow = None
            if self.precision == "float64" and options.tap:
                flat = [Static(place) for place in narrowed(traced.jaxpr)]
                narrow = jax.tree.unflatten(jax.tree.structure(traced.out_info), flat)
            self._compiled[key] = traced.lower().compile(), narrow
        compiled, narrow = self._compiled[key]
        return compiled(given), narrow

    def _program(self, options: _Options, given: Any) -> Any:
        inputs = substitute(given["inputs"], lambda x: isinstance(x, Static), lambda x: x.value)

        def loss_and_more(trained: dict[str, jax.Array]) -> Any:
            watched = options.tap or options.masks
            model = self.merged(trained | given["fixed"], given["others"], watched=watched)
            if options.training:
                model.train()
            recorder = CallRecorder(handed=given["handed"], sow=options.sow)
            with contextlib.ExitStack() as stack:
                if options.masks and self.side.call_with_dropout is None:
                    stack.enter_context(handed_to(model, given["masks"]))
                if options.tap:
                    stack.enter_context(recorder.recording(model))
                output, state = self._called(model, inputs, options, given["masks"])
            arrays, events = recorder.recorded(state)
            named = leaves(output, is_floating)
            results = {OUTPUT + suffix: jnp.asarray(array) for suffix, array in named}
            loss = self._loss(output, results, given | {"inputs": inputs})
            values = {
                "loss": loss,
                # As a list: a dictionary would come back sorted by its keys.
                "results": list(results.values()),
                "names": Static(tuple(results)),
                "calls": arrays,
                "events": events,
                "buffers": self._buffers(model),
            }
            return loss, values

        if not options.backward:
            return loss_and_more(given["trained"])[1] | {"gradients": {}}
        gradients, values = jax.grad(loss_and_more, has_aux=True)(given["trained"])
        return values | {"gradients": gradients}

    def _called(self, model: nnx.Module, inputs: Any, options: _Options, masks: Any) -> tuple[Any, Any]:
        def call(model: nnx.Module) -> Any:
            if options.masks and self.side.call_with_dropout is not None:
                return self.side.call_with_dropout(model, inputs, masks)
            return self.side.call(model, inputs)

        if (options.tap and options.sow) or options.masks:
            output, state = nnx.capture(call, nnx.Intermediate)(model)
            return output, state
        return call(model), nnx.State({})

    def _buffers(self, model: nnx.Module) -> dict[str, Any]:
        return {
            ".".join(map(str, path)): variable.get_value()
            for path, variable in nnx.to_flat_state(nnx.state(model, _is_weight))
            if not isinstance(variable, nnx.Param)
        }

    def _seeded(self, seed: int) -> Any:
        """What is no weight; random streams begin at `seed`."""
        flat = []
        for number, (path, variable) in enumerate(nnx.to_flat_state(self._others)):
            if isinstance(variable, nnx.RngKey):
                key = jax.random.fold_in(jax.random.key(seed), number)
                shape = variable.get_value().shape
                variable = variable.replace(jax.random.split(key, shape) if shape else key)  # noqa: PLW2901
            flat.append((path, variable))
        return nnx.from_flat_state(flat)

    def _trace_of(self, values: Any, narrow: Any, why: str) -> Trace:
        events, lost = values["events"].value
        shapes = {name: tuple(spec.shape) for name, spec in self.specs().items()}
        calls, entangled = calls_of(values["calls"], events, None if narrow is None else narrow["calls"], shapes)
        given, given_ids, outputs = by_name(calls)
        names = values["names"].value
        places = narrow_by_name(calls)
        if narrow is not None:
            of_results = zip((*names, LOSS), (*narrow["results"], narrow["loss"]), strict=True)
            places |= {name: place.value for name, place in of_results if place.value is not None}
        not_captured = {module_of(name): reason for name, reason in (*lost, *entangled.items())}
        if why:
            not_captured |= {path: why for path in self.facts() if path}
        return Trace(
            given=given,
            given_ids=given_ids,
            outputs=outputs,
            results=dict(zip(names, values["results"], strict=True)),
            loss=values["loss"],
            gradients=values["gradients"],
            buffers=values["buffers"],
            summed={},
            not_captured=not_captured,
            narrow=places,
        )

    @contextlib.contextmanager
    def numerics(self) -> Iterator[None]:
        """x64 for the float64 run alone; matrix products in full precision (P6)."""
        with jax.enable_x64(self.precision == "float64"), jax.default_matmul_precision("highest"):
            yield


def _follow_weights(model: nnx.Module, precision: Precision) -> None:
    """Embeddings compute in the dtype that their table had when they were built, unless told, and recurrent cells begin
    with a state in that of their parameters; here, in the one that these have in the run."""
    cells = (nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Embed) and module.dtype == module.embedding.dtype:
            module.dtype = None
        elif isinstance(module, cells) and module.dtype is None:
            module.param_dtype = jnp.dtype(precision)


def _is_weight(path: Any, variable: Any) -> bool:
    """A parameter, or any other variable of floating-point values: running statistics, a table kept as a variable."""
    if not isinstance(variable, nnx.Variable) or isinstance(variable, nnx.Intermediate):
        return False
    value = variable.get_value()
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def _split(model: nnx.Module) -> tuple[Any, Any, Any]:
    """Structure, weights, and what is neither."""
    graphdef, state, *others = nnx.split(model, _is_weight, ...)
    return graphdef, state, others[0]


def _is_no_array(value: Any) -> bool:
    return value is not None and not isinstance(value, (jax.Array, Mapping, tuple, list))


def _concrete(variable: Any) -> Any:
    """A model may be one of shapes only; what is no weight (random streams, counters) gets values here."""
    value = variable.get_value() if isinstance(variable, nnx.Variable) else variable
    if not isinstance(value, jax.ShapeDtypeStruct):
        return variable
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return variable.replace(jax.random.split(jax.random.key(0), value.shape) if value.shape else jax.random.key(0))
    return variable.replace(jnp.zeros(value.shape, value.dtype))


def _to_numpy(array: jax.Array) -> np.ndarray:
    """On the host; bfloat16 as float32, which holds it exactly."""
    return np.asarray(array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array)
