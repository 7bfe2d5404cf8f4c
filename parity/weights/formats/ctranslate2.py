"""CTranslate2, which is only written: it merges and renames for speed. `ctranslate2_export` makes its files."""

from typing import Any

from parity.weights.formats.fields import FieldError, Fields
from parity.weights.formats.format import Format
from parity.weights.formats.ours import TORCH_REFERENCE
from parity.weights.mapping import WeightMapping
from transformer_config import TransformerConfig

_USUAL = {"norm_formula": "variance", "final_norm": "if_pre", "window": None, "interpolated_len": None}


class CTranslate2(Format):
    """Its config is made out of ours when it is written, so what is read here is ours."""

    name = "ctranslate2"
    title = "a folder for CTranslate2's Translator"
    can_be_read = False

    def read(self, fields: Fields) -> TransformerConfig:
        """See `Format.read`."""
        return TransformerConfig(**fields.values)

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """See `Format.write`. Raises FieldError that names every field that CTranslate2 does not have."""
        odd = [
            f"{name}={getattr(config, name)!r}, where it has {expected!r}"
            for name, expected in _USUAL.items()
            if getattr(config, name) != expected
        ]
        if odd:
            raise FieldError(f"{self.name}: expected a model that it can express, got {'; '.join(odd)}")
        return config.to_dict()

    def mapping(self, config: TransformerConfig) -> WeightMapping:
        """See `Format.mapping`."""
        return TORCH_REFERENCE.mapping(config)
