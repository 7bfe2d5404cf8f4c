"""Reads off a float64 program of jax where float32, or less, enters it, and which of its results depend on that."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parity.capture_flax_calls import SCOPE

EXACT = object()
"""State of a value that is made of whole numbers and literals alone: a mask, a count, a position."""
TABLE = object()
"""State of a table that the program holds in a narrower type, until it is used."""
State = Any
"""Of a value: None (float64, or a weight as it was given), EXACT, TABLE, or the place where float32 entered it."""

_MOVES = frozenset(
    name
    for names in (
        ("broadcast_in_dim", "reshape", "transpose", "slice", "dynamic_slice", "dynamic_update_slice", "concatenate"),
        ("gather", "select_n", "squeeze", "pad", "rev", "copy", "copy_p", "stop_gradient", "iota", "neg", "abs"),
        ("reduce_max", "reduce_min", "max", "min", "sign", "floor", "ceil", "round", "sort", "bitcast_convert_type"),
        ("expand_dims", "split", "optimization_barrier", "clamp", "argmax", "argmin", "reduce_precision", "copysign"),
        ("convert_element_type", "scatter", "cumsum", "cumprod", "sharding_constraint", "device_put", "name"),
    )
    for name in names
)
"""Operations that compute nothing: what comes out is as exact as what went in."""
_WHOLE = frozenset({"add", "sub", "mul", "integer_pow", "reduce_sum", "dot_general", "add_any", "reduce_prod"})
"""Exact on whole numbers."""


def narrowed(program: Any) -> list[str | None]:
    """For every output of a ClosedJaxpr, the place where a narrower type entered it: `module at file:line`, or None."""
    states = _Flow("").run(program, [None] * len(program.jaxpr.invars))
    return [state if isinstance(state, str) else "" if state is TABLE else None for state in states]


class _Flow:
    """One pass over a program, its inner programs included."""

    def __init__(self, scope: str):
        self.scope = scope
        """The module in which the program is called."""

    def run(self, program: Any, states: Sequence[State]) -> list[State]:
        """States of the outputs, given those of the inputs. `program` may be closed or open."""
        jaxpr = getattr(program, "jaxpr", program)
        known: dict[Any, State] = dict(zip(jaxpr.invars, states, strict=True))
        for variable, value in zip(jaxpr.constvars, getattr(program, "consts", ()), strict=False):
            known[variable] = _of_constant(value)
        for eqn in jaxpr.eqns:
            given = [self._of(known, atom) for atom in eqn.invars]
            known |= zip(eqn.outvars, self._outputs(eqn, given), strict=True)
        return [self._of(known, atom) for atom in jaxpr.outvars]

    def _of(self, known: dict[Any, State], atom: Any) -> State:
        return _of_constant(atom.val) if hasattr(atom, "val") else known.get(atom)

    def _outputs(self, eqn: Any, given: list[State]) -> list[State]:
        inner = _Flow(_scope(eqn) or self.scope)
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            fixed, carried = params["num_consts"], params["num_carry"]
            return inner.loop(params["jaxpr"], given[:fixed], given[fixed : fixed + carried], given[fixed + carried :])
        if name == "while":
            skip, fixed = params["cond_nconsts"], params["body_nconsts"]
            return inner.loop(params["body_jaxpr"], given[skip : skip + fixed], given[skip + fixed :], [])
        if name == "cond":
            branches = [inner.run(branch, given[1:]) for branch in params["branches"]]
            return [_join(states) for states in zip(*branches, strict=True)]
        program = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
        jaxpr = getattr(program, "jaxpr", program)
        if jaxpr is not None and hasattr(jaxpr, "eqns"):
            if len(jaxpr.invars) == len(given) and len(jaxpr.outvars) == len(eqn.outvars):
                return inner.run(program, given)
            return [_join([*given, *inner.run(program, [_join(given)] * len(jaxpr.invars))])] * len(eqn.outvars)
        return [inner.computed(eqn, variable.aval, given) for variable in eqn.outvars]

    def loop(self, body: Any, fixed: list[State], carried: list[State], each: list[State]) -> list[State]:
        """Until nothing changes: what is carried may become narrow in a later step."""
        while True:
            outputs = self.run(body, [*fixed, *carried, *each])
            merged = [_join(pair) for pair in zip(carried, outputs[: len(carried)], strict=True)]
            if merged == carried:
                return [*merged, *outputs[len(carried) :]]
            carried = merged

    def computed(self, eqn: Any, aval: Any, given: list[State]) -> State:
        """State of one output of one operation."""
        dtype = getattr(aval, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            return EXACT
        narrow = next((state for state in given if isinstance(state, str)), None)
        if narrow is not None:
            return narrow
        name = eqn.primitive.name
        moves = name in _MOVES
        if any(state is TABLE for state in given):
            return TABLE if moves and dtype != jnp.float64 else _place(eqn, self.scope)
        if all(state is EXACT for state in given) and (moves or name in _WHOLE):
            return EXACT
        cast_down = any(getattr(getattr(atom, "aval", None), "dtype", None) == jnp.float64 for atom in eqn.invars)
        # What only moves float32 values moves weights, as they were given.
        exact = dtype == jnp.float64 or (moves and not cast_down)
        return None if exact else _place(eqn, self.scope)


def _join(states: Iterable[State]) -> State:
    """Narrow if any is, exact if all are."""
    every = list(states)
    narrow = next((state for state in every if isinstance(state, str)), None)
    if narrow is not None:
        return narrow
    if any(state is TABLE for state in every):
        return TABLE
    return EXACT if every and all(state is EXACT for state in every) else None


def _of_constant(value: Any) -> State:
    """A table that the program holds in float32 was rounded, unless its numbers are whole or of at most 8 bits."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return EXACT
    if isinstance(value, jax.core.Tracer):
        return None
    wide = np.asarray(value, np.float64)
    if wide.ndim == 0:
        return EXACT
    with np.errstate(over="ignore"):
        few_bits = wide == wide.astype(jnp.bfloat16).astype(np.float64)
    if bool((few_bits | (wide == np.round(wide)) | ~np.isfinite(wide)).all()):
        return EXACT
    return None if dtype == jnp.float64 else TABLE


def _place(eqn: Any, scope: str) -> str:
    """The module, and the line outside of jax, flax and the harness."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        path = Path(frame.file_name)
        if not {"jax", "flax", "jaxtyping", "beartype"} & set(path.parts) and not path.name.startswith(
            ("<", "capture_")
        ):
            return f"{scope} at {path.name}:{frame.line_num}"
    return scope


def _scope(eqn: Any) -> str:
    found = re.findall(re.escape(SCOPE) + r"([^/()]*)", str(eqn.source_info.name_stack))
    return found[-1] if found else ""
