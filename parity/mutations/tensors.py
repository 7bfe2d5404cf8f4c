"""Faults of weights on their way, of linear maps, of precision inside one module, and of what is trained."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from parity.mutations.planting import (
    Kind,
    Method,
    at,
    class_is,
    explicit_rules,
    few_bits,
    in_method,
    in_modules,
    is_a,
    modules_of,
    with_port,
    with_rules,
)
from parity.pair import Pair
from parity.weights.mapping import Rule
from parity.weights.rules import Kind as TensorKind
from parity.weights.rules import Leafwise, Op

LINEAR = class_is("Linear")
NORM = class_is("LayerNorm")


class Reshaped(Leafwise):
    """(out, in) read as (in, out), element by element: every shape fits."""

    def _one(self, array: np.ndarray, kind: TensorKind) -> np.ndarray:
        return np.ascontiguousarray(array).reshape(array.shape[::-1])

    def inverse(self) -> Op:
        """The same."""
        return self


class Rolled(Leafwise):
    """Rows moved on by `by`: one head's, or one id's, taken for the next one's."""

    def __init__(self, by: int):
        self.by = by

    def _one(self, array: np.ndarray, kind: TensorKind) -> np.ndarray:
        return np.roll(array, self.by, axis=0)

    def inverse(self) -> Op:
        """Moved back."""
        return Rolled(-self.by)


class HalfWidth(Leafwise):
    """Rounded to float16, and stored as it was."""

    def _one(self, array: np.ndarray, kind: TensorKind) -> np.ndarray:
        return array.astype(np.float16).astype(array.dtype)

    def inverse(self) -> Op:
        """What is lost is lost."""
        return self


def _rules(
    name: str,
    description: str,
    wanted: Callable[[Rule, dict[str, tuple[int, ...]]], bool],
    change: Callable[[Rule], Rule],
    **fields: Any,
) -> Kind:
    """A kind that changes the rule for one tensor; its place is the port's module."""

    def shapes(pair: Pair) -> dict[str, tuple[int, ...]]:
        model = pair.port.module("float32")
        return {".".join(map(str, p)): v.shape for p, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}

    def places(pair: Pair) -> list[str]:
        known = shapes(pair)
        return [rule.targets[0].text for rule in explicit_rules(pair)[0] if wanted(rule, known)]

    def plant(pair: Pair, place: str) -> Pair:
        return with_rules(
            pair, lambda rules: [change(rule) if rule.targets[0].text == place else rule for rule in rules]
        )

    return Kind(name=name, description=description, places=places, plant=plant, **fields)


def _square(rule: Rule, shapes: dict[str, tuple[int, ...]]) -> bool:
    shape = shapes.get(rule.targets[0].text, ())
    return bool(rule.ops) and len(shape) == 2 and shape[0] == shape[1]


def _oblong(rule: Rule, shapes: dict[str, tuple[int, ...]]) -> bool:
    shape = shapes.get(rule.targets[0].text, ())
    return bool(rule.ops) and len(shape) == 2 and shape[0] != shape[1]


def _exchanged(
    name: str, description: str, partner: Callable[[str], str | None], *, both: bool = True, **fields: Any
) -> Kind:
    """Two tensors of the port are each given what is the other's. `partner(name)`: the other one, for the first."""

    def targets(pair: Pair) -> list[str]:
        return [rule.targets[0].text for rule in explicit_rules(pair)[0]]

    def places(pair: Pair) -> list[str]:
        known = targets(pair)
        return [name for name in known if partner(name) in known]

    def plant(pair: Pair, place: str) -> Pair:
        other = partner(place)
        exchanged = {place: other, other: place}

        def change(rule: Rule) -> Rule:
            target = rule.targets[0].text
            return Rule(rule.source, exchanged.get(target) or target, rule.ops)

        return with_rules(pair, lambda rules: [change(rule) for rule in rules])

    return Kind(name=name, description=description, places=places, plant=plant, **fields)


def _swap(old: str, new: str) -> Callable[[str], str | None]:
    return lambda name: name.replace(old, new) if old in name else None


def _missing_rule(pair: Pair, place: str) -> Pair:
    return with_rules(pair, lambda rules: [rule for rule in rules if rule.targets[0].text != place])


def _kernels(pair: Pair) -> list[str]:
    return [rule.targets[0].text for rule in explicit_rules(pair)[0] if rule.targets[0].text.endswith("kernel")]


def _rounded_product(round_off: Callable[[Any], Any]) -> Callable[[Method], Method]:
    """A product of rounded factors, as the hardware has it where precision is not pinned."""

    def make(original: Method) -> Method:
        def call(self: Any, x: Any, *args: Any) -> Any:
            wrong = round_off(x) @ round_off(self.kernel[...].astype(x.dtype))
            return original(self, x, *args) + (wrong - x @ self.kernel[...].astype(x.dtype))

        return call

    return make


def _to(dtype: Any) -> Callable[[Any], Any]:
    return lambda x: x.astype(dtype).astype(x.dtype)


def _bias_times(factor: float) -> Callable[[Method], Method]:
    def make(original: Method) -> Method:
        def call(self: Any, x: Any, *args: Any) -> Any:
            return original(self, x, *args) + (factor - 1.0) * self.bias[...].astype(x.dtype)

        return call

    return make


def _in_float32(original: Method) -> Method:
    """A module that casts to float32 inside, and back."""

    def call(self: Any, x: Any, **kwargs: Any) -> Any:
        return original(self, x.astype(jnp.float32), **kwargs).astype(jnp.float32).astype(x.dtype)

    return call


def _frozen(original: Method) -> Method:
    """A kernel that gets no gradient."""

    def call(self: Any, x: Any, *args: Any) -> Any:
        kernel = jax.lax.stop_gradient(self.kernel[...]).astype(x.dtype)
        return x @ kernel + self.bias[...].astype(x.dtype)

    return call


def _has_bias(path: str, module: Any) -> bool:
    return LINEAR(path, module) and module.bias is not None


def _untrained(pair: Pair, place: str) -> Pair:
    module_path, _, attribute = place.rpartition(".")

    def change(model: Any) -> None:
        module = at(model, module_path)
        setattr(module, attribute, nnx.BatchStat(getattr(module, attribute).get_value()))

    return with_port(pair, change)


def _biases(pair: Pair) -> list[str]:
    found: dict[str, Any] = dict(modules_of(pair))
    return [f"{path}.bias" for path, m in found.items() if is_a(m, "Linear", "LayerNorm") and m.bias is not None]


def _table_as_parameter(module: Any) -> None:
    table = jnp.zeros((module.config.max_len, module.config.d_model), module.config.param_dtype)
    module.table = nnx.data(nnx.Param(table))


def _untied(pair: Pair, place: str) -> Pair:
    def change(model: Any) -> None:
        model.tgt_embedding = type(model.src_embedding)(model.config.tgt_vocab_size, model.config, rngs=nnx.Rngs(0))

    return with_port(pair, change)


KINDS: tuple[Kind, ...] = (
    _rules(
        "square kernel not transposed",
        "(out, in) taken for (in, out)",
        _square,
        lambda rule: Rule(rule.source, rule.target),
        cases=("P3",),
    ),
    _rules(
        "kernel reshaped, not transposed",
        "every shape fits",
        _oblong,
        lambda rule: Rule(rule.source, rule.target, (Reshaped(),)),
        cases=("P3",),
    ),
    _rules(
        "rows of a weight moved on",
        "one row taken for the next",
        lambda rule, shapes: len(shapes.get(rule.targets[0].text, ())) == 2,
        lambda rule: Rule(rule.source, rule.target, (Rolled(1), *rule.ops)),
    ),
    _rules(
        "weight rounded to float16",
        "by a checkpoint in half width",
        lambda rule, shapes: len(shapes.get(rule.targets[0].text, ())) == 2,
        lambda rule: Rule(rule.source, rule.target, (HalfWidth(), *rule.ops)),
    ),
    _exchanged("queries and keys exchanged", "q where k is meant", _swap("q_proj", "k_proj"), cases=("P4",)),
    _exchanged("queries and values exchanged", "q where v is meant", _swap("q_proj", "v_proj"), cases=("P4",)),
    _exchanged("layers exchanged", "two layers, a tensor of each", _swap("layers.0", "layers.1")),
    _exchanged("norms exchanged", "the first norm's where the second's is meant", _swap("norm1", "norm2")),
    _exchanged("scale and bias exchanged", "of a norm", _swap(".scale", ".bias")),
    _exchanged("encoder's for decoder's", "a tensor of each", _swap("encoder", "decoder")),
    Kind(
        name="weight not converted",
        description="no rule takes it, it stays at random values",
        places=_kernels,
        plant=_missing_rule,
        cases=("P22",),
    ),
    in_method("bias left out", "of a linear map", _has_bias, _bias_times(0.0)),
    in_method("bias twice", "as of two biases that should be one", _has_bias, _bias_times(2.0)),
    in_method(
        "product in TF32",
        "10 bits of mantissa",
        LINEAR,
        _rounded_product(lambda x: few_bits(x, mantissa=10)),
        cases=("P6",),
    ),
    in_method("product in bfloat16", "7 bits of mantissa", LINEAR, _rounded_product(_to(jnp.bfloat16)), cases=("P6",)),
    in_method("product in float32", "in a float64 run too", LINEAR, _rounded_product(_to(jnp.float32)), cases=("P6",)),
    in_method("norm in float32", "in a float64 run too", NORM, _in_float32, cases=("P6",)),
    in_method("kernel without gradient", "cut off by mistake", _has_bias, _frozen),
    Kind(
        name="parameter as a buffer",
        description="a bias that no optimizer sees",
        places=_biases,
        plant=_untrained,
        cases=("P26",),
    ),
    in_modules(
        "buffer as a parameter",
        "a position table that is trained",
        class_is("Positions"),
        _table_as_parameter,
        cases=("P26",),
    ),
    Kind(
        name="tied tables untied",
        description="a target embedding of its own",
        places=lambda pair: ["tgt_embedding"],
        plant=_untied,
        cases=("P19",),
        base="blockwise",
    ),
)
