"""How `generate` of `transformers` is configured to decode, in our words."""

import functools
from collections.abc import Callable
from typing import Any

from parity.weights.formats.fields import FieldError, Fields
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
    "renormalize_logits": False,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}
"""What `generate` has for fields that a file leaves out, or sets to null."""

_STOPPING: dict[Any, Stopping] = {False: "transformers", True: "transformers_early", "never": "transformers_never"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "assistant_early_exit": (None,),
    "begin_suppress_tokens": (None,),
    "cache_implementation": (None, "dynamic", "static", "offloaded", "offloaded_static"),
    "constraints": (None,),
    "diversity_penalty": (None, 0.0),
    "dola_layers": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1.0),
    "max_time": (None,),
    "no_repeat_ngram_size": (None, 0),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0.0),
    "prompt_lookup_num_tokens": (None,),
    "remove_invalid_values": (None, False),
    "repetition_penalty": (None, 1.0),
    "sequence_bias": (None,),
    "stop_strings": (None,),
    "token_healing": (None, False),
    "use_mtp": (None, False),
    "watermarking_config": (None,),
}
"""What would change what is found, with the values that do not."""

_IGNORED: dict[str, tuple[str, ...]] = {
    "says where the file comes from": ("_commit_hash", "_from_model_config", "transformers_version"),
    "of draws, of which there are none": (
        *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    ),
    "says what else is returned": (
        *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
    ),
    "says how it is computed": (
        *("use_cache", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory"),
        *("compile_config", "disable_compile", "continuous_batching_config"),
    ),
    "of a second model that helps, which there is not": (
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
        "speculation_type",
    ),
}
"""What does not change what is found, by the reason."""


def read_generation_file(fields: Fields, config: TransformerConfig) -> LengthConfig:
    """The search that a generation_config.json describes, of which each field is used, ignored or refused.

    Raises FieldError for what we do not have, and for fields that are not known.
    """
    for reason, names in _IGNORED.items():
        fields.ignore(names, reason)
    if fields.values.get("decoder_start_token_id") is None:
        fields.expect(
            "bos_token_id", None, config.bos_id, why="it starts targets where decoder_start_token_id does not"
        )
    else:
        fields.ignore(["bos_token_id"], "decoder_start_token_id is what targets start with")
    search = read_generation(fields, config)
    fields.finish()
    return search


def read_generation(fields: Fields, config: TransformerConfig) -> LengthConfig:
    """The search: a BeamConfig, or for one beam a LengthConfig, which is greedy.

    Fields that have nothing to do with decoding are left alone: old files have them in the model's own config. Padding
    is never chosen, which `generate` allows and no trained model does. Raises FieldError for what we do not have.
    """
    for name, neutral in _NEUTRAL.items():
        fields.expect(name, *neutral, why="ours has no such thing")
    for name, ours in (("decoder_start_token_id", "bos_id"), ("eos_token_id", "eos_id"), ("pad_token_id", "pad_id")):
        fields.expect(name, None, getattr(config, ours), why=f"the model's own {ours}")
    fields.expect("do_sample", None, False, why="draws of another library cannot be repeated")
    fields.expect("forced_eos_token_id", None, config.eos_id, why="the end is what can be forced")
    early = _or_default(fields, "early_stopping", fields.get)
    if not isinstance(early, (bool, str)) or early not in _STOPPING:
        raise fields.error("early_stopping", "false, true or 'never'")
    renormalize = _or_default(fields, "renormalize_logits", fields.flag)  # of one beam it changes nothing
    beams, many = _integer(fields, "num_beams", least=1), _integer(fields, "num_return_sequences", least=1)
    alpha = _or_default(fields, "length_penalty", fields.number)
    try:
        lengths = _lengths(fields, config)
        if beams == 1 and many == 1:
            return LengthConfig(**lengths)
        return BeamConfig(
            **lengths,
            beam_size=beams,
            num_hypotheses=many,
            alpha=alpha,
            renormalize=renormalize,
            stopping=_STOPPING[early],
        )
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(f"{fields.file}: {error}") from error


def _lengths(fields: Fields, config: TransformerConfig) -> dict[str, Any]:
    """Lengths of `generate` count what a target starts with."""
    most, least = _integer(fields, "max_length", least=2) - 1, max(0, _integer(fields, "min_length") - 1)
    if fields.get("max_new_tokens") is not None:
        most = _integer(fields, "max_new_tokens", least=1)
    if fields.get("min_new_tokens") is not None:
        least = _integer(fields, "min_new_tokens")
    first = fields.get("forced_bos_token_id")
    return {
        "max_len": most,
        "min_len": least,
        "never": _never(fields, config),
        "first_id": None if first is None else fields.integer("forced_bos_token_id"),
        "forced_end": fields.get("forced_eos_token_id") is not None,
    }


def otherwise_in_generation(search: LengthConfig | None) -> tuple[str, ...]:
    """What `write_generation` cannot say of a search, in words."""
    notes = []
    if isinstance(search, BeamConfig):
        if search.length_penalty == "gnmt":
            notes.append("generate divides by length^alpha, not by gnmt's penalty")
        if search.stopping not in _STOPPING.values():
            notes.append(f"generate has no stopping={search.stopping!r}: early_stopping is false")
    if search is not None and (search.max_len_growth or search.max_len_ratio is not None):
        notes.append("generate has one limit on length for every sentence, max_length")
    return tuple(notes)


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
            "renormalize_logits": search.renormalize,
        }
    return values


def _or_default(fields: Fields, name: str, ask: Callable[[str], Any]) -> Any:
    return DEFAULTS[name] if fields.get(name) is None else ask(name)


def _integer(fields: Fields, name: str, *, least: int = 0) -> int:
    return int(_or_default(fields, name, functools.partial(fields.integer, least=least)))


def _never(fields: Fields, config: TransformerConfig) -> tuple[int, ...]:
    words, suppressed = fields.get("bad_words_ids"), fields.get("suppress_tokens")
    if not isinstance(words, (list, type(None))) or not all(_are_ids(word) and len(word) == 1 for word in words or []):
        raise fields.error("bad_words_ids", "words of one piece")
    if suppressed is not None and not _are_ids(suppressed):
        raise fields.error("suppress_tokens", "ids of pieces")
    ids = {word[0] for word in words or []} | set(suppressed or []) | {config.pad_id}
    if config.eos_id in ids - {config.pad_id}:
        raise fields.error("bad_words_ids", "the end not among them")
    return tuple(sorted(ids - {config.eos_id}))


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(id_) is int and id_ >= 0 for id_ in value)
