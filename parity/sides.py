"""Both sides of a pair, built once, and how their names and weights correspond."""

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from parity.capture_flax import FlaxRunner
from parity.facts import Facts
from parity.framework_calls import FrameworkCalls
from parity.layout import Layouts
from parity.naming import Names
from parity.pair import Inputs, KnownDifference, Pair, Precision
from parity.part import PartInputs, Replay, pair_of_part
from parity.rungs import NotComparedError
from parity.trace import Trace, module_of
from parity.weights.derive import Derived, derive
from parity.weights.mapping import WeightMapping
from parity.weights.variation import without_constants


class Reference(Protocol):
    """The reference's side: alive (capture_torch.TorchRunner), or remembered by a golden file (golden.Golden)."""

    def weights(self) -> dict[str, np.ndarray]:
        """Parameters and floating-point buffers by name, in float32."""

    def trained(self) -> frozenset[str]:
        """Names of the parameters that are trained."""

    def facts(self) -> Facts:
        """Types, tensors and settings of every module."""

    def trace(self, inputs: Inputs, *, weights: Mapping[str, np.ndarray], precision: Precision) -> Trace:
        """One forward and backward pass. Raises NotComparedError for a run that a golden file does not hold."""


class Sides:
    """The runners of both sides, their facts, the mapping between their weights, and the names of their modules."""

    def __init__(self, pair: Pair, *, seed: int = 0, golden: Any = None):
        self.whole = pair
        """The pair as it was given; with `Pair.part`, `pair` is that of the submodule."""
        self.pair = pair_of_part(pair) if pair.part else pair
        self.seed = seed
        self.golden = golden
        self._ports: dict[Precision, FlaxRunner] = {}

    @functools.cached_property
    def reference_runner(self) -> Any:
        """See Reference. Raises NotComparedError where there is none; ImportError where torch is not installed."""
        if self.golden is not None:
            return self.golden
        if self.pair.reference is None:
            raise NotComparedError("the pair has no reference: check it --against a golden file")
        from parity.capture_torch import TorchRunner

        return TorchRunner(self.pair.reference)

    def live_reference(self) -> Any:
        """The TorchRunner. Raises NotComparedError if a golden file stands for it."""
        if self.golden is not None:
            raise NotComparedError("the golden file holds no such run of the reference")
        return self.reference_runner

    def port_runner(self, precision: Precision) -> FlaxRunner:
        """The port in this precision. Raises NotComparedError where there is none."""
        if self.pair.port is None:
            raise NotComparedError("the pair has no port")
        if precision not in self._ports:
            self._ports[precision] = FlaxRunner(self.pair.port, precision=precision)
        return self._ports[precision]

    @functools.cached_property
    def reference_facts(self) -> Facts:
        """Of every module of the reference."""
        return self.reference_runner.facts()

    @functools.cached_property
    def port_facts(self) -> Facts:
        """Of every module of the port."""
        return self.port_runner("float32").facts()

    @functools.cached_property
    def derived(self) -> Derived:
        """How the weights and the module names of the two correspond, and which differences are known beforehand."""
        return derive(
            self.reference_facts, self.port_facts, mapping=self.pair.mapping, modules=tuple(self.pair.modules)
        )

    @functools.cached_property
    def layouts(self) -> Layouts:
        """Which arrays of the reference have their axes in another order than the port's."""
        return Layouts(self.reference_facts, self.derived.port, modules=self.derived.modules, given=self.pair.layouts)

    @functools.cached_property
    def framework_calls(self) -> FrameworkCalls:
        """In what order the frameworks' own modules are given and return what they do."""
        return FrameworkCalls(self.reference_facts, self.derived.port, self.derived.pairs)

    @functools.cached_property
    def names(self) -> Names:
        """The reference's module names for the port's."""
        return Names(self.derived.modules, self.derived.stacked, self.pair.modules)

    @property
    def mapping(self) -> WeightMapping:
        """From the reference's names and layouts to the port's."""
        return self.derived.mapping

    @property
    def known(self) -> tuple[KnownDifference, ...]:
        """The frameworks' own, and those the pair names."""
        return self.derived.known + self.pair.known

    @functools.cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """What the reference is loaded with, in float32: see `Pair.weights`; adjusted where a known difference asks."""
        return self.derived.adjust(self.reference_weights)

    @functools.cached_property
    def reference_weights(self) -> dict[str, np.ndarray]:
        """The same before it is adjusted: what can be known without the port."""
        if self.golden is not None:
            return dict(self.golden.weights())
        given = self.pair.weights
        return dict(given) if given is not None else without_constants(self.reference_runner.weights(), self.seed)

    @functools.cached_property
    def port_weights(self) -> dict[str, np.ndarray]:
        """The same for the port. Raises MappingError, which names every key that does not fit."""
        return self.to_port(self.weights)

    def to_port(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Any weights of the reference by the port's names. Raises MappingError, as above."""
        used = {name: array for name, array in weights.items() if self.derived.travels(name)}
        expected = {n: s for n, s in self.port_runner("float32").specs().items() if self.derived.expects(n)}
        expected = {n: np.broadcast_to(np.float32(0), s.shape) for n, s in expected.items()}
        return self.mapping.apply(used, expected=expected)

    def reference_brings(self, what: str) -> bool:
        """Whether the reference's side has this field, or the golden file was recorded with it."""
        if self.golden is not None:
            return bool(self.golden.brings(what))
        return self.pair.reference is not None and getattr(self.pair.reference, what) is not None

    def expect_both(self, field: str, what: str) -> None:
        """Raises NotComparedError unless both sides bring this field, saying which does not; or for a golden file."""
        self.live_reference()
        sides = {"reference": self.pair.reference, "port": self.pair.port}
        lacking = [name for name, side in sides.items() if side is None or getattr(side, field) is None]
        if lacking:
            raise NotComparedError(f"the pair's {' and '.join(lacking)} brings no {what}")

    def of_part(self, inputs: Inputs) -> Inputs:
        """What the part is given where the whole model is given this; the same where there is no part."""
        if not self.whole.part or self.golden is not None or isinstance(inputs, PartInputs):
            return inputs
        return self._replay(inputs)

    def valid(self, inputs: Inputs) -> np.ndarray | None:
        """Which leading positions of an output count, by `Pair.valid`; None for all."""
        if self.golden is not None:
            recorded: np.ndarray | None = self.golden.valid(inputs)
            return recorded
        if self.pair.valid is None:
            return None
        whole = inputs.whole if isinstance(inputs, PartInputs) else inputs
        return np.asarray(self.pair.valid(whole), bool)

    @functools.cached_property
    def _replay(self) -> Replay:
        return Replay(self.whole)

    def _in_port_names(self, values: Mapping[str, Any]) -> dict[str, Any]:
        paths = self.names.port_names((module_of(name) for name in values), self.port_facts)
        return {
            paths.get(module_of(name), module_of(name)) + name[len(module_of(name)) :]: v for name, v in values.items()
        }
