"""How translations are searched for: the facts that both twins' decoders share."""

import dataclasses
from typing import Literal

LengthPenalty = Literal["none", "length", "gnmt"]
Stopping = Literal["bound", "transformers", "transformers_early", "transformers_never", "ctranslate2"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """How long a translation must and may be, in pieces; and what may not, or must, stand in it."""

    min_len: int = 0
    """Pieces before the end may come, at least."""
    min_len_ratio: float = 0.0
    """The same, as a share of the source's pieces; the larger of both counts."""
    max_len: int = 256
    """Pieces at most, the end included."""
    max_len_growth: float = 0.0
    """`max_len` is raised to so many pieces for each piece of the source where that is more, as far as the model has
    positions."""
    max_len_ratio: float | None = None
    """If set, at most so many pieces for each piece of the source, and ten more; the smaller of both counts."""
    never: tuple[int, ...] | None = None
    """Ids that are never chosen, the end not among them; by default pad_id and bos_id, unless eos_id is the same."""
    first_id: int | None = None
    """If set, the piece that every translation begins with, such as the tag of a language."""
    forced_end: bool = False
    """Whether the last piece that a translation may have is its end.

    What is forced costs nothing: its log-probability counts as 0, as with the forced tokens of `transformers`."""

    def __post_init__(self) -> None:
        _expect_at_least(self, 1, "max_len")
        _expect_at_least(self, 0, "min_len", "min_len_ratio", "max_len_growth")
        for name, ids in (("never", self.never or ()), ("first_id", () if self.first_id is None else (self.first_id,))):
            if any(not isinstance(id_, int) or id_ < 0 for id_ in ids):
                raise ValueError(f"{name}: expected ids of at least 0, got {getattr(self, name)}")
        if self.min_len >= self.max_len:
            raise ValueError(f"min_len: expected less than max_len={self.max_len}, got {self.min_len}")
        if self.max_len_ratio is not None and not 0.0 < self.max_len_ratio < float("inf"):
            raise ValueError(f"max_len_ratio: expected more than 0, got {self.max_len_ratio}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamConfig(LengthConfig):
    """Beam search: how wide, how hypotheses of unequal length compare, and when a sentence is over.

    The score of a hypothesis is the sum of its log-probabilities, its end included, divided by a penalty for its
    length. Lengths count pieces, the end of the sentence included.
    """

    beam_size: int = 4
    num_hypotheses: int = 1
    """The best so many are returned; at most `beam_size`."""
    length_penalty: LengthPenalty = "length"
    """`length`: length^alpha; `gnmt`: ((5 + length) / 6)^alpha (Wu et al. 2016, section 7); `none`: 1."""
    alpha: float = 0.6
    renormalize: bool = False
    """Whether log-probabilities are those of a distribution over what may follow, so that what is never chosen, and an
    end too early, leave their share to the rest (`renormalize_logits` of `transformers`)."""
    stopping: Stopping = "bound"
    """When a sentence is over.

    - `bound`: `num_hypotheses` have ended, and no beam that goes on can still become better than the worst of them,
      because log-probabilities only fall and the penalty is at most that of the longest that is allowed.
    - `transformers`, `transformers_early`, `transformers_never`: as `generate` of that library with `early_stopping`
      False, True and "never".
    - `ctranslate2`: as CTranslate2's `translate_batch` (4.8.5).

    What has not ended when `max_len` is reached ranks behind all that has, but for the libraries' rules, in which it
    ranks by its score.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect_at_least(self, 1, "beam_size", "num_hypotheses")
        _expect_at_least(self, 0, "alpha")
        if self.num_hypotheses > self.beam_size:
            raise ValueError(f"num_hypotheses: expected at most beam_size={self.beam_size}, got {self.num_hypotheses}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig(LengthConfig):
    """Sampling: pieces drawn from the model's distribution, narrowed or not."""

    num_samples: int = 1
    """Translations of each sentence."""
    temperature: float = 1.0
    """Logits are divided by it: below 1 the likely becomes likelier."""
    top_k: int | None = None
    """If set, drawn from the likeliest so many pieces."""
    top_p: float | None = None
    """If set, drawn from the fewest pieces that together are at least so likely (Holtzman et al. 2020)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect_at_least(self, 1, "num_samples", *([] if self.top_k is None else ["top_k"]))
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(f"temperature: expected more than 0, got {self.temperature}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p: expected a share in (0, 1], got {self.top_p}")


def _expect_at_least(config: LengthConfig, least: int, *names: str) -> None:
    for name in names:
        if not least <= getattr(config, name) < float("inf"):
            raise ValueError(f"{name}: expected at least {least}, got {getattr(config, name)}")
