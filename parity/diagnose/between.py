"""What a module's own code does between its submodules: residuals, order of norms, activations, scales, axes.

Both sides' values are expressed by what was at hand (see expression.py); the diagnosis is how the expressions differ.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from parity.diagnose import dropout
from parity.diagnose.activations import FIXES
from parity.diagnose.case import Case
from parity.diagnose.diagnosis import Diagnosis, distance, kind
from parity.diagnose.engine import MATCH
from parity.diagnose.expression import REVERSED, Expression, Finder
from parity.diagnose.norm import MISSING as NORM_MISSING
from parity.diagnose.norm import is_norm
from parity.trace import method_of, module_of

RESIDUAL_MISSING = kind("residual missing", "a residual connection that the port leaves out")
RESIDUAL_ELSEWHERE = kind("residual from another place", "a residual connection that starts somewhere else")
RESIDUAL_EXTRA = kind("residual added", "a residual connection that the reference does not have")
TERM_SIGN = kind("sign", "subtracted where the other side adds")
NORM_ORDER = kind("norm order", "norm before the sublayer on one side, after the residual on the other")
NORM_TWICE = kind("norm applied twice", "a norm applied to what it has returned")
SUBLAYER_ORDER = kind("sublayer order", "the sublayers of a layer in another order")
NORM_EXTRA = kind("norm extra", "a norm that only the port applies")
POSITIONS_MISSING = kind("positions missing", "positions that are not added")
POSITIONS_TWICE = kind("positions added twice", "positions that are added more than once")
EMBEDDING_SCALE = kind("embedding scale missing", "embeddings that are not multiplied by √d")
EMBEDDING_SCALED_TWICE = kind(
    "embedding scale doubled", "embeddings multiplied by √d where they should not be, or twice"
)
DROPOUT_SCALE = kind("dropout scale in evaluation", "values divided (or multiplied) by 1 - rate without dropout")
SCALE = kind("scale between modules", "a constant factor between two modules")
OUTPUT_SCALE = kind("logits scale", "what the model returns multiplied by a constant")
EXCHANGED = kind("weights of another module", "a matrix that belongs to another module, another layer for one")
MEMORY = kind("wrong memory", "a decoder layer that is given something else than the encoder's output")
LAYER_ORDER = kind("layer order", "layers called in another order")
LAYER_SKIPPED = kind("layer skipped", "a layer that the port leaves out")
WRONG_INPUT = kind("wrong input", "a submodule that is given another tensor")
GELU = kind("gelu approximation", "the erf form of gelu on one side, an approximation on the other")
ACTIVATION = kind("activation", "another activation function")
ACTIVATION_MISSING = kind("activation missing", "an activation function that the port leaves out")
ACTIVATION_ADDED = kind("activation added", "an activation function that only the port applies")
ACTIVATION_TWICE = kind("activation applied twice", "an activation function that the port applies twice")
SOFTMAX_AXIS = kind("softmax axis", "a softmax over another axis")
AXES = kind("axes in another order", "elements in another order: axes exchanged, flattened in another order")
SHIFT = kind("shifted by one", "shifted or cut along an axis")
DIRECTION = kind("sequence direction", "a sequence read backwards, or its result not turned back")
POOLING = kind("pooling", "another summary over an axis: mean, sum, largest, first or last")
TERM = kind("term missing", "a sum that lacks one of its terms, or has one too many")
GATE_EXCHANGED = kind("gate and value exchanged", "of two factors the other one goes through the activation")
CONCATENATION = kind("concatenation order", "tensors put side by side in another order")

NOT_CALLED = kind("module not called", "a module that the port has and does not call")

INPUT = "its input"
DROPPED_AT = " dropped out at "


def between(case: Case) -> Diagnosis | None:
    """Of a module with submodules, or a module that is no more than a function."""
    if case.discrete:
        return None
    reference_leaves, port_leaves = leaves(case)
    reference = Finder(case.expected, reference_leaves).first()
    if reference is None:
        return None
    # The reference's own terms first: the port probably has most of them.
    first = {name: port_leaves[name] for name in reference.leaves if name in port_leaves}
    port = Finder(case.got, {**first, **port_leaves}).first()
    if port is None:
        _, everywhere = case.elsewhere()
        port = Finder(case.got, {**first, **port_leaves, **everywhere}).first()
    if port is None or port == reference:
        return None
    return _Difference(case, reference, port).diagnosis()


def leaves(case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What either side had at hand, by names for people; the nearest first."""
    given = {INPUT if i == 0 else f"{INPUT} {i + 1}": array for i, array in enumerate(case.given)}
    prefix = case.module + "." if case.module else ""
    inside = {name.removeprefix(prefix): pair for name, pair in reversed([*case.inside.items()])}
    children = {module_of(name).removeprefix(prefix) + "." for name in (*case.inside, *case.later)}
    own = {
        f"its {name}": array
        for name, array in case.weights.items()
        if not any(name.startswith(child) for child in children) and "." not in name and case.module
    }
    reference = {**{n: r for n, (r, _) in inside.items()}, **given, **own}
    port = {**{n: p for n, (_, p) in inside.items() if p is not None}, **given}
    port |= {name.removeprefix(prefix): array for name, array in case.later.items()} | own
    return _with_dropped(case, reference), _with_dropped(case, port)


def _with_dropped(case: Case, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each also with the masks of dropout, where a mask has the shape."""
    every: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        every[name] = array
        for site, mask in case.masks.items():
            if array.ndim <= mask.ndim and array.shape == mask.shape[mask.ndim - array.ndim :]:
                every[f"{name}{DROPPED_AT}{site}"] = array * mask
                every[f"{name}{DROPPED_AT}{site}, inverted"] = array * ~mask.astype(bool)
    return every


@dataclasses.dataclass(frozen=True)
class _Difference:
    case: Case
    reference: Expression
    port: Expression

    def diagnosis(self) -> Diagnosis:
        name, case = self.kind(), self.case
        sentence = (
            f"{case.where[0].upper()}{case.where[1:]} is {self.port} in the port, {self.reference} in the reference"
        )
        fix = FIXES.get(self.reference.function, "") if self.reference.function != self.port.function else ""
        if not fix:
            child = case.child.removeprefix(case.module + ".") if case.child else ""
            fix = f"give {child} {self.reference}" if child else f"return {self.reference}"
        return Diagnosis(kind=name, module=case.module, sentence=sentence, fix=fix)

    def kind(self) -> str:
        return self._unlike() or self._terms_kind()

    def _unlike(self) -> str:
        """Where the two are no sums of the same form."""
        reference, port = self.reference, self.port
        if self._other_module():
            return EXCHANGED
        if self._returns_its_input():
            return LAYER_SKIPPED
        if "dropped out" in port.detail and "dropped out" not in reference.detail:
            return dropout.OFF
        if reference.function != port.function:
            return function_kind(reference.function, port.function)
        if reference.form != port.form or reference.detail != port.detail:
            return self._form_kind()
        return self._order_kind() if reference.form in ("concatenation", "product") else ""

    def _returns_its_input(self) -> bool:
        """A module with submodules that the port leaves out altogether."""
        plain = self.port == Expression(((1.0, INPUT),))
        return plain and not self.case.child and bool(self.case.inside) and INPUT not in self.reference.leaves

    def _order_kind(self) -> str:
        """Two tensors side by side, or multiplied."""
        names = [[name.partition(f" {REVERSED}")[0] for name in side.leaves] for side in (self.reference, self.port)]
        if self.reference.form == "product":
            return GATE_EXCHANGED if sorted(names[0]) == sorted(names[1]) else WRONG_INPUT
        return DIRECTION if names[0] == names[1] else CONCATENATION

    def _terms_kind(self) -> str:
        reference, port = self.reference, self.port
        lost = [name for name in reference.leaves if name not in port.leaves]
        gained = [name for name in port.leaves if name not in reference.leaves]
        if not lost and not gained:
            return self._scale_kind()
        if any(DROPPED_AT in name for name in (*lost, *gained)):
            return self._dropout_kind(lost, gained)
        if len(lost) == len(gained) == 1 and len(reference.terms) > 1:
            return RESIDUAL_ELSEWHERE
        if len(lost) == len(gained) == 1 and self._is_memory(lost[0]):
            return MEMORY
        return self._norm_kind(lost, gained) or self._residual_kind(lost, gained)

    def _dropout_kind(self, lost: list[str], gained: list[str]) -> str:
        if any(name.endswith("inverted") for name in gained):
            return dropout.INVERTED
        bare = {name.partition(DROPPED_AT)[0] for name in lost}
        return dropout.OFF if set(gained) <= bare else dropout.PLACE

    def _residual_kind(self, lost: list[str], gained: list[str]) -> str:
        if lost and not gained:
            return self._without(lost)
        return self._with(gained) if gained and not lost else self._replaced(lost, gained)

    def _other_module(self) -> bool:
        """The same method of another module: a table that should not be this one's."""
        one, other = self.reference.leaves, self.port.leaves
        if len(one) != 1 or len(other) != 1 or one == other:
            return False
        return bool(method_of(one[0])) and method_of(one[0]) == method_of(other[0])

    def _form_kind(self) -> str:
        if "zeros" in (self.reference.form, self.port.form):
            return TERM
        details = f"{self.reference.detail} {self.port.detail}"
        if REVERSED in details:
            return DIRECTION
        if re.search("shift|\\[", details):
            return SHIFT
        if re.search("averaged|summed|largest|first|last", details):
            return POOLING
        return AXES if "ax" in details or "shape" in details else WRONG_INPUT

    def _norm_kind(self, lost: list[str], gained: list[str]) -> str:
        norm_lost, norm_gained = ([n for n in names if self._is_norm(n)] for names in (lost, gained))
        if {_bare(n) for n in norm_lost} & {_bare(n) for n in norm_gained}:
            return NORM_TWICE
        if norm_gained and not norm_lost:
            if not self._norm_of_input(norm_gained[0]):
                return SUBLAYER_ORDER
            # Called on both sides, but elsewhere: then it has moved.
            moved = any(n in case_later(self.case) for n in norm_gained) or lost
            return NORM_ORDER if moved else NORM_EXTRA
        if norm_lost and not norm_gained:
            return NORM_ORDER if len(self.port.leaves) > 1 else NORM_MISSING
        return NORM_ORDER if self._norm_is_given_otherwise(lost, gained) else ""

    def _norm_is_given_otherwise(self, lost: list[str], gained: list[str]) -> bool:
        """Where the value goes into a norm: with or without the residual that is added before or after it."""
        if not self.case.child or not is_norm(self.case.child, self.case.child_type):
            return False
        if lost and not gained:
            return self._added_later(lost[0])
        return self.reference.leaves == (INPUT,) and len(self.port.leaves) > 1 and not lost

    def _norm_of_input(self, leaf: str) -> bool:
        """Whether the norm is given what the reference hands on without it, and not another sublayer's output."""
        reference_leaves, _ = leaves(self.case)
        prefix = self.case.module + "." if self.case.module else ""
        given = self.case.afterwards.get(prefix + leaf)
        handed_on = [reference_leaves[n] for n in self.reference.leaves if n in reference_leaves]
        if given is None or not handed_on or self.reference.form != "sum" or len(handed_on) != 1:
            return True
        return given.shape == handed_on[0].shape and distance(given, handed_on[0]) <= MATCH

    def _added_later(self, leaf: str) -> bool:
        """Whether the port adds what it did not give to the norm to what the norm returned."""
        _, port_leaves = leaves(self.case)
        normed, term = self.case.child_returned, port_leaves.get(leaf)
        if normed is None or term is None or normed.shape != term.shape:
            return False
        return any(distance(array, normed + term) <= MATCH for array in self.case.afterwards.values())

    def _is_norm(self, leaf: str) -> bool:
        prefix = self.case.module + "." if self.case.module else ""
        path = module_of(prefix + leaf)
        return path in self.case.inside_types and is_norm(path, self.case.inside_types[path])

    def _is_positions(self, leaf: str) -> bool:
        reference_leaves, _ = leaves(self.case)
        array = reference_leaves.get(leaf)
        flat = array is not None and array.ndim < self.case.expected.ndim
        return "pos" in leaf.lower().rpartition(".")[2] or flat

    def _without(self, lost: list[str]) -> str:
        if any(self._is_positions(name) for name in lost):
            return POSITIONS_MISSING
        return RESIDUAL_MISSING if self._has_sublayer() else TERM

    def _with(self, gained: list[str]) -> str:
        if any(self._is_positions(name) for name in gained):
            return POSITIONS_TWICE
        return RESIDUAL_EXTRA if self._has_sublayer() or INPUT in gained else TERM

    def _has_sublayer(self) -> bool:
        return any(not name.startswith("its ") for name in (*self.reference.leaves, *self.port.leaves))

    def _replaced(self, lost: list[str], gained: list[str]) -> str:
        if len(self.reference.terms) > 1:
            return RESIDUAL_ELSEWHERE
        old, new = lost[0], gained[0]
        indices = [re.search(r"(\d+)(?!.*\d)", _bare(name)) for name in (old, new)]
        last = re.search(r"(\d+)(?!.*\d)", self.case.child)
        if last and not self.case.module:
            last = None
        if all(indices) or (last and (any(indices) or INPUT in (old, new))):
            return self._layers_kind(old, new)
        if self._is_memory(old):
            return MEMORY
        return WRONG_INPUT

    def _layers_kind(self, old: str, new: str) -> str:
        """The next of a stack of layers is given another one's output."""
        if self._is_memory(old):
            return MEMORY
        prefix = self.case.module + "." if self.case.module else ""
        later = {module_of(name).removeprefix(prefix) for name in self.case.later}
        return LAYER_ORDER if _bare(new) in later else LAYER_SKIPPED

    def _is_memory(self, leaf: str) -> bool:
        """The second input of a module or, in the model, what an encoder returns."""
        second = leaf.startswith(INPUT + " ")
        return second or "encoder" in leaf.rpartition(".")[2].lower() or "memory" in leaf.lower()

    def _scale_kind(self) -> str:
        changed = [
            (name, self.port.coefficient(name) / self.reference.coefficient(name))
            for name in self.reference.leaves
            if abs(self.port.coefficient(name) - self.reference.coefficient(name)) > 1e-9
        ]
        if not changed:
            return WRONG_INPUT
        name, ratio = changed[0]
        if DROPPED_AT in name:
            return dropout.SCALE if abs(self.port.coefficient(name)) == 1.0 else dropout.RATE
        if self._is_positions(name):
            return POSITIONS_TWICE if abs(ratio - 2.0) < 1e-9 else SCALE
        if not self.case.module and not self.case.child:
            return OUTPUT_SCALE
        return scale_kind(ratio, self.case.expected.shape[-1] if self.case.expected.ndim else 1)


def scale_kind(ratio: float, width: int) -> str:
    """What a factor of the port over the reference most likely is."""
    root = math.sqrt(width)
    for value, name in ((1 / root, EMBEDDING_SCALE), (root, EMBEDDING_SCALED_TWICE), (-1.0, TERM_SIGN)):
        if abs(ratio / value - 1.0) < 1e-9:
            return name
    for rate in dropout.LIKELY_RATES:
        if min(abs(ratio * (1 - rate) - 1.0), abs(ratio / (1 - rate) - 1.0)) < 1e-9:
            return DROPOUT_SCALE
    return SCALE


def function_kind(reference: str, port: str) -> str:
    """Of two functions of one tensor; an empty name is the identity."""
    if "softmax" in reference and "softmax" in port:
        return SOFTMAX_AXIS
    if "gelu" in reference and "gelu" in port and " of " not in port:
        return GELU
    if not port:
        return ACTIVATION_MISSING
    if not reference:
        return ACTIVATION_ADDED
    return ACTIVATION_TWICE if port == f"{reference} of {reference}" else ACTIVATION


def case_later(case: Case) -> Mapping[str, object]:
    """Names, relative to the module, of what the port returned from submodules that come later in the reference."""
    prefix = case.module + "." if case.module else ""
    return {name.removeprefix(prefix): None for name in case.later}


def _bare(leaf: str) -> str:
    return module_of(leaf)


def not_called(module: str, type_name: str) -> Diagnosis:
    """Of a module that the reference calls and the port does not."""
    last = module.rpartition(".")[2]
    if is_norm(module, type_name):
        name = NORM_MISSING
    elif "pos" in last.lower() or "position" in type_name.lower():
        name = POSITIONS_MISSING
    elif last.isdigit():
        name = LAYER_SKIPPED
    else:
        name = NOT_CALLED
    return Diagnosis(kind=name, module=module, sentence=f"The port does not call {module}", fix=f"call {module} there")
