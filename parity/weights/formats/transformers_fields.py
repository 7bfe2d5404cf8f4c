"""Fields that every config of `transformers` may have and that do not change what the model computes."""

from parity.weights.formats.fields import Fields

_BOOKKEEPING = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "id2label",
    "label2id",
    "problem_type",
    "tokenizer_class",
    "transformers_version",
    "_commit_hash",
)
_STORAGE = ("dtype", "torch_dtype")
_OUTPUTS = (
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "return_dict",
    "return_dict_in_generate",
    "use_cache",
    "torchscript",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_output_attentions",
    "_experts_implementation_internal",
)
_OTHER_TASKS = (
    "classif_dropout",
    "classifier_dropout",
    "finetuning_task",
    "num_labels",
    "task_specific_params",
    "prefix",
    "tie_encoder_decoder",
    "cross_attention_hidden_size",
)
_INITIAL = ("init_std",)
_GENERATION = (
    "max_length",
    "min_length",
    "num_beams",
    "length_penalty",
    "early_stopping",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "num_return_sequences",
    "num_beam_groups",
    "diversity_penalty",
    "exponential_decay_length_penalty",
    "remove_invalid_values",
    "bos_token_id",
    "sep_token_id",
)
_OF_OTHER_MODELS = {
    "add_bias_logits": False,
    "add_cross_attention": False,
    "add_final_layer_norm": False,
    "chunk_size_feed_forward": 0,
    "extra_pos_embeddings": 0,
    "force_bos_token_to_be_generated": False,
    "gradient_checkpointing": False,
    "is_decoder": False,
    "normalize_before": False,
    "normalize_embedding": False,
    "pruned_heads": {},
    "static_position_embeddings": True,
    "use_bfloat16": False,
}
"""Left over in old config files, with the only value that means what the class does."""


def account_for_the_usual(fields: Fields) -> None:
    """Fields that have nothing to do with this architecture, or with what it computes."""
    fields.ignore(_BOOKKEEPING, "says where the file comes from")
    fields.ignore(_STORAGE, "tensors say their dtype themselves")
    fields.ignore(_OUTPUTS, "says what else is returned, or how it is computed")
    fields.ignore(_OTHER_TASKS, "of another task")
    fields.ignore(_INITIAL, "weights are given")
    fields.ignore(_GENERATION, "of decoding, which is read from the same file where it is asked for")
    fields.expect("is_encoder_decoder", True)
    for name, only in _OF_OTHER_MODELS.items():
        fields.expect(name, only, why="the class does not read this field")
    shapes = {"hidden_size": "d_model", "num_hidden_layers": "encoder_layers"}
    for other, name in (*shapes.items(), ("num_attention_heads", "encoder_attention_heads")):
        if other in fields.values:
            fields.same(other, name)
