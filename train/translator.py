"""Lines of text into translations: in order of length, in batches of few shapes, by whatever search is asked for."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from flax_transformer.hypotheses import length_limits
from flax_transformer.transformer import check_ids
from train.compilation import Compiled
from train.config import TrainConfig
from train.decode_shapes import DecodeShape, decode_shapes, source_rows
from train.parallel import Devices
from train.search import Search, translations_of_each
from train.tokenizer import Tokenizer
from transformer_config import LengthConfig


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
    growth, of_vocabulary = config.search.max_len_growth, config.search.of_vocabulary
    return LengthConfig(max_len=config.evaluation.max_decode_len, max_len_growth=growth, **of_vocabulary)


ROWS_AT_ONCE = 2_048
"""Sentences handed to the device together, whatever their number; fewer are decoded at a time."""


class Translator:
    """Translates lines with one config; keeps what it has compiled."""

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
        self._compiled: dict[DecodeShape, Compiled[..., Any]] = {}
        self._longest = 0

    @property
    def compilations(self) -> int:
        """How often decoding was compiled: once for every shape."""
        return sum(compiled.compilations for compiled in self._compiled.values())

    @property
    def max_compilations(self) -> int:
        """The most there can be for sources as long as the longest so far: one for each of its `decode_shapes`."""
        return len(self._shapes())

    def translate(
        self, params: dict[str, Array], lines: Sequence[str], *, first: int = 0, longest: int | None = None
    ) -> Translations:
        """Translates `lines`, whose first is number `first` of all there are: what samples are drawn by.

        Lines of more than `longest` pieces, where that is given, are left out. Raises ValueError for lines too long
        for the model.
        """
        stripped = [line.strip() for line in lines]
        encoded = self._tokenizer.encode_sources(stripped)
        too_long = tuple(i for i, ids in enumerate(encoded) if longest is not None and len(ids) > longest)
        wanted = [i for i in sorted({*range(len(lines))}.difference(too_long)) if stripped[i]]
        self._check_lengths([len(encoded[i]) for i in wanted])
        nothing = (Translation(text="", score=0.0, ended=True),) * translations_of_each(self._search)
        found = [nothing for _ in lines]
        waiting = wanted
        for shape in self._shapes():
            # The longest first: those that take the place of others at the end are the soonest done.
            waiting.sort(key=lambda i: -len(encoded[i]))
            now = [i for i in waiting if len(encoded[i]) <= shape.src_len]
            waiting = [i for i in waiting if len(encoded[i]) > shape.src_len]
            for start in range(0, len(now), ROWS_AT_ONCE):
                chosen = now[start : start + ROWS_AT_ONCE]
                numbers = [first + i for i in chosen]
                translated = self._translated(params, [encoded[i] for i in chosen], numbers, shape)
                for i, translations in zip(chosen, translated, strict=True):
                    if translations is None:
                        waiting.append(i)
                    else:
                        found[i] = translations
                self._progress(sum(translations is not None for translations in translated))
        return Translations(of_lines=tuple(found), too_long=too_long)

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        limit = self._config.model.sequence_limit
        longer = [length for length in lengths if limit is not None and length > limit]
        if longer:
            raise ValueError(
                f"expected source sentences of at most {limit} pieces, got {len(longer)} longer ones, "
                f"the longest of {max(longer)}"
            )
        self._longest = max([self._longest, *lengths])

    def _shapes(self) -> tuple[DecodeShape, ...]:
        _, most = length_limits(self._search, self._config.model, self._longest)
        return decode_shapes(self._longest, int(most.max()))

    def _translated(
        self, params: dict[str, Array], sentences: list[list[int]], numbers: list[int], shape: DecodeShape
    ) -> list[tuple[Translation, ...] | None]:
        """The translations of each sentence; None if they need more room than this shape has."""
        rows = self._devices.padded_rows(ROWS_AT_ONCE)
        limit = self._config.model.sequence_limit
        src_len = shape.src_len if limit is None else min(shape.src_len, limit)
        src = source_rows(sentences, rows=rows, src_len=src_len, pad_id=self._config.model.pad_id)
        check_ids(src, name="src", vocab_size=self._config.model.src_vocab_size)
        of_rows = np.resize(np.array(numbers, np.int32), rows)
        # Dealt out one by one, so that every device has long sentences and short ones, and its share of a few.
        dealt = np.arange(rows).reshape(-1, len(self._devices.devices)).T.ravel()
        back = np.argsort(dealt)[: len(sentences)]
        placed = (self._devices.place_sources(array[dealt]) for array in (src, of_rows))
        hypotheses = self._decoder(shape)(params, *placed)
        ids, scores, ended, lengths = (
            array[back]
            for array in jax.device_get((hypotheses.ids, hypotheses.scores, hypotheses.ended, hypotheses.lengths))
        )
        needs_more = (lengths[:, 0] == 0) & (shape != self._shapes()[-1])
        texts = iter(self._tokenizer.decode(ids.reshape(-1, ids.shape[-1]).tolist()))
        translations = [
            tuple(
                Translation(text=next(texts), score=float(score), ended=bool(whole))
                for score, whole in zip(*of_row, strict=True)
            )
            for of_row in zip(scores, ended, strict=True)
        ]
        return [None if more else of_row for more, of_row in zip(needs_more, translations, strict=True)]

    def _decoder(self, shape: DecodeShape) -> Compiled[..., Any]:
        if shape not in self._compiled:
            self._compiled[shape] = self._devices.compile_decoding(
                self._config.model,
                self._search,
                slots=self._config.evaluation.batch_size,
                room=shape.room,
                seed=self._seed,
            )
        return self._compiled[shape]
