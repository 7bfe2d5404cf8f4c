"""A state dict without a config: what names and shapes say is measured, the rest is the layout's usual or given."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from parity.weights.checkpoint import Checkpoint
from parity.weights.formats.fields import FieldError, Fields
from parity.weights.formats.format import Format
from parity.weights.lazy import Converted
from parity.weights.mapping import Rule, WeightMapping
from transformer_config import TransformerConfig

SRC, TGT, OUTPUT = "src_embedding.weight", "tgt_embedding.weight", "output_projection.weight"
TABLES = ("src_positions.table", "tgt_positions.table")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateDict(Format):
    """One layout."""

    name: str
    title: str
    usual: Mapping[str, Any]
    """Fields of ours as this layout has them, unless it is said otherwise."""
    rules: tuple[Rule, ...]
    """To the names of the torch reference, of a model in which nothing is tied."""

    def takes(self, names: Collection[str]) -> bool:
        """Whether all these are names of this layout."""
        mapping = WeightMapping(self.rules)
        return all(mapping.takes(name) for name in names)

    def measure(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Fields of ours that names and shapes say.

        Raises FieldError that names a tensor that is not there, MappingError for those of another layout.
        """
        here = Converted(WeightMapping(self.rules), checkpoint.with_aliases())

        def shape(name: str, rank: int = 2) -> tuple[int, ...]:
            if name not in here:
                raise FieldError(f"{self.name}: expected a tensor for our {name!r}, found none")
            found = here[name].shape
            if len(found) < rank:
                raise FieldError(f"{self.name}: expected {rank} axes of our {name!r}, got shape {found}")
            return found

        def tensor(name: str) -> str:
            """The one that it is, whatever it is called besides."""
            return checkpoint.aliases.get(here.source(name), here.source(name)) if name in here else ""

        src_vocab_size, d_model = shape(SRC)[:2]
        tie = self._tie(tensor(SRC), tensor(TGT), tensor(OUTPUT))
        found = {
            "src_vocab_size": src_vocab_size,
            "tgt_vocab_size": shape(SRC if tie == "all" else TGT)[0],
            "d_model": d_model,
            "d_ff": shape("encoder.layers.0.feed_forward.linear1.weight")[0],
            "num_encoder_layers": _layers(here, "encoder"),
            "num_decoder_layers": _layers(here, "decoder"),
            "use_bias": "encoder.layers.0.feed_forward.linear1.bias" in here,
            "final_norm": "always" if "encoder.final_norm.weight" in here else "never",
            "tie_embeddings": tie,
            "output_bias": "trained" if {"output_projection.bias", "output_bias"} & set(here) else "never",
        }
        return found | ({"max_len": shape(TABLES[0])[-2]} if TABLES[0] in here else {})

    def _tie(self, src: str, tgt: str, output: str) -> str:
        if not output:
            return "output" if tgt and src != tgt else "all"
        if src == tgt != output:
            raise FieldError(
                f"{self.name}: expected {src!r} to be the output projection too, where it is both embeddings"
            )
        return "all" if src == tgt else "output" if tgt == output else "none"

    def read(self, fields: Fields) -> TransformerConfig:
        """See `Format.read`; the fields are ours. Raises FieldError without num_heads, which stands in no tensor."""
        if "num_heads" not in fields.values:
            raise FieldError(f"{fields.file}: expected num_heads, which no tensor says, such as --set num_heads=8")
        fields = dataclasses.replace(fields, defaults=self.usual)
        known = [field.name for field in dataclasses.fields(TransformerConfig)]
        config = TransformerConfig(
            **{name: fields.get(name) for name in known if name in fields.values or name in self.usual}
        )
        fields.finish()
        return config

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """See `Format.write`."""
        return config.to_dict()

    def mapping(self, config: TransformerConfig) -> WeightMapping:
        """See `Format.mapping`."""
        tied = {"none": (), "output": ((OUTPUT, TGT),), "all": ((OUTPUT, SRC), (TGT, SRC))}[config.tie_embeddings]
        here = {str(rule.target): str(rule.source) for rule in self.rules}
        source_aliases = {here[second]: here[first] for second, first in tied}
        again = {second for second, _ in tied}
        rules = [rule for rule in self.rules if rule.target not in again]
        if tied:
            rules = [_renamed(rule, "output_projection.bias", "output_bias") for rule in rules]
        target_aliases = {TGT: SRC} if TGT in again else {}
        if TABLES[0] in here and TABLES[1] not in here:
            target_aliases[TABLES[1]] = TABLES[0]  # one buffer for both sides
        return WeightMapping(rules, source_aliases=source_aliases, target_aliases=target_aliases)


def _renamed(rule: Rule, target: str, new: str) -> Rule:
    return Rule(rule.source, new, rule.ops) if rule.target == target else rule


def _layers(places: Iterable[str], stack: str) -> int:
    start = f"{stack}.layers."
    numbers = {name.removeprefix(start).partition(".")[0] for name in places if name.startswith(start)}
    if not numbers or numbers != {str(i) for i in range(len(numbers))}:
        raise FieldError(f"expected layers of the {stack} numbered from 0, got {sorted(numbers) or 'none'}")
    return len(numbers)
