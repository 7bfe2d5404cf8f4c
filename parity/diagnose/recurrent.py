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
    """A module that is given a sequence, and has a kernel for the input and one for the state."""
    if case.child or not case.given or case.x.ndim != 3 or case.expected.ndim != 3:
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
            lambda r, p: BIAS if 0.0 in (r, p) else BIAS_TWICE,
            (Option(1.0, "added once"), Option(0.0, "left out"), Option(2.0, "added twice")),
            what="bias",
            fix="the bias must be {reference}",
        ),
        Factor(
            "forget",
            FORGET,
            (Option(0.0, "0"), Option(1.0, "1")),
            what="constant of the forget gate",
            also_right=1,
            fix="add {reference} to the forget gate",
        )
        if count == 4
        else Factor("forget", FORGET, (Option(0.0, "0"),)),
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


class _Cell:
    def __init__(
        self,
        x: np.ndarray,
        of_input: list[np.ndarray],
        of_state: list[np.ndarray],
        biases: list[np.ndarray],
        state_bias: np.ndarray,
    ):
        self.x, self.of_input, self.of_state = x.astype(np.float64), of_input, of_state
        self.biases, self.state_bias = biases, state_bias
        self.width = of_state[0].shape[0]

    @staticmethod
    def of(case: Case) -> "_Cell | None":
        width, features = case.expected.shape[-1], case.x.shape[-1]
        kernels = {n: a for n, a in case.weights.items() if a.ndim == 2}
        inputs = {n: _as_in_out(a, features, width) for n, a in kernels.items() if _side(n) == "i"}
        states = {n: _as_in_out(a, width, width) for n, a in kernels.items() if _side(n) == "h"}
        of_input, of_state = _blocks(inputs, width), _blocks(states, width)
        if of_input is None or of_state is None or len(of_input) != len(of_state) or len(of_input) not in LETTERS:
            return None
        count = len(of_input)
        total = [np.zeros(width) for _ in range(count)]
        last_of_state = np.zeros(width)
        for side in "ih":
            vectors = {n: a[None, :] for n, a in case.weights.items() if a.ndim == 1 and _side(n) == side}
            blocks = _blocks(vectors, width)
            if blocks is None or len(blocks) != count:
                continue
            for i, block in enumerate(blocks):
                if side == "h" and count == 3 and i == 2:
                    last_of_state = block[0]  # inside the reset gate's reach
                else:
                    total[i] = total[i] + block[0]
        return _Cell(case.x, of_input, of_state, total, last_of_state)

    def run(self, f: Mapping[str, Any]) -> np.ndarray | None:
        letters = LETTERS[len(self.of_input)]
        place = {letter: f["order"].index(letter) for letter in letters}
        x = self.x if f["time"] == 1 else self.x.swapaxes(0, 1)
        x = x[:, ::-1] if f["direction"] != "on" else x
        h = c = np.zeros((x.shape[0], self.width))
        steps = []
        for t in range(x.shape[1]):
            if f["carry"] == "no":
                h = c = np.zeros_like(h)
            h, c = self._step(x[:, t], h, c, place, f)
            steps.append(h)
        result = np.stack(steps, axis=1)
        result = result[:, ::-1] if f["direction"] == "back, turned" else result
        return result if f["time"] == 1 else result.swapaxes(0, 1)

    def _step(
        self, x: np.ndarray, h: np.ndarray, c: np.ndarray, place: Mapping[str, int], f: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        def given(letter: str) -> np.ndarray:
            i = place[letter]
            return np.asarray(x @ self.of_input[i] + f["bias"] * self.biases[i])

        sigmoid, inner, outer = FUNCTIONS["sigmoid"], FUNCTIONS[f["inner"]], FUNCTIONS[f["outer"]]
        if len(place) == 4:
            i, o = (sigmoid(given(letter) + h @ self.of_state[place[letter]]) for letter in "io")
            forget = sigmoid(given("f") + h @ self.of_state[place["f"]] + f["forget"])
            c = forget * c + i * inner(given("g") + h @ self.of_state[place["g"]])
            return o * outer(c), c
        if len(place) == 3:
            r, z = (sigmoid(given(letter) + h @ self.of_state[place[letter]]) for letter in "rz")
            last = self.of_state[place["n"]]
            bias = f["bias"] * self.state_bias
            recurrent = r * (h @ last + bias) if f["reset"] == "after" else (r * h) @ last + bias
            n = inner(given("n") + recurrent)
            return (z * h + (1 - z) * n if f["update"] == "z h" else (1 - z) * h + z * n), c
        return inner(given("n") + h @ self.of_state[0]), c


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
