"""What a run needs of a tokenizer, whoever made it: text to piece ids and back, and which ids stand for no text."""

import abc
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from transformer_config import TransformerConfig

Side = Literal["source", "target"]
SPACE = "␣"
"""How a space in a piece is shown."""


class Tokenizer(abc.ABC):
    """Text to piece ids and back.

    A source is what the encoder reads, its end included; a target is what the decoder is to predict, its end included,
    and the tag of its language at its beginning if the model has such tags.
    """

    pad_id: int
    bos_id: int
    """What the decoder reads first."""
    eos_id: int

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Every id is below it."""

    @abc.abstractmethod
    def encode_sources(self, lines: Sequence[str]) -> list[list[int]]:
        """Ids of each line as the encoder reads them."""

    @abc.abstractmethod
    def encode_targets(self, lines: Sequence[str]) -> list[list[int]]:
        """Ids of each line as the decoder is to predict them."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text that each row of target ids spells up to its first end.

        Special ids are skipped. Raises ValueError for an id outside the vocabulary.
        """

    @abc.abstractmethod
    def readable(self, ids: Sequence[int], side: Side) -> tuple[str, ...]:
        """Each piece as text in which nothing is invisible, for people to read."""

    @abc.abstractmethod
    def to_json(self) -> str:
        """All of it, as `save` writes it."""

    def expect_model(self, model: TransformerConfig) -> None:
        """Raises ValueError for a model with other ids of padding, start and end."""
        for name in ("pad_id", "bos_id", "eos_id"):
            if getattr(model, name) != getattr(self, name):
                raise ValueError(
                    f"expected a tokenizer with the model's {name}={getattr(model, name)}, got {getattr(self, name)}"
                )

    @property
    def sha256(self) -> str:
        """Of all that it does."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Write one JSON file, at once: a process that is killed here leaves the old file or the new one, no half."""
        beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(self.to_json(), encoding="utf-8")
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
