"""The layouts of our own two models."""

import dataclasses

from parity.weights.formats.state_dict import SRC, TGT, StateDict
from parity.weights.mapping import Rule, WeightMapping
from parity.weights.twins import twin_mapping
from transformer_config import TransformerConfig

_TWINS = twin_mapping(tied=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ours(StateDict):
    """What is tied stands once, and an untied output projection has the bias."""

    def mapping(self, config: TransformerConfig) -> WeightMapping:
        """See `Format.mapping`."""
        tied = {TGT: SRC} if config.tie_embeddings == "all" else {}
        rules = [rule for rule in self.rules if rule.target not in tied]
        return WeightMapping(rules, source_aliases=tied, target_aliases=tied)


TORCH_REFERENCE = Ours(
    name="torch-reference",
    title="our torch reference's state dict",
    usual={},
    rules=tuple(Rule(rule.source, rule.source) for rule in _TWINS.rules),
)
FLAX = Ours(
    name="flax",
    title="our Flax twin's parameters",
    usual={},
    rules=_TWINS.inverse().rules,
)
OURS = (TORCH_REFERENCE, FLAX)
