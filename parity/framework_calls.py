"""What the frameworks' own modules are given and return, brought into one order: the reference's.

torch.nn.LSTM returns (outputs, (h, c)), nnx.RNN the outputs alone or (carry, outputs); torch's attention returns its
weights too; a Flax cell is given its carry first and returns it twice. Known by type.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from parity.facts import Facts
from parity.trace import Trace, call_of, method_of, module_of

Arrays = dict[str, np.ndarray]
"""Arrays of one call by what stands behind its name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """For one pair of types: each from the port's arrays of a call, in its order, to the reference's."""

    given: Callable[[list[np.ndarray]], Arrays]
    returned: Callable[[Arrays], Arrays]
    handed: Callable[[list[np.ndarray]], list[np.ndarray] | None]
    """What the reference was given, in the port's order; None where it was not given enough."""


class FrameworkCalls:
    """The modules of a pair whose calls have to be put in order."""

    def __init__(self, reference: Facts, port: Facts, pairs: Mapping[str, str]):
        self._orders: dict[str, Order] = {}
        for path, other in pairs.items():
            order = ORDERS.get((reference[other].layer, port[path].layer))
            if order is not None:
                self._orders[other] = order

    def concerns(self, name: str) -> bool:
        """Whether the call is one of a module whose arrays are put in order."""
        return module_of(name) in self._orders and not method_of(name)

    def of_one_side(self, name: str, reference: Trace, port: Trace) -> bool:
        """Whether both made this call and only one returned this array: attention weights, a last state."""
        calls = ({call_of(n) for n in trace.outputs} for trace in (reference, port))
        return (
            self.concerns(name)
            and (name in reference.outputs) != (name in port.outputs)
            and all(call_of(name) in made for made in calls)
        )

    def apply(self, port: Trace, expected: Mapping[str, Sequence[str]]) -> Trace:
        """A port's trace, under the reference's module names, with those arrays under the reference's names.

        `expected`: {call: the reference's names of what it returned}.
        """
        if not self._orders:
            return port
        given = self._each(port.given, lambda call, order, arrays: order.given(list(arrays.values())))
        outputs = self._each(
            port.outputs, lambda call, order, arrays: _as_expected(call, order.returned(arrays), expected)
        )
        narrow = {n: place for n, place in port.narrow.items() if not self.concerns(n)}
        for name in outputs:
            places = [place for n, place in port.narrow.items() if call_of(n) == call_of(name)]
            if self.concerns(name) and places:
                narrow[name] = places[0]
        return dataclasses.replace(port, given=given, outputs=outputs, narrow=narrow)

    def _each(self, arrays: Mapping[str, np.ndarray], ordered: Callable[[str, Order, Arrays], Arrays]) -> Arrays:
        done: Arrays = {}
        calls: dict[str, Arrays] = {}
        for name, array in arrays.items():
            call = call_of(name)
            if self.concerns(name):
                calls.setdefault(call, {})[name[len(call) :]] = array
        for name, array in arrays.items():
            call = call_of(name)
            if call not in calls:
                done[name] = array
            elif calls[call]:  # in the place of its first
                found = ordered(call, self._orders[module_of(call)], calls[call])
                done |= {call + suffix: value for suffix, value in found.items()}
                calls[call] = {}
        return done

    def handed(self, given: Mapping[str, list[np.ndarray]]) -> dict[str, list[np.ndarray]]:
        """{call: what the reference was given}, in the port's order."""
        ordered = {}
        for call, arrays in given.items():
            found = self._orders[module_of(call)].handed(arrays) if self.concerns(call) else arrays
            if found is not None:
                ordered[call] = found
        return ordered


def _as_expected(call: str, arrays: Arrays, expected: Mapping[str, Sequence[str]]) -> Arrays:
    """A reference that returned one array has it without a number."""
    names = expected.get(call, ())
    return {"": arrays["[0]"]} if list(names) == [call] and "[0]" in arrays else arrays


def _attention_given(given: list[np.ndarray]) -> Arrays:
    # Keys are the queries, and values the keys, unless they are given.
    query, key, value = (given[min(i, len(given) - 1)] for i in range(3))
    return {"[0]": query, "[1]": key, "[2]": value}


def _attention_returned(returned: Arrays) -> Arrays:
    return {"[0]": next(iter(returned.values()))}


def _lstm_given(given: list[np.ndarray]) -> Arrays:
    if len(given) < 3:
        return {"": given[0]}
    return {"[0]": given[0], "[1]": given[2][None], "[2]": given[1][None]}


def _lstm_returned(returned: Arrays) -> Arrays:
    if len(returned) < 3:
        return {"[0]": list(returned.values())[-1]}
    c, h, outputs = returned.values()
    return {"[0]": outputs, "[1.0]": h[None], "[1.1]": c[None]}


def _gru_given(given: list[np.ndarray]) -> Arrays:
    return {"": given[0]} if len(given) < 2 else {"[0]": given[0], "[1]": given[1][None]}


def _gru_returned(returned: Arrays) -> Arrays:
    if len(returned) < 2:
        return {"[0]": next(iter(returned.values()))}
    h, outputs = returned.values()
    return {"[0]": outputs, "[1]": h[None]}


ATTENTION = Order(given=_attention_given, returned=_attention_returned, handed=lambda given: given[:3])
LSTM = Order(
    given=_lstm_given,
    returned=_lstm_returned,
    handed=lambda given: given if len(given) < 3 else [given[0], given[2][0], given[1][0]],
)
GRU = Order(
    given=_gru_given,
    returned=_gru_returned,
    handed=lambda given: given if len(given) < 2 else [given[0], given[1][0]],
)
BOTH_DIRECTIONS = Order(
    given=lambda given: {"": given[0]},
    returned=lambda returned: {"[0]": list(returned.values())[-1]},
    handed=lambda given: given[:1],
)
LSTM_CELL = Order(
    given=lambda given: {"[0]": given[2], "[1]": given[1], "[2]": given[0]},
    returned=lambda returned: {"[0]": returned["[1]"], "[1]": returned["[0.0]"]},
    handed=lambda given: given[::-1] if len(given) == 3 else None,
)
GRU_CELL = Order(
    given=lambda given: {"[0]": given[1], "[1]": given[0]},
    returned=lambda returned: {"": returned["[1]"]},
    handed=lambda given: given[::-1] if len(given) == 2 else None,
)

ORDERS: dict[tuple[str, str], Order] = {
    ("MultiheadAttention", "MultiHeadAttention"): ATTENTION,
    ("LSTM", "RNN"): LSTM,
    ("GRU", "RNN"): GRU,
    ("RNN", "RNN"): GRU,
    **{(kind, "Bidirectional"): BOTH_DIRECTIONS for kind in ("LSTM", "GRU", "RNN")},
    **{("LSTMCell", cell): LSTM_CELL for cell in ("LSTMCell", "OptimizedLSTMCell")},
    ("GRUCell", "GRUCell"): GRU_CELL,
    ("RNNCell", "SimpleCell"): GRU_CELL,
}
"""(torch's class, Flax's class) -> the order of what a call is given and returns."""
