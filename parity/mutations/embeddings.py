"""Faults of embeddings, positions and the projection to logits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parity.mutations.layers import THE_MODEL
from parity.mutations.planting import Kind, Method, class_is, in_method, in_modules

EMBEDDING = class_is("Embedding")
POSITIONS = class_is("Positions")


def _read(factor: Callable[[Any], float]) -> Callable[[Method], Method]:
    def make(original: Method) -> Method:
        return lambda self, ids: original(self, ids) * factor(self)

    return make


def _other_ids(original: Method) -> Method:
    """Ids counted from 1, as of a vocabulary whose first row was dropped."""
    return lambda self, ids: original(self, jnp.maximum(ids - 1, 0))


def _no_vector_for_padding(original: Method) -> Method:
    return lambda self, ids: jnp.where((ids == 0)[..., None], 0.0, original(self, ids))


def _cut_table(original: Method) -> Method:
    """Logits whose gradient does not reach the table they share."""

    def logits(self: Any, x: Any) -> Any:
        table = jax.lax.stop_gradient(self.weight[...]).astype(self.dtype)
        return jnp.einsum("bld,vd->blv", x, table)

    return logits


def _with_config(**fields: Any) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        module.config = module.config.replace(**fields)

    return change


def _one_later(module: Any) -> None:
    module.config = module.config.replace(position_offset=module.config.position_offset + 1)


def _table(make_table: Callable[[np.ndarray, int], np.ndarray]) -> Callable[[Method], Method]:
    """Another sinusoid, of positions from 0."""

    def make(original: Method) -> Method:
        def call(self: Any, length: int) -> Any:
            table = make_table(np.arange(length, dtype=np.float64)[:, None], self.config.d_model)
            return jnp.asarray(table, self.config.dtype)

        return call

    return make


def _interleaved(first: Any, second: Any) -> np.ndarray:
    return np.stack([first, second], axis=-1).reshape(len(first), -1)


def _angles(positions: np.ndarray, d_model: int, base: float = 10_000.0) -> np.ndarray:
    return positions / base ** (np.arange(d_model // 2) * 2 / d_model)


def _cosine_first(positions: np.ndarray, d_model: int) -> np.ndarray:
    angles = _angles(positions, d_model)
    return _interleaved(np.cos(angles), np.sin(angles))


def _small_base(positions: np.ndarray, d_model: int) -> np.ndarray:
    angles = _angles(positions, d_model, base=1_000.0)
    return _interleaved(np.sin(angles), np.cos(angles))


def _rounded(original: Method) -> Method:
    def call(self: Any, length: int) -> Any:
        table = original(self, length)
        return table.astype(jnp.float32).astype(table.dtype)

    return call


def _shifted_rows(original: Method) -> Method:
    return lambda self, length: original(self, length + 1)[1:]


def _embedded(name: str, description: str, make: Callable[[Method], Method], **fields: Any) -> Kind:
    return in_method(name, description, EMBEDDING, make, **fields)


def _positioned(name: str, description: str, make: Callable[[Method], Method], **fields: Any) -> Kind:
    return in_method(name, description, POSITIONS, make, cases=("P12",), **fields)


def _of_projection(path: str, module: Any) -> bool:
    return EMBEDDING(path, module) and path.startswith("tgt")


def _in_projection(place: str) -> tuple[str, ...]:
    """The projection is a method of the embedding, so a fault of it is between modules, or the embedding's."""
    return (place, THE_MODEL)


KINDS: tuple[Kind, ...] = (
    _embedded("embedding not scaled", "no √d_model", _read(lambda m: 1 / m.scale), cases=("P14",)),
    _embedded("embedding scaled by d_model", "not by its root", _read(lambda m: m.scale)),
    _embedded("embedding off by one", "the row before", _other_ids),
    _embedded("no vector for padding", "padding reads 0, not its row", _no_vector_for_padding, cases=("P20",)),
    in_method(
        "logits scaled by √d_model",
        "the embedding's scale in the projection too",
        _of_projection,
        lambda original: lambda self, x: original(self, x) * self.scale,
        method="logits",
        shows=_in_projection,
    ),
    in_method(
        "tied table without the projection's gradient",
        "only the embedding trains it",
        _of_projection,
        _cut_table,
        method="logits",
        cases=("P19",),
        shows=_in_projection,
    ),
    in_modules(
        "sinusoids concatenated",
        "all sines, then all cosines",
        POSITIONS,
        _with_config(positions="concatenated"),
        cases=("P12",),
    ),
    in_modules(
        "sinusoids interleaved",
        "sine and cosine by turns, where the reference has them apart",
        POSITIONS,
        _with_config(positions="interleaved"),
        cases=("P12",),
        base="blockwise",
    ),
    in_modules(
        "sinusoids with half - 1",
        "d_model/2 - 1 in the exponent's divisor",
        POSITIONS,
        _with_config(positions="concatenated_half_minus_1"),
        cases=("P12",),
        base="blockwise",
    ),
    in_modules("positions from 1", "counted one too far", POSITIONS, _one_later, cases=("P12",)),
    _positioned("cosine before sine", "exchanged", _table(_cosine_first)),
    _positioned("sinusoids of base 1,000", "not 10,000", _table(_small_base)),
    _positioned("positions left out", "zeros", lambda original: lambda self, length: original(self, length) * 0),
    _positioned("positions rounded to float32", "in a float64 run too", _rounded),
    _positioned("learned positions one row later", "row 1 first", _shifted_rows, base="pre-norm"),
)
