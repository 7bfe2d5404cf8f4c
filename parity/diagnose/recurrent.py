"""LSTM, GRU and plain recurrent layers over a whole sequence."""

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from parity.diagnose.case import Case
from parity.diagnose.diagnosis import Diagnosis, kind
from parity.diagnose.engine import Factor, Option, explain
from parity.diagnose.linear import BIAS, BIAS_TWICE

ORDER = kind("gate order", "the blocks of a recurrent kernel in another order of gates")
RESET = kind("GRU reset placement", "the reset gate before or after the recurrent product")
UPDATE = kind("GRU update gate", "z · h + (1 - z) · n on one side, (1 - z) · h + z · n on the other")
FORGET = kind("forget bias", "1 added to the forget gate")
GATE = kind("gate activation", "another function of a gate or of the cell")
DIRECTION = kind("sequence direction", "a sequence read backwards, or its result not turned back")
CARRY = kind("recurrent state not carried", "every step starts from zeros")
RETURNED = kind("recurrent state returned", "the cell's state returned for the hidden one")
TIME = kind("time axis", "the batch taken for the time")

LETTERS = {4: "ifgo", 3: "rzn", 1: "n"}
"""Gates in torch's order."""
FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tanh": np.tanh,
    "sigmoid": lambda x: np.exp(-np.logaddexp(0.0, -x)),
    "relu": lambda x: np.maximum(x, 0.0),
    "identity": lambda x: x,
}


def recurrent(case: Case) -> Diagnosis | None:
    """A module with a kernel for the input and one for the state, given a sequence, or a step and a state."""
    if case.child or not case.given or case.expected.ndim not in (2, 3) or case.expected.ndim != case.x.ndim:
        return None
    cell = _Cell.of(case)
    if cell is None:
        return None
    count = len(cell.of_input)
    letters = LETTERS[count]
    orders = ["".join(p) for p in itertools.permutations(letters)]
    words = tuple(Option(o, ", ".join(o)) for o in orders)
    factors = [
        Factor("order", ORDER, words, what="order of gates", also_right=len(orders), fix="order the gates {reference}"),
        Factor(
            "bias",
            lambda r, p: BIAS_TWICE if "twice" in (r, p) else BIAS,
            tuple(Option(v, w) for v, w in _BIASES),
            what="bias",
            fix="the bias must be {reference}",
        ),
        Factor(
            "inner",
            GATE,
            tuple(Option(n, n) for n in FUNCTIONS),
            what="function of the new value",
            also_right=3,
            fix="use {reference}",
        ),
        Factor(
            "outer", GATE, tuple(Option(n, n) for n in FUNCTIONS), what="function of the cell", fix="use {reference}"
        ),
        Factor(
            "direction",
            DIRECTION,
            (
                Option("on", "forwards"),
                Option("back", "backwards"),
                Option("back, turned", "backwards, and turned back"),
            ),
            what="reading",
            also_right=2,
            fix="read the sequence {reference}",
        ),
        Factor(
            "carry",
            CARRY,
            (Option("yes", "carried from step to step"), Option("no", "zero in every step")),
            what="state",
            fix="carry the state",
        ),
        Factor(
            "time",
            TIME,
            (Option(1, "axis 1"), Option(0, "axis 0")),
            what="time",
            also_right=1,
            fix="run over {reference}",
        ),
    ]
    if count == 4:
        factors += [
            Factor(
                "forget",
                FORGET,
                (Option(0.0, "0"), Option(1.0, "1"), Option(-1.0, "-1")),
                what="constant of the forget gate",
                also_right=2,
                fix="add {reference} to the forget gate",
            ),
            Factor(
                "returned",
                RETURNED,
                (Option("h", "the hidden state"), Option("c", "the cell's")),
                what="state",
                free=True,
                fix="return {reference}",
            ),
        ]
    if count == 3:
        factors += [
            Factor(
                "reset",
                RESET,
                (Option("after", "after the recurrent product"), Option("before", "before it")),
                what="reset gate",
                also_right=1,
                fix="apply the reset gate {reference}",
            ),
            Factor(
                "update",
                UPDATE,
                (Option("z h", "z · h + (1 - z) · n"), Option("z n", "(1 - z) · h + z · n")),
                what="new state",
                also_right=1,
                fix="compute {reference}",
            ),
        ]
    found = explain(cell.run, factors, expected=case.expected, got=case.got, unusual=1)
    return None if found is None else found.diagnosis(case.module)


_BIASES = (
    ("both", "the input's and the state's"),
    ("input", "the input's alone"),
    ("state", "the state's alone"),
    ("none", "left out"),
    ("twice", "added twice"),
)


class _Cell:
    def __init__(self, case: Case, of_input: list[np.ndarray], of_state: list[np.ndarray]):
        self.of_input, self.of_state = of_input, of_state
        self.width, self.count = of_state[0].shape[0], len(of_state)
        self.biases = {side: self._bias(case, side) for side in "ih"}
        arrays = [a.astype(np.float64) for a in case.given]
        self.steps = case.expected.ndim == 3
        if self.steps:
            self.x, self.state = arrays[0], [a[0] if a.ndim == 3 else a for a in arrays[1:]]
        else:
            first = next((i for i, a in enumerate(arrays) if a.shape[-1] == of_input[0].shape[0]), 0)
            self.x, self.state = arrays[first][:, None], arrays[:first] + arrays[first + 1 :]

    @staticmethod
    def of(case: Case) -> "_Cell | None":
        width = case.expected.shape[-1]
        kernels = {n: a for n, a in case.weights.items() if a.ndim == 2}
        widths = dict.fromkeys(array.shape[-1] for array in case.given)
        for features in widths:
            inputs = {n: _as_in_out(a, features, width) for n, a in kernels.items() if _side(n) == "i"}
            states = {n: _as_in_out(a, width, width) for n, a in kernels.items() if _side(n) == "h"}
            of_input, of_state = _blocks(inputs, width), _blocks(states, width)
            fits = of_input is not None and of_state is not None and of_input[0].shape[0] == features
            if of_input and of_state and fits and len(of_input) == len(of_state) and len(of_input) in LETTERS:
                return _Cell(case, of_input, of_state)
        return None

    def _bias(self, case: Case, side: str) -> list[np.ndarray]:
        vectors = {n: a[None, :] for n, a in case.weights.items() if a.ndim == 1 and _side(n) == side}
        blocks = _blocks(vectors, self.width)
        if blocks is None or len(blocks) != self.count:
            return [np.zeros(self.width)] * self.count
        return [block[0] for block in blocks]

    def run(self, f: Mapping[str, Any]) -> np.ndarray | None:
        letters = LETTERS[self.count]
        place = {letter: f["order"].index(letter) for letter in letters}
        x = self.x if f["time"] == 1 else self.x.swapaxes(0, 1)
        x = x[:, ::-1] if f["direction"] != "on" else x
        zeros = np.zeros((x.shape[0], self.width))
        h, c = [*self.state, zeros, zeros][:2] if all(a.shape == zeros.shape for a in self.state) else (zeros, zeros)
        steps = []
        for t in range(x.shape[1]):
            if f["carry"] == "no":
                h = c = zeros
            h, c = self._step(x[:, t], h, c, place, f)
            steps.append(c if f.get("returned") == "c" else h)
        if not self.steps:
            return steps[-1]
        result = np.stack(steps, axis=1)
        result = result[:, ::-1] if f["direction"] == "back, turned" else result
        return result if f["time"] == 1 else result.swapaxes(0, 1)

    def _step(
        self, x: np.ndarray, h: np.ndarray, c: np.ndarray, place: Mapping[str, int], f: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        times = 2.0 if f["bias"] == "twice" else 1.0
        bias = {
            side: [times * b if f["bias"] in wanted else 0.0 * b for b in self.biases[side]]
            for side, wanted in (("i", ("both", "input", "twice")), ("h", ("both", "state", "twice")))
        }

        def given(letter: str) -> np.ndarray:
            return np.asarray(x @ self.of_input[place[letter]] + bias["i"][place[letter]])

        def kept(letter: str) -> np.ndarray:
            return np.asarray(h @ self.of_state[place[letter]] + bias["h"][place[letter]])

        sigmoid, inner, outer = FUNCTIONS["sigmoid"], FUNCTIONS[f["inner"]], FUNCTIONS[f["outer"]]
        if self.count == 4:
            i, o = (sigmoid(given(letter) + kept(letter)) for letter in "io")
            forget = sigmoid(given("f") + kept("f") + f["forget"])
            c = forget * c + i * inner(given("g") + kept("g"))
            return o * outer(c), c
        if self.count == 3:
            r, z = (sigmoid(given(letter) + kept(letter)) for letter in "rz")
            before = (r * h) @ self.of_state[place["n"]] + bias["h"][place["n"]]
            n = inner(given("n") + (r * kept("n") if f["reset"] == "after" else before))
            return (z * h + (1 - z) * n if f["update"] == "z h" else (1 - z) * h + z * n), c
        return inner(given("n") + kept("n")), c


def _side(name: str) -> str:
    """`i` for what multiplies the input, `h` for what multiplies the state."""
    path, _, leaf = name.rpartition(".")
    module = path.rpartition(".")[2]
    if re.fullmatch(r"(weight|bias)_[ih]h(_l\d+)?", leaf):
        return leaf.partition("_")[2][0]
    if re.fullmatch(r"[ih][ifgornz]_?", module):
        return module[0]
    if module in ("dense_i", "in_proj", "i2h", "input", "ih"):
        return "i"
    return "h" if module in ("dense_h", "h2h", "hidden", "hh", "recurrent") else ""


def _as_in_out(array: np.ndarray, rows: int, width: int) -> np.ndarray:
    if array.shape[0] != rows or (array.shape[1] % width and array.shape[0] % width == 0):
        return array.T
    return array


def _blocks(arrays: Mapping[str, np.ndarray], width: int) -> list[np.ndarray] | None:
    """One a gate, in torch's order: of one array with all of them side by side, or of one array each."""
    if len(arrays) == 1:
        (array,) = arrays.values()
        return np.split(array, array.shape[1] // width, axis=1) if array.shape[1] % width == 0 else None
    by_gate = {}
    for name, array in arrays.items():
        module = name.rpartition(".")[0].rpartition(".")[2]
        if array.shape[1] != width or len(module) < 2:
            return None
        by_gate[module[1]] = array
    letters = LETTERS.get(len(by_gate), "")
    return [by_gate[letter] for letter in letters] if letters and set(letters) == set(by_gate) else None
