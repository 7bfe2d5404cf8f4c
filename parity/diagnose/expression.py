"""Finds how a tensor was made from others: a sum with few terms, a function of one, a product, another shape.

Nothing is known of the code; what is found fits to ten digits, and the simplest is taken.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from parity.diagnose.activations import FUNCTIONS, softmax
from parity.diagnose.diagnosis import distance
from parity.diagnose.engine import FLOAT32_MATCH, MATCH

Leaves = Mapping[str, np.ndarray]

SAMPLE = 300
"""Elements that a guess is first tried on."""
REVERSED = "reversed along axis"
MOST_LEAVES = 26
"""Tensors near at hand that sums of three are made of."""


@dataclasses.dataclass(frozen=True)
class Expression:
    """function(sum of coefficient · leaf), or another form."""

    terms: tuple[tuple[float, str], ...]
    function: str = ""
    """Of the sum; empty for the sum itself."""
    form: str = "sum"
    """`sum`, `product`, `concatenation`, `axes`, or `zeros`."""
    detail: str = ""
    """Of an unusual form: which axes, which shift."""

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names, in the order of the terms."""
        return tuple(name for _, name in self.terms)

    def coefficient(self, leaf: str) -> float:
        """0 where the leaf is no term."""
        return dict((name, c) for c, name in self.terms).get(leaf, 0.0)

    def __str__(self) -> str:
        if self.form == "zeros":
            return "zeros"
        parts = [name if c == 1.0 else f"-{name}" if c == -1.0 else f"{c:.6g} · {name}" for c, name in self.terms]
        joiner = {"product": " · ", "concatenation": " beside "}.get(self.form, " + ")
        inner = joiner.join(parts).replace("+ -", "- ")
        inner = f"{self.function}({inner})" if self.function and self.form != "product" else inner
        if self.form == "product" and self.function:
            inner = f"{self.function}({parts[0]}) · {parts[1]}"
        return f"{inner} {self.detail}".strip()


class Finder:
    """Looks for expressions of one side's tensors that give `target`. Leaves stand in the order of preference."""

    def __init__(self, target: np.ndarray, leaves: Leaves):
        self.target = target.astype(np.float64)
        self.match = FLOAT32_MATCH if target.dtype.itemsize < 8 else MATCH
        self.raw = {name: array.astype(np.float64) for name, array in leaves.items() if np.isfinite(array).all()}
        self.fitting = {n: a for n, b in self.raw.items() if (a := _broadcast(b, target.shape)) is not None}
        rng = np.random.default_rng(0)
        size = self.target.size
        # All of a small tensor; of a large one some elements, by which most guesses are refused.
        self.sample = np.arange(size) if size <= SAMPLE else rng.choice(size, SAMPLE, replace=False)

    def first(self) -> Expression | None:
        """The simplest."""
        with np.errstate(all="ignore"):
            return next(self.all(), None)

    def all(self) -> Iterator[Expression]:
        """From simple to contrived; nothing for a target that is not finite."""
        if not self.target.size or not np.isfinite(self.target).all():
            return
        if not self.target.any():
            yield Expression((), form="zeros")
            return
        yield from self._sums(unit=True)
        yield from self._functions()
        yield from self._axes()
        yield from self._sums(unit=False)
        yield from self._functions_of_sums()
        yield from self._dropped()
        yield from self._products()
        yield from self._concatenations()

    def fits(self, guess: np.ndarray | None) -> bool:
        """Whether a whole tensor is the target."""
        return guess is not None and distance(guess, self.target) <= self.match

    def _rows(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        names = list(self.fitting)[:MOST_LEAVES]
        flat = np.stack([self.fitting[n].ravel()[self.sample] for n in names]) if names else np.zeros((0, 0))
        return names, flat, self.target.ravel()[self.sample]

    def _sums(self, *, unit: bool) -> Iterator[Expression]:
        for name, array in self.fitting.items():
            if unit and self.fits(array):
                yield Expression(((1.0, name),))
        names, rows, target = self._rows()
        scale = float(np.linalg.norm(target)) or 1.0
        for count in (1, 2, 3):
            for chosen in itertools.combinations(range(len(names)), count):
                if unit and count == 1:
                    continue
                sample = rows[list(chosen)]
                coefficients = np.ones(count) if unit else _least_squares(sample, target)
                if coefficients is None or np.linalg.norm(coefficients @ sample - target) > 10 * self.match * scale:
                    continue
                if (np.abs(coefficients) < 1e-6).any():
                    continue
                nice = np.array([_nice(c) for c in coefficients])
                used = [self.fitting[names[i]] for i in chosen]
                for guess in (nice, coefficients):
                    if self.fits(sum((c * a for c, a in zip(guess, used, strict=True)), np.zeros(1))):
                        yield Expression(tuple((float(c), names[i]) for c, i in zip(guess, chosen, strict=True)))
                        break

    def _functions(self) -> Iterator[Expression]:
        for name, array in self.fitting.items():
            for function, apply in FUNCTIONS.items():
                if self._quick(apply(array.ravel()[self.sample])) and self.fits(apply(array)):
                    yield Expression(((1.0, name),), function=function)
        for name, array in self.fitting.items():
            for function, apply in FUNCTIONS.items():
                if self._quick(apply(apply(array.ravel()[self.sample]))) and self.fits(apply(apply(array))):
                    yield Expression(((1.0, name),), function=f"{function} of {function}")
            for axis in range(array.ndim):
                if self.fits(softmax(array, axis)):
                    yield Expression(((1.0, name),), function=f"softmax over axis {axis}")

    def _functions_of_sums(self) -> Iterator[Expression]:
        names = list(self.fitting)[:MOST_LEAVES]
        for first, second in itertools.combinations(names, 2):
            total = (self.fitting[first] + self.fitting[second]).ravel()[self.sample]
            for function, apply in FUNCTIONS.items():
                if self._quick(apply(total)) and self.fits(apply(self.fitting[first] + self.fitting[second])):
                    yield Expression(((1.0, first), (1.0, second)), function=function)

    def _products(self) -> Iterator[Expression]:
        names = list(self.fitting)[:MOST_LEAVES]
        functions: dict[str, Any] = {"": lambda x: x, **FUNCTIONS}
        for first, second in itertools.permutations(names, 2):
            a, b = (self.fitting[n].ravel()[self.sample] for n in (first, second))
            for function, apply in functions.items():
                if self._quick(apply(a) * b) and self.fits(apply(self.fitting[first]) * self.fitting[second]):
                    yield Expression(((1.0, first), (1.0, second)), function=function, form="product")

    def _dropped(self) -> Iterator[Expression]:
        """A tensor of which elements are left out and the others scaled, alone or added to another."""
        names = list(self.fitting)[:MOST_LEAVES]
        for name, other in [*((n, "") for n in names), *itertools.permutations(names, 2)]:
            part = self.target - (self.fitting[other] if other else 0.0)
            inner = self.fitting[name]
            kept = np.abs(part) > 1e-9 * np.abs(inner).max()
            share = kept.mean()
            if not 0.3 < share < 0.99 or not (np.abs(inner) > 0).all():
                continue
            ratio = part[kept] / inner[kept]
            if ratio[0] >= 1.0 and np.ptp(ratio) < 1e-9 * ratio[0]:
                terms = ((float(ratio[0]), name), *(((1.0, other),) if other else ()))
                yield Expression(terms, detail=f"with {1 - share:.0%} of {name} dropped out")

    def _axes(self) -> Iterator[Expression]:
        """One leaf whose elements stand elsewhere: axes exchanged, reversed, shifted, averaged, one of its halves."""
        for name, array in self.raw.items():
            for detail, moved in _rearranged(array, self.target.shape):
                if self.fits(moved):
                    yield Expression(((1.0, name),), form="axes", detail=detail)

    def _concatenations(self) -> Iterator[Expression]:
        """Two of them side by side, each as it is or read backwards along an axis."""
        parts = {name: array for name, array in [*self.raw.items()][:MOST_LEAVES] if array.ndim == self.target.ndim}
        turned = {
            f"{name} {REVERSED} {axis}": np.flip(array, axis)
            for name, array in parts.items()
            for axis in range(1, array.ndim - 1)
        }
        parts |= turned
        for first, second in itertools.permutations(parts, 2):
            a, b = parts[first], parts[second]
            if a.size + b.size != self.target.size:
                continue
            for axis in range(a.ndim):
                rest = [x.shape[:axis] + x.shape[axis + 1 :] for x in (a, b)]
                if rest[0] == rest[1] and self.fits(np.concatenate([a, b], axis=axis)):
                    yield Expression(((1.0, first), (1.0, second)), form="concatenation", detail=f"along axis {axis}")

    def _quick(self, guess: np.ndarray) -> bool:
        target = self.target.ravel()[self.sample]
        scale = float(np.linalg.norm(target)) or 1.0
        return bool(np.linalg.norm(guess - target) <= 10 * self.match * scale)


def _rearranged(array: np.ndarray, shape: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """(in words, the elements of a tensor in other places, or summed up)."""
    if array.size == int(np.prod(shape)) and array.ndim <= 5:
        for order in itertools.permutations(range(array.ndim)):
            usual = order == tuple(range(array.ndim))
            if not usual or array.shape != shape:
                words = "in another shape" if usual else f"with its axes in the order {order}"
                yield words, array.transpose(order).reshape(shape)
    if array.shape == shape:
        for axis in range(array.ndim):
            yield f"{REVERSED} {axis}", np.flip(array, axis)
            for shift in (1, -1):
                yield f"shifted by {shift} along axis {axis}", np.roll(array, shift, axis)
                yield f"shifted by {shift} along axis {axis}, zeros coming in", _shifted(array, shift, axis)
    yield from _pooled(array, shape)
    if array.ndim == len(shape):
        yield from _cut(array, shape)


def _pooled(array: np.ndarray, shape: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """One or two axes fewer."""
    two = [(1, 2), (2, 3)] if array.ndim >= 4 else []
    for axes in [*((axis,) for axis in range(array.ndim)), *two]:
        if tuple(n for axis, n in enumerate(array.shape) if axis not in axes) != shape:
            continue
        words = f"over axis {axes[0]}" if len(axes) == 1 else f"over axes {axes}"
        yield f"averaged {words}", array.mean(axis=axes)
        yield f"summed {words}", array.sum(axis=axes)
        yield f"largest {words}", array.max(axis=axes)
        if len(axes) == 1:
            yield f"first {words}", array.take(0, axis=axes[0])
            yield f"last {words}", array.take(-1, axis=axes[0])


def _cut(array: np.ndarray, shape: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """Part of one axis."""
    for axis, width in enumerate(shape):
        if array.shape[:axis] + array.shape[axis + 1 :] == shape[:axis] + shape[axis + 1 :]:
            for start in range(array.shape[axis] - width + 1) if width < array.shape[axis] else ():
                words = f"[{start}:{start + width}] along axis {axis}"
                yield words, array.take(range(start, start + width), axis=axis)


def _shifted(array: np.ndarray, shift: int, axis: int) -> np.ndarray:
    moved = np.roll(array, shift, axis)
    edge: list[Any] = [slice(None)] * array.ndim
    edge[axis] = 0 if shift > 0 else -1
    moved[tuple(edge)] = 0.0
    return moved


def _broadcast(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        return None


def _least_squares(rows: np.ndarray, target: np.ndarray) -> np.ndarray | None:
    """Coefficients of the rows; None if there are as many as elements, or the rows depend on each other."""
    if rows.shape[1] < 4 * rows.shape[0]:
        return None
    gram = rows @ rows.T
    if np.linalg.cond(gram) > 1e10:
        return None
    return np.asarray(np.linalg.lstsq(rows.T, target, rcond=None)[0])


def _nice(coefficient: float) -> float:
    nearest = round(coefficient * 24.0) / 24.0
    return nearest if abs(nearest - coefficient) < 1e-8 * max(1.0, abs(coefficient)) else coefficient
