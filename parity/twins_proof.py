"""The proof that ends a conversion: three computations of the same logits, each beside the next.

The source's own class, our Flax twin with what was read of the source, our Flax twin with what is read back of the
target, and the target's own class: in float64, where equal mathematics agree to 1e-12, and in float32, by how far each
is from the float64 answer. CTranslate2 has no float64 and gives no logits: its log-probabilities are compared.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np

import flax_transformer.embedding as flax_embedding
from flax_transformer.parameters import abstract_model, with_parameters
from parity.compare import norm, relative_error
from parity.tolerances import CTRANSLATE2, FLOAT32, FLOAT64_RELATIVE
from parity.twins import in_precision, random_batch
from parity.weights.classes import Precision, has_class, logits_of_the_class
from parity.weights.ctranslate2_export import log_probabilities
from parity.weights.foreign import Model
from parity.weights.lazy import Converted
from parity.weights.twins import twin_mapping
from transformer_config import TransformerConfig

ROUNDED_TABLE = 1e-4
"""Of logits with positions in a table rounded to float32, from those with positions in float64. At position p an angle
computed in float32 is off by p·2⁻²⁴."""
SOURCE, TARGET = "the source's own class", "the target's own class"
TRANSLATOR = "CTranslate2"
READ, WRITTEN = "our twin with the source's weights", "our twin with the target's weights"
Logits = Callable[[Precision], np.ndarray]
"""Of the real places of a batch: (places, tgt_vocab)."""


def sinusoids(config: TransformerConfig, length: int) -> np.ndarray:
    """The positions that a config computes, in float64."""
    return flax_embedding.sinusoids(flax_embedding.position_numbers(length, config), config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """One computation beside another."""

    first: str
    second: str
    float64: float
    """Relative error of the second in float64."""
    bound: float
    float32: tuple[float, float]
    """Relative distance of each in float32 from the float64 answer of the first."""

    @property
    def passed(self) -> bool:
        """Within both bounds."""
        first, second = self.float32
        rounded = self.bound > FLOAT64_RELATIVE
        return self.float64 <= self.bound and (
            rounded or second <= max(FLOAT32.ratio * first, FLOAT32.floor) or first == second
        )

    def __str__(self) -> str:
        return (
            f"{self.first} and {self.second}: {self.float64:.1e} apart in float64 (at most {self.bound:.0e}); "
            f"in float32 {self.float32[0]:.1e} and {self.float32[1]:.1e} from that"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NarrowLink:
    """Log-probabilities in float32, of a computation that has nothing wider."""

    first: str
    second: str
    float32: tuple[float, float]
    """Relative distance of each from the float64 answer of the first."""

    @property
    def passed(self) -> bool:
        """As good a float32 as the first."""
        first, second = self.float32
        return second <= max(CTRANSLATE2.ratio * first, CTRANSLATE2.floor)

    def __str__(self) -> str:
        return (
            f"{self.first} and {self.second}: log-probabilities in float32 {self.float32[0]:.1e} and "
            f"{self.float32[1]:.1e} from those of the first in float64"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """All links that could be made."""

    links: tuple[Link | NarrowLink, ...]
    notes: tuple[str, ...] = ()
    """What was not compared, and why."""

    @property
    def passed(self) -> bool:
        """Every link holds, and there is one."""
        return bool(self.links) and all(link.passed for link in self.links)


def prove(
    source: Path, read: Model, target: Path, written: Model | None, changed: Mapping[str, str], *, seed: int = 0
) -> Proof:
    """Compares the logits of a padded batch of random ids. `written` is None where CTranslate2 is the target."""
    batch = random_batch(read.config, seed=seed)
    if written is not None and "positions_skip_padding" not in changed:
        batch["src"][1] = np.roll(batch["src"][1], int((batch["src"][1] == read.config.pad_id).sum()))
    real = batch["tgt_out"] != read.config.pad_id
    ways = {READ: _twin(read, batch, real)}
    ends = [(SOURCE, source, read)]
    if written is not None:
        ways[WRITTEN] = _twin(written, batch, real)
        ends.append((TARGET, target, written))
    chain, notes = list(ways), []
    for name, path, model in ends:
        kind = model.format_.name
        if has_class(kind):
            ways[name] = _class(path, model, batch, real)
            chain = [name, *chain] if name == SOURCE else [*chain, name]
        elif kind not in ("torch-reference", "flax"):
            notes.append(f"{kind}: its own class is not installed, or it has none: our reading of it was not compared")
    found = {name: {precision: ways[name](precision) for precision in ("float64", "float32")} for name in chain}
    links: list[Link | NarrowLink] = [
        _link(first, second, found[first], found[second], rounded="positions" in changed)
        for first, second in itertools.pairwise(chain)
    ]
    if written is None:
        chosen = batch["tgt_out"][real]
        ours = {precision: _log_probabilities(logits, chosen) for precision, logits in found[READ].items()}
        theirs = log_probabilities(target, read.config, batch["src"], batch["tgt_out"])
        answer = ours["float64"]
        distances = (_distance(ours["float32"], answer), _distance(theirs, answer))
        links.append(NarrowLink(first=READ, second=TRANSLATOR, float32=distances))
    return Proof(links=tuple(links), notes=tuple(notes))


def _class(path: Path, model: Model, batch: Mapping[str, np.ndarray], real: np.ndarray) -> Logits:
    def logits(precision: Precision) -> np.ndarray:
        found = logits_of_the_class(
            path, batch["src"], batch["tgt_in"], precision=precision, pad_id=model.config.pad_id
        )
        return found[real]

    return logits


def _log_probabilities(logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Of the chosen piece of each row, in the logits' precision."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted[np.arange(len(chosen)), chosen] - np.log(np.exp(shifted).sum(axis=-1))


def _link(
    first: str, second: str, one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], *, rounded: bool
) -> Link:
    answer = one["float64"]
    return Link(
        first=first,
        second=second,
        float64=relative_error(other["float64"], answer),
        bound=ROUNDED_TABLE if rounded and (first, second) == (READ, WRITTEN) else FLOAT64_RELATIVE,
        float32=(_distance(one["float32"], answer), _distance(other["float32"], other["float64"])),
    )


def _distance(got: np.ndarray, answer: np.ndarray) -> float:
    return norm(got.astype(np.float64) - answer) / norm(answer)


def _twin(model: Model, batch: Mapping[str, np.ndarray], real: np.ndarray) -> Logits:
    def logits(precision: Precision) -> np.ndarray:
        config = in_precision(model.config, precision)
        mapping = twin_mapping(tied=config.tie_embeddings == "all")
        params = {name: array.astype(precision) for name, array in Converted(mapping, model.weights).items()}
        with jax.enable_x64(precision == "float64"):
            module = abstract_model(config)
            run = jax.jit(lambda params, src, tgt: with_parameters(module, params)(src, tgt))
            found = np.asarray(run(params, batch["src"], batch["tgt_in"]))
        return found[real]

    return logits
