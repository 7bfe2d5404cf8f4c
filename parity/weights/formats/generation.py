"""How `generate` of `transformers` is configured to decode, in our words."""

from typing import Any

from parity.weights.formats.fields import Fields
from transformer_config import BeamConfig, LengthConfig, TransformerConfig
from transformer_config.decoding import Stopping

DEFAULTS: dict[str, Any] = {
    "max_length": 20,
    "max_new_tokens": None,
    "min_length": 0,
    "min_new_tokens": None,
    "num_beams": 1,
    "num_return_sequences": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "do_sample": False,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}
"""What `generate` has for fields that a file leaves out, or sets to null."""

_STOPPING: dict[Any, Stopping] = {False: "transformers", True: "transformers_early", "never": "transformers_never"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": (None,),
    "constraints": (None,),
    "diversity_penalty": (None, 0.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None,),
    "renormalize_logits": (None, False),
    "repetition_penalty": (None, 1.0),
    "sequence_bias": (None,),
    "stop_strings": (None,),
    "watermarking_config": (None,),
}
"""What would change what is found, with the values that do not."""


def read_generation(fields: Fields, config: TransformerConfig) -> LengthConfig:
    """The search: a BeamConfig, or for one beam a LengthConfig, which is greedy.

    Fields that have nothing to do with decoding are left alone: old files have them in the model's own config. Padding
    is never chosen, which `generate` allows and no trained model does. Raises FieldError for what we do not have.
    """
    for name, neutral in _NEUTRAL.items():
        fields.expect(name, *neutral, why="ours has no such thing")
    for name, ours in (("decoder_start_token_id", "bos_id"), ("eos_token_id", "eos_id"), ("pad_token_id", "pad_id")):
        fields.expect(name, None, getattr(config, ours), why=f"the model's own {ours}")
    if _of(fields, "do_sample"):
        raise fields.error("do_sample", "false: draws of another library cannot be repeated")
    forced_end = _of(fields, "forced_eos_token_id")
    if forced_end not in (None, config.eos_id):
        raise fields.error("forced_eos_token_id", f"null or {config.eos_id}, the end")
    new, least = _of(fields, "max_new_tokens"), _of(fields, "min_new_tokens")
    # Lengths of `generate` count what a target starts with.
    lengths: dict[str, Any] = {
        "max_len": fields.integer("max_length", least=2) - 1 if new is None else new,
        "min_len": max(0, _of(fields, "min_length") - 1) if least is None else least,
        "never": _never(fields, config),
        "first_id": _of(fields, "forced_bos_token_id"),
        "forced_end": forced_end is not None,
    }
    beams, early = _of(fields, "num_beams"), _of(fields, "early_stopping")
    if early not in _STOPPING:
        raise fields.error("early_stopping", "false, true or 'never'")
    if beams == 1 and _of(fields, "num_return_sequences") == 1:
        return LengthConfig(**lengths)
    return BeamConfig(
        **lengths,
        beam_size=beams,
        num_hypotheses=_of(fields, "num_return_sequences"),
        alpha=_of(fields, "length_penalty"),
        stopping=_STOPPING[early],
    )


def write_generation(search: LengthConfig | None, config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `read_generation`; without a search only what the model itself says."""
    values: dict[str, Any] = {
        "decoder_start_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "pad_token_id": config.pad_id,
    }
    if search is None:
        return values
    never = {config.pad_id, config.bos_id} if search.never is None else set(search.never)
    values |= {
        "bad_words_ids": [[id_] for id_ in sorted(never - {config.eos_id})] or None,
        "forced_bos_token_id": search.first_id,
        "forced_eos_token_id": config.eos_id if search.forced_end else None,
        "max_length": search.max_len + 1,
        "min_length": search.min_len + 1 if search.min_len else 0,
    }
    if isinstance(search, BeamConfig):
        early = {ours: theirs for theirs, ours in _STOPPING.items()}.get(search.stopping, False)
        values |= {
            "num_beams": search.beam_size,
            "num_return_sequences": search.num_hypotheses,
            "length_penalty": 0.0 if search.length_penalty == "none" else search.alpha,
            "early_stopping": early,
        }
    return values


def _of(fields: Fields, name: str) -> Any:
    value = fields.get(name)
    return DEFAULTS[name] if value is None else value


def _never(fields: Fields, config: TransformerConfig) -> tuple[int, ...]:
    words = _of(fields, "bad_words_ids") or []
    if any(len(word) != 1 for word in words):
        raise fields.error("bad_words_ids", "words of one piece")
    ids = {word[0] for word in words} | set(_of(fields, "suppress_tokens") or []) | {config.pad_id}
    if config.eos_id in ids - {config.pad_id}:
        raise fields.error("bad_words_ids", "the end not among them")
    return tuple(sorted(ids - {config.eos_id}))
