"""What a layout of weights has to say of itself, so that weights can be carried from it and to it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.weights.formats.fields import FieldError, Fields
from parity.weights.mapping import WeightMapping
from transformer_config import TransformerConfig


class Format(ABC):
    """One layout. Everything goes by way of the names of the torch reference, so that N formats need N tables."""

    name: str
    """As the command line has it."""
    title: str
    """Whose layout it is, in a few words."""

    can_be_read = True
    """Whether `read_model` can make a model of its files."""
    stores_computed = True
    """Whether a file may hold what `computed` gives, or the class always computes it."""

    @abstractmethod
    def read(self, fields: Fields) -> TransformerConfig:
        """The model that a config stands for. Raises FieldError if it is none of ours, or has unknown fields."""

    def config_of(self, fields: Fields) -> TransformerConfig:
        """As `read`, and whatever makes no model is a FieldError that names the file."""
        try:
            return self.read(fields)
        except FieldError:
            raise
        except ValueError as error:
            raise FieldError(f"{fields.file}: {error}") from error

    @abstractmethod
    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """The config of this format nearest to ours; `exported` compares what it is read back as."""

    @abstractmethod
    def mapping(self, config: TransformerConfig) -> WeightMapping:
        """From this layout to the torch reference's."""

    def computed(self, config: TransformerConfig) -> Mapping[str, np.ndarray]:
        """Tensors that `mapping` asks for and that the format's own class computes instead of storing them."""
        return {}
