"""What is compared: a reference in PyTorch, a port in Flax NNX, the mapping between their weights, and inputs.

Nothing here knows any particular model; `parity/twins.py` makes a Pair of our own two. The least that works is

    Pair(reference=TorchModel, port=lambda: FlaxModel(rngs=nnx.Rngs(0)), inputs={"x": array})

and whatever a model has besides (a loss, dropout masks that can be handed in, an optimizer, a decoder) goes into the
`Side`s, one of each framework, and opens further rungs of the ladder.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from parity.weights.mapping import Rule, WeightMapping

Precision = Literal["float64", "float32", "bfloat16"]
Inputs = Mapping[str, np.ndarray]
Masks = Mapping[str, np.ndarray]
"""Dropout masks by the name of their site; True = keep."""


SEEDS = ("rngs", "seed")
"""Names of a builder's parameter that random numbers come through."""


def call_positionally(module: Any, inputs: Mapping[str, Any]) -> Any:
    """`module(*inputs.values())`: argument names may differ between frameworks, their order seldom does."""
    return module(*inputs.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A model's own training step: the very code that trains it is then compared, not one that the harness composes."""

    start: Callable[[Any], Any]
    """(module in training mode, with its weights in float64) -> the state before the first step."""
    step: Callable[[Any, Mapping[str, Any], Mapping[str, Any]], tuple[Any, Any]]
    """(state, inputs, dropout masks by site) -> (state, loss). Whatever is to be compiled compiles itself."""
    parameters: Callable[[Any], Mapping[str, Any]]
    """(state) -> the trained parameters by the side's own names."""
    modes: Callable[[], "TrainingModes"] | None = None
    """The same training as it is run besides: over several devices, in micro-batches, ... Of the port alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingModes:
    """Ways in which a training step is run, each of which must compute what `plain` does."""

    plain: Training
    """On one device: the training that the trajectory compares, or the same code in another setting."""
    others: Mapping[str, Training]
    """By name. Their steps may draw dropout themselves and ignore the masks they are given."""
    drawn: Callable[[Any, Mapping[str, Any]], Any] | None = None
    """(state, inputs) -> what `plain`'s step is to be given as masks, to drop what the others drop by themselves in
    that state. None: all are given the same masks, as the port's dropout draws them."""
    rows: int = 1
    """Batches of fewer rows are repeated until they have so many: each device and each micro-batch is to have some."""
    notes: tuple[str, ...] = ()
    """What the reader should know: a way that this machine does not allow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two models, and what it brings along. Arrays are the framework's own.

    What both sides bring is compared; what only one brings, or neither, is reported as not compared.
    """

    build: Callable[..., Any]
    """() or (precision) -> torch.nn.Module or nnx.Module. Without an argument, the harness casts the parameters. A
    port may be one of shapes only (`nnx.eval_shape`): its parameters are replaced."""
    call: Callable[[Any, Mapping[str, Any]], Any] = call_positionally
    """(module, inputs) -> an array, or arrays in dicts, tuples and dataclasses. In evaluation mode."""
    loss: Callable[[Any, Mapping[str, Any]], Any] | None = None
    """(what `call` returned, inputs) -> a scalar, or (sum, weight): the loss is then sum / weight, and over devices
    both are added up before they are divided. None: gradients are those of a fixed random projection of the output."""
    draw_dropout: Callable[[Any, Mapping[str, Any], int], Mapping[str, Any]] | None = None
    """(module, inputs, seed) -> the keep masks that the model's own dropout draws, by site. None: the harness watches
    the framework's Dropout modules."""
    call_with_dropout: Callable[[Any, Mapping[str, Any], Mapping[str, Any]], Any] | None = None
    """`call` in training mode with masks handed in, by site. None: the harness puts them into the framework's Dropout
    modules."""
    dropout_rates: Callable[[Any, Mapping[str, Any]], Mapping[str, float]] | None = None
    """(module, inputs) -> the share of zeros at each site, for whoever draws masks itself. None: read off the
    framework's Dropout modules."""
    initial: Callable[[int], Mapping[str, Any]] | None = None
    """(seed) -> freshly drawn parameters by name. None: the builder is called again and again, where seeds reach it
    (torch's global one does; a parameter called `rngs` or `seed` does; a seed fixed inside does not)."""
    clip: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Gradients by name -> clipped gradients by name."""
    optimizer: Any = None
    """Reference: (list of parameters) -> torch.optim.Optimizer. Port: an optax.GradientTransformation, which is given
    parameters by name. Without clipping, if `clip` does that."""
    schedule: Callable[[int], Any] | None = None
    """Learning rate of a step, the first being step 1. With one, an optimizer's own rate should be 1."""
    training: Training | None = None
    """The model's own training step. None: the harness composes one of call, loss, clip, optimizer and schedule."""
    decode: Callable[[Any, Mapping[str, Any]], Any] | None = None
    """(module, inputs) -> ids, and scores if it has any: a dict of arrays."""

    @property
    def takes_precision(self) -> bool:
        """Whether the builder has a parameter without a default, besides that of the seed: the precision."""
        return self._precision_parameter() is not None

    @property
    def takes_seed(self) -> str | None:
        """The builder's parameter for random numbers: `rngs` (an nnx.Rngs) or `seed` (an integer)."""
        return next((p.name for p in self._builder_parameters() if p.name in SEEDS), None)

    def module(self, precision: Precision, *, seed: Any = None) -> Any:
        """Builds the module, handing on the precision if the builder takes one. The cast is up to the caller.

        `seed`, an integer or a jax key, goes to the builder's parameter for it, if there is one; where that has no
        default, None means 0.
        """
        given: dict[str, Any] = {}
        for parameter in self._builder_parameters():
            if parameter.name in SEEDS and (seed is not None or parameter.default is parameter.empty):
                given[parameter.name] = _random_numbers(parameter.name, 0 if seed is None else seed)
        takes = self._precision_parameter()
        if takes is not None and takes.kind is takes.POSITIONAL_ONLY:
            return self.build(precision, **given)
        return self.build(**given) if takes is None else self.build(**{takes.name: precision}, **given)

    def _precision_parameter(self) -> inspect.Parameter | None:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        required = [p for p in self._builder_parameters() if p.default is p.empty and p.kind in positional]
        return next((p for p in required if p.name not in SEEDS), None)

    def _builder_parameters(self) -> Sequence[inspect.Parameter]:
        # Of a class its constructor's, without `self`: nnx's metaclass shows (*args, **kwargs).
        of_class = isinstance(self.build, type)
        try:
            signature = inspect.signature(self.build.__init__ if of_class else self.build)
        except ValueError:  # a class written in C has no signature
            return ()
        return tuple(signature.parameters.values())[1 if of_class else 0 :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownDifference:
    """Something in which the frameworks' own modules cannot be equal, and what should hold in spite of it.

    Never a silent pass: the report lists each one, and the rung that meets it judges what `holds` says.
    """

    tensors: tuple[str, ...]
    """Names on the reference's side."""
    kind: str
    """A short name, such as `GRU hidden bias`."""
    reason: str
    """Why they differ."""
    holds: str
    """What is compared instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two models that claim to be the same. `reference` and `port` may be builders alone: `Side(build=...)`.

    Raises ValueError if there is nothing to compare.
    """

    name: str = "pair"
    reference: Any = None
    """A Side, a builder, or None where only a golden file stands for it."""
    port: Any = None
    """A Side, a builder, or None where only a golden file is to be recorded."""
    inputs: Inputs | Sequence[Inputs] | Callable[[int], Inputs]
    """Arrays by argument name; or several such batches; or a function of a seed. Floating-point arrays are cast to
    the precision of a run; ids stay what they are."""
    weights: Mapping[str, np.ndarray] | None = None
    """The reference's parameters (and buffers) by name. None: those the reference is built with, where constant ones
    (biases of 0, norms of 1) get noise, because two of them that were exchanged would look alike."""
    mapping: WeightMapping | Sequence[Rule] = ()
    """From the reference's names and layouts to the port's. Rules alone are put before those that are derived from
    module types and equal names; a WeightMapping is taken as it is."""
    modules: Sequence[tuple[str, str]] = ()
    """Patterns of module names where they differ, reference first: `("blocks.{i}.attn", "layers.{i}.attention")`."""
    layouts: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    """Patterns of the reference's module names -> the order of axes that takes their arrays to the port's:
    `{"blocks.{i}": (0, 2, 3, 1)}` where the port keeps channels last. The frameworks' own convolutions and norms are
    known. What the model itself is given and returns, `Side.call` brings into one order."""
    part: str = ""
    """The reference's submodule that the port is a port of, where only half of a port exists. The reference is run
    whole; what its submodule was given is given to both."""
    adversarial: Callable[[int], Mapping[str, Inputs]] | None = None
    """Seed -> inputs that are hard, by name: rows of padding only, a length of 1, ..."""
    valid: Callable[[Inputs], np.ndarray] | None = None
    """Inputs -> which leading positions (batch, length) of an output count. None: all."""
    schedule_steps: Sequence[int] = ()
    """Steps at which both learning-rate tables are compared, from 1: around the warm-up, and the last."""
    training_steps: int | None = None
    """Steps of the trajectory. None: 10, or 3 for a model of more than 16 million parameters."""
    known: tuple[KnownDifference, ...] = ()
    """Besides those that the harness knows of the frameworks' own modules."""
    suspects: tuple[Any, ...] = ()
    """Further suspects for the diagnosis; see parity/diagnose."""

    def __post_init__(self) -> None:
        if self.reference is None and self.port is None:
            raise ValueError(f"{self.name}: expected a reference or a port, got neither")
        for field in ("reference", "port"):
            side = getattr(self, field)
            if side is not None and not isinstance(side, Side):
                if not callable(side):
                    raise ValueError(f"{self.name}: expected {field} to be a Side or a builder, got {side!r}")
                object.__setattr__(self, field, Side(build=side))
        if not callable(self.inputs) and not self.inputs:
            raise ValueError(f"{self.name}: expected at least one batch, got none: nothing compared is no proof")

    def batches(self, *, seed: int) -> tuple[Inputs, ...]:
        """What both are given, one after the other. Raises ValueError for a batch that is no dict of arrays."""
        every: Iterable[Inputs]
        if callable(self.inputs):
            every = (self.inputs(seed),)
        else:
            every = (self.inputs,) if isinstance(self.inputs, Mapping) else tuple(self.inputs)
        for batch in every:
            if not isinstance(batch, Mapping) or not batch:
                raise ValueError(f"{self.name}: expected inputs by argument name, got {type(batch).__name__}")
        return tuple({name: np.asarray(array) for name, array in batch.items()} for batch in every)


def _random_numbers(name: str, seed: Any) -> Any:
    if name == "seed":
        return seed
    from flax import nnx

    return nnx.Rngs(seed)
