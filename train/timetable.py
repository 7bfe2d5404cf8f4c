"""After which steps there is an evaluation."""

import dataclasses

from train.config import EvaluationConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timetable:
    """Of one run. Steps are counted from 1."""

    config: EvaluationConfig
    steps_per_epoch: int
    last_step: int
    """Of the run, as it is configured now: it may end earlier, or be continued further."""

    @property
    def _intervals(self) -> list[int]:
        by_steps = [] if self.config.every_steps is None else [self.config.every_steps]
        return [self.config.every_epochs * self.steps_per_epoch, *by_steps]

    def next(self, step: int) -> int:
        """The first evaluation at `step` or later; the last step is evaluated whatever it is.

        >>> Timetable(config=EvaluationConfig(every_steps=4), steps_per_epoch=10, last_step=15).next(9)
        10
        """
        return min([self.last_step, *(-(-step // every) * every for every in self._intervals)])

    def is_regular(self, step: int) -> bool:
        """Whether `step` is evaluated wherever the run may end."""
        return any(step % every == 0 for every in self._intervals)

    def has_regular_bleu(self, step: int) -> bool:
        """Whether BLEU belongs to it."""
        every = self.config.bleu_every_epochs
        return every is not None and step % (every * self.steps_per_epoch) == 0

    def has_bleu(self, step: int) -> bool:
        """The same, at the last step too where BLEU is measured at all."""
        return self.has_regular_bleu(step) or (self.config.bleu_every_epochs is not None and step >= self.last_step)
