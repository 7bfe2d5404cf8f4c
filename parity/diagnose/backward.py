"""Where the backward pass alone is at fault: the reference runs again, its gradient cut in one place after another.

With the gradient cut (or scaled) in the right places, the reference's gradients are the port's, all of them: that is
the proof, and the place. Needs the live reference; its forward pass stays what it is.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from parity.diagnose.diagnosis import Diagnosis, distance
from parity.diagnose.gradients import REVERSED, SCALED, STOPPED
from parity.pair import Inputs
from parity.rungs import NotComparedError
from parity.runs import Runs
from parity.trace import Trace, call_of, method_of, module_of, substitute

SECONDS = 30.0
MATCH = 1e-9
"""Relative error of every gradient that failed, once its cut is found: a gradient is a sum with cancellation."""
NOISE = 1e-12
MOST_PLACES = 3
FACTORS = (0.0, 2.0, 0.5, -1.0)


@dataclasses.dataclass(frozen=True)
class Place:
    """The output of a call, or one of its inputs."""

    call: str
    input: int | None

    def __str__(self) -> str:
        if self.input is None:
            return f"what {self.call} returns"
        return f"input {self.input + 1} of {self.call}"


def explain_backward(
    runs: Runs, failed: Sequence[str], got: Mapping[str, np.ndarray], reference: Trace, inputs: Inputs, *, nearest: str
) -> Diagnosis | None:
    """`failed`: the port's parameters whose gradients differ from the reference's; `nearest` to the loss of them."""
    try:
        module = runs.live_reference().module("float64")
    except NotComparedError:
        return None
    search = _Search(runs, module, got, reference, inputs)
    found: list[tuple[Place, float]] = []
    wrong = set(failed)
    while wrong and len(found) < MOST_PLACES:
        nearest = search.nearest(wrong)
        place = search.place_for(nearest, found, wrong)
        if place is None:
            return None
        found.append(place)
        wrong = search.wrong(found)
    # Nothing was wrong from the start where the gradients differ by less than is searched for here.
    return None if wrong or not found else _said([search.widened(i, found) for i in range(len(found))])


class _Search:
    def __init__(self, runs: Runs, module: Any, got: Mapping[str, np.ndarray], reference: Trace, inputs: Inputs):
        self.runs, self.module, self.got, self.inputs = runs, module, got, inputs
        self.expected = runs.gradients_in_port_layout(reference)
        largest = max((float(np.linalg.norm(a.ravel())) for a in self.expected.values()), default=0.0)
        # One that is zero in exact arithmetic is noise on either side, and tells nothing.
        self.telling = {n for n, a in self.expected.items() if float(np.linalg.norm(a.ravel())) > NOISE * largest}
        self.reference = reference
        self.calls = [c for c in dict.fromkeys(call_of(n) for n in reference.outputs) if not method_of(c)]
        self.end = time.process_time() + SECONDS

    def nearest(self, names: set[str]) -> str:
        """To the loss."""
        return max(sorted(names), key=self._rank)

    def place_for(self, nearest: str, before: list[tuple[Place, float]], wrong: set[str]) -> tuple[Place, float] | None:
        """The first place, from this parameter towards the loss, that sets it right and spoils no other.

        If no place sets all of them right, one that sets this one right will do: there may be several.
        """
        partial = None
        for place, factor in self._trials(nearest):
            if time.process_time() > self.end:
                return partial
            left = self.wrong([*before, (place, factor)])
            if not left:
                return place, factor
            if partial is None and nearest not in left and left < wrong:
                partial = (place, factor)
        return partial

    def wrong(self, places: Sequence[tuple[Place, float]]) -> set[str]:
        """Parameters whose gradients are not the port's, with the reference changed in these places."""
        with contextlib.ExitStack() as stack:
            for place, factor in places:
                stack.enter_context(_changed(self.module, place, factor))
            again = self._gradients()
        return {n for n in self.telling if n not in self.got or distance(self.got[n], again[n]) > MATCH}

    def widened(self, number: int, found: Sequence[tuple[Place, float]]) -> tuple[Place, float]:
        """The outermost call that is given, or returns, the very same array there, if that explains it as well."""
        place, factor = found[number]
        array = self._array(place)
        for call in reversed(self.calls):
            if array is None or not module_of(place.call).startswith(module_of(call) + "."):
                continue
            for outer in self._places(call):
                same = self._array(outer)
                if (outer.input is None) != (place.input is None) or same is None or not np.array_equal(array, same):
                    continue
                if not self.wrong([(outer, factor) if i == number else one for i, one in enumerate(found)]):
                    return outer, factor
        return place, factor

    def _places(self, call: str) -> Iterator[Place]:
        yield Place(call, None)
        yield from (Place(call, number) for number in range(len(self._given(call))))

    def _given(self, call: str) -> list[np.ndarray]:
        return [array for name, array in self.reference.given.items() if call_of(name) == call]

    def _array(self, place: Place) -> np.ndarray | None:
        if place.input is None:
            return self.reference.outputs.get(place.call)
        return self._given(place.call)[place.input]

    def _gradients(self) -> dict[str, np.ndarray]:
        """Of the reference as it is hooked; unwatched where that is possible, which takes a tenth of the time."""
        runs = self.runs
        if runs.pair.part or runs.pair.valid is not None:
            return runs.gradients_in_port_layout(runs.run_reference(self.inputs, "float64"))
        gradients = runs.live_reference().gradients(self.inputs, weights=runs.weights)
        return runs.gradients_in_port_layout(dataclasses.replace(self.reference, gradients=gradients))

    def _trials(self, nearest: str) -> Iterator[tuple[Place, float]]:
        first = max(0, self._rank(nearest))
        ratio = self._ratio(nearest)
        for factor in FACTORS if ratio is None else (ratio,):
            yield from ((place, factor) for call in self.calls[first:] for place in self._places(call))

    def _rank(self, name: str) -> int:
        path = name.rpartition(".")[0]
        path = self.runs.derived.modules.get(path, path)
        return next((i for i, call in enumerate(self.calls) if module_of(call) == path), -1)

    def _ratio(self, name: str) -> float | None:
        """The port's gradient over the reference's, where that is one number."""
        if name not in self.got or self.got[name].shape != self.expected[name].shape:
            return None
        a, b = self.expected[name].astype(np.float64).ravel(), self.got[name].astype(np.float64).ravel()
        ratio = float(a @ b / (a @ a))
        return ratio if not b.any() or distance(b, ratio * a) <= MATCH else None


@contextlib.contextmanager
def _changed(module: Any, place: Place, factor: float) -> Iterator[None]:
    """The reference with the gradient multiplied at a place."""
    path, _, number = place.call.partition("#")
    wanted, seen = int(number or 1), [0]
    submodule = module.get_submodule(path)

    def before(called: Any, args: Any, kwargs: Any) -> Any:
        seen[0] += 1
        if seen[0] != wanted or place.input is None:
            return None
        return substitute((args, kwargs), _is_floating, _nth(place.input, factor))

    def after(called: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if seen[0] != wanted or place.input is not None:
            return None
        return substitute(output, _is_floating, _scaled(factor))

    handles = [
        submodule.register_forward_pre_hook(before, with_kwargs=True),
        submodule.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _nth(number: int, factor: float) -> Callable[[Any], Any]:
    """Changes the number-th array that it is asked for, and hands on the others."""
    seen = [-1]
    change = _scaled(factor)

    def replaced(tensor: Any) -> Any:
        seen[0] += 1
        return change(tensor) if seen[0] == number else tensor

    return replaced


def _scaled(factor: float) -> Callable[[Any], Any]:
    """A view of the tensor whose gradient is multiplied on its way back."""

    def scaled(tensor: Any) -> Any:
        if factor == 0.0 or not tensor.requires_grad:
            return tensor.detach()
        view = tensor.view_as(tensor)
        view.register_hook(lambda gradient: gradient * factor)
        return view

    return scaled


def _is_floating(value: Any) -> bool:
    return hasattr(value, "is_floating_point") and bool(value.is_floating_point())


def _said(found: Sequence[tuple[Place, float]]) -> Diagnosis:
    place, factor = found[0]
    places = ", and through ".join(str(one) for one, _ in found)
    module = module_of(place.call)
    if factor == 0.0:
        fix = "remove the stop_gradient there, and compute it inside of what is differentiated"
        sentence = f"In the port no gradient passes through {places}"
        return Diagnosis(kind=STOPPED, module=module, sentence=sentence, fix=fix)
    name = REVERSED if factor == -1.0 else SCALED
    sentence = f"In the port the gradient through {places} is {factor:.6g} times the reference's"
    return Diagnosis(kind=name, module=module, sentence=sentence, fix="remove the factor from the backward pass there")
