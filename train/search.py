"""How translations are looked for, as the command line says it. Light: `--help` must not wait for jax."""

import dataclasses
from typing import Any

from transformer_config import BeamConfig, LengthConfig, SamplingConfig
from transformer_config.decoding import LengthPenalty, Stopping

Search = LengthConfig | BeamConfig | SamplingConfig
"""A plain LengthConfig: greedily."""


def translations_of_each(search: Search) -> int:
    """How many there are of a line."""
    if isinstance(search, BeamConfig):
        return search.num_hypotheses
    return search.num_samples if isinstance(search, SamplingConfig) else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How translations of this model are looked for, where the command line says nothing else."""

    beam_size: int = 4
    """1: greedily."""
    alpha: float = 0.6
    """Exponent of the penalty for length."""
    length_penalty: LengthPenalty = "length"
    stopping: Stopping = "bound"
    renormalize: bool = False
    """See BeamConfig."""
    never: tuple[int, ...] | None = None
    """Ids that are never chosen; None: padding and the start."""
    first_id: int | None = None
    """The piece that every translation begins with, such as the tag of a language."""
    forced_end: bool = False
    """Whether the last piece that a translation may have is its end."""
    min_len: int = 0
    max_len_growth: float = 2.0
    """`evaluation.max_decode_len` is raised to so many pieces for each of the source where that is more."""
    max_len_ratio: float | None = 2.0
    """See LengthConfig."""

    def __post_init__(self) -> None:
        if self.beam_size < 1:
            raise ValueError(f"search.beam_size: expected at least 1, got {self.beam_size}")

    @property
    def of_vocabulary(self) -> dict[str, Any]:
        """The fields that every search of this model has, greedy ones too: ids of its own vocabulary."""
        return {name: getattr(self, name) for name in ("never", "first_id", "forced_end")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Beam search; greedy with --beam 1; sampling with --sample. What is left out is as the run has it."""

    beam: int | None = None
    """Beams of a sentence; 1: the likeliest piece again and again. By default the run's search.beam_size, 4 mostly."""
    nbest: int = 1
    """Translations of each line, the best first; with --sample: drawn so many times."""
    alpha: float | None = None
    """Exponent of the penalty for length, by which scores are divided. By default the run's search.alpha."""
    length_penalty: LengthPenalty | None = None
    """length: pieces^alpha; gnmt: ((5 + pieces) / 6)^alpha."""
    stopping: Stopping | None = None
    """When a sentence is over: when nothing better can come (bound), or as another library has it."""
    sample: bool = False
    """Draw pieces from the model's distribution."""
    temperature: float = 1.0
    """Of --sample: below 1 the likely becomes likelier."""
    top_k: int | None = None
    """Of --sample: from the likeliest so many pieces."""
    top_p: float | None = None
    """Of --sample: from the fewest pieces that together are at least so likely."""
    seed: int = 0
    """Of --sample. What is drawn for a line depends on it and on the number of the line alone."""
    min_len: int = 0
    """Pieces before the end of a translation, at least."""
    min_len_ratio: float = 0.0
    """The same, for each piece of the source."""
    max_len: int | None = None
    """Pieces of a translation, at most; by default the run's evaluation.max_decode_len, or twice those of the source
    where that is more."""
    max_len_ratio: float | None = None
    """And at most so many for each piece of the source, and ten more. By default the run's search.max_len_ratio: 2,
    or none for an imported model."""

    def search(self, *, max_len: int, run: SearchConfig = SearchConfig()) -> Search:
        """What is asked for, and `max_len` and the run's own search where nothing is.

        Raises ValueError for what cannot be.
        """
        only_sampling = {"temperature": 1.0, "top_k": None, "top_p": None}
        if not self.sample:
            for name, default in only_sampling.items():
                if getattr(self, name) != default:
                    raise ValueError(f"--{name.replace('_', '-')}: expected only with --sample")
        lengths = LengthConfig(
            min_len=self.min_len or run.min_len,
            min_len_ratio=self.min_len_ratio,
            max_len=self.max_len or max_len,
            max_len_growth=0.0 if self.max_len else run.max_len_growth,
            max_len_ratio=run.max_len_ratio if self.max_len_ratio is None else self.max_len_ratio,
            **run.of_vocabulary,
        )
        given = {field.name: getattr(lengths, field.name) for field in dataclasses.fields(lengths)}
        if self.sample:
            return SamplingConfig(
                **given,
                num_samples=self.nbest,
                **{name: getattr(self, name) for name in only_sampling},
            )
        beam_size = run.beam_size if self.beam is None else self.beam
        if beam_size == 1 and self.nbest == 1:
            return lengths
        return BeamConfig(
            **given,
            beam_size=beam_size,
            num_hypotheses=self.nbest,
            length_penalty=self.length_penalty or run.length_penalty,
            alpha=run.alpha if self.alpha is None else self.alpha,
            stopping=self.stopping or run.stopping,
            renormalize=run.renormalize,
        )


DEFAULT_SEARCH = SearchOptions()
