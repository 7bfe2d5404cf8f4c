"""Lines of text into translations: in order of length, in batches of few shapes, by whatever search is asked for."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from flax_transformer.hypotheses import longest_target
from flax_transformer.transformer import check_ids
from train.batching import decode_batches, decoding_lengths
from train.compilation import Compiled
from train.config import TrainConfig
from train.parallel import Devices
from train.search import Search, translations_of_each
from train.tokenizer import Tokenizer
from transformer_config import EOS_ID, LengthConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation:
    """One translation of a line."""

    text: str
    score: float
    """What translations of a line are ranked by: see BeamConfig; otherwise the log-probability. In nats."""
    ended: bool
    """False: it reached the limit on length before its end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translations:
    """Of each line, in the order of the lines, as many translations as were asked for, the best first.

    An empty line has empty ones; so has one that is too long.
    """

    of_lines: tuple[tuple[Translation, ...], ...]
    too_long: tuple[int, ...] = ()
    """Which lines were not translated, because they have more pieces than are allowed."""

    @property
    def lines(self) -> tuple[str, ...]:
        """The best translation of each."""
        return tuple(translations[0].text for translations in self.of_lines)

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Which of them reached the limit on length before their end."""
        return tuple(i for i, translations in enumerate(self.of_lines) if not translations[0].ended)


def greedy_search(config: TrainConfig) -> LengthConfig:
    """What a run evaluates itself with."""
    return LengthConfig(max_len=config.evaluation.max_decode_len)


ROWS_AT_ONCE = 2_048
"""Sentences handed to the device together, whatever their number; fewer are decoded at a time."""


class Translator:
    """Translates lines with one config; keeps what it has compiled.

    `search.max_len` is raised to twice the pieces of the source where that is more, and lowered to what the model has
    positions for.
    """

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: Tokenizer,
        devices: Devices,
        *,
        search: Search | None = None,
        seed: int = 0,
        progress: Callable[[int], None] = lambda lines: None,
    ):
        self._devices = devices
        self._config = config
        self._tokenizer = tokenizer
        self._search = search or greedy_search(config)
        self._seed = seed
        self._progress = progress
        self._compiled: dict[int, Compiled[..., Any]] = {}
        self._longest = 0

    @property
    def compilations(self) -> int:
        """How often decoding was compiled: once for every padded source length."""
        return sum(compiled.compilations for compiled in self._compiled.values())

    @property
    def max_compilations(self) -> int:
        """The most there can be for sources as long as the longest so far: one for each of its `decoding_lengths`."""
        return len(decoding_lengths(self._longest))

    def translate(
        self, params: dict[str, Array], lines: Sequence[str], *, first: int = 0, longest: int | None = None
    ) -> Translations:
        """Translates `lines`, whose first is number `first` of all there are: what samples are drawn by.

        Lines of more than `longest` pieces, where that is given, are left out. Raises ValueError for lines too long
        for the model.
        """
        encoded = [[*ids, EOS_ID] for ids in self._tokenizer.encode([line.strip() for line in lines])]
        too_long = tuple(i for i, ids in enumerate(encoded) if longest is not None and len(ids) > longest)
        wanted = [i for i in sorted({*range(len(lines))}.difference(too_long)) if len(encoded[i]) > 1]
        self._longest = max([self._longest, *(len(encoded[i]) for i in wanted)])
        nothing = (Translation(text="", score=0.0, ended=True),) * translations_of_each(self._search)
        found = [nothing for _ in lines]
        rows_at_once = self._devices.padded_rows(ROWS_AT_ONCE)
        # Dealt out one by one, so that every device has long sentences and short ones, and its share of a few.
        dealt = np.arange(rows_at_once).reshape(-1, len(self._devices.devices)).T.ravel()
        batches = decode_batches(
            [encoded[i] for i in wanted],
            rows=rows_at_once,
            max_len=self._config.model.sequence_limit,
        )
        for rows, src in batches:
            check_ids(src, name="src", vocab_size=self._config.model.src_vocab_size)
            indices = np.array([wanted[row] if row >= 0 else -1 for row in rows[dealt]])
            numbers = np.maximum(first + indices, 0).astype(np.int32)
            hypotheses = self._decoder(src.shape[1])(params, *map(self._devices.place_sources, (src[dealt], numbers)))
            ids, scores, ended = jax.device_get((hypotheses.ids, hypotheses.scores, hypotheses.ended))
            of_rows = self._tokenizer.decode(ids.reshape(-1, ids.shape[-1]).tolist())
            for row, index in enumerate(indices):
                if index >= 0:
                    found[index] = tuple(
                        Translation(text=of_rows[row * len(nothing) + n], score=float(score), ended=bool(whole))
                        for n, (score, whole) in enumerate(zip(scores[row], ended[row], strict=True))
                    )
            self._progress(int((indices >= 0).sum()))
        return Translations(of_lines=tuple(found), too_long=too_long)

    def _decoder(self, src_len: int) -> Compiled[..., Any]:
        # Room to grow with the source; what no sentence can reach is left out, because room costs time.
        search, limit = self._search, self._config.model.sequence_limit
        most = [max(search.max_len, 2 * src_len)]
        if search.max_len_ratio is not None:
            most.append(longest_target(search.max_len_ratio, src_len))
        max_len = min(most if limit is None else [*most, limit])
        if src_len not in self._compiled:
            self._compiled[src_len] = self._devices.compile_decoding(
                self._config.model,
                dataclasses.replace(search, max_len=max(max_len, search.min_len + 1)),
                slots=self._config.evaluation.batch_size,
                seed=self._seed,
            )
        return self._compiled[src_len]
