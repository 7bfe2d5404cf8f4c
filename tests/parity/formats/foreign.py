"""Random models of the real classes of `transformers`, and what they compute, for comparing."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from transformers.models.fsmt import modeling_fsmt

from parity.weights.formats import FORMATS, Fields, fsmt, m2m100, marian

CLASSES = {
    "marian": (transformers.MarianConfig, transformers.MarianMTModel, marian.DEFAULTS),
    "fsmt": (transformers.FSMTConfig, transformers.FSMTForConditionalGeneration, fsmt.DEFAULTS),
    "m2m_100": (transformers.M2M100Config, transformers.M2M100ForConditionalGeneration, m2m100.DEFAULTS),
}


def random_fields(name, seed):
    """A small config, and no two dimensions alike where they need not be."""
    rng = np.random.default_rng([len(name), seed])
    heads, head_dim = int(rng.integers(1, 5)), int(rng.integers(4, 9))
    width = heads * head_dim
    vocab = int(rng.integers(40, 60))
    fields = {
        "d_model": width,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": width + 7,
        "decoder_ffn_dim": width + 7,
        "encoder_layers": int(rng.integers(1, 4)),
        "decoder_layers": int(rng.integers(1, 4)),
        "activation_function": str(rng.choice(["relu", "gelu", "gelu_new", "swish"])),
        "scale_embedding": bool(rng.integers(2)),
        "max_position_embeddings": 40,
    }
    if name == "marian":
        shared = bool(rng.integers(2))
        fields |= {
            "vocab_size": vocab,
            "decoder_vocab_size": vocab if shared else vocab + 9,
            "share_encoder_decoder_embeddings": shared,
            "tie_word_embeddings": shared or bool(rng.integers(2)),
            "pad_token_id": vocab - 1,
            "decoder_start_token_id": vocab - 1,
            "eos_token_id": 0,
            "forced_eos_token_id": 0,
        }
    elif name == "fsmt":
        tied = bool(rng.integers(2))
        fields |= {"src_vocab_size": vocab, "tgt_vocab_size": vocab if tied else vocab + 9, "tie_word_embeddings": tied}
    else:
        fields |= {"vocab_size": vocab}
    return fields


def random_model(name, seed, **changes):
    """A model in float64 with every weight drawn away from 0 and 1, the positions' tables as the class makes them."""
    config_class, model_class, _ = CLASSES[name]
    config = config_class(**{**random_fields(name, seed), **changes})
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "embed_positions" not in key:
                noise = torch.randn(tensor.shape) * (0.3 if tensor.ndim == 1 else tensor.shape[-1] ** -0.5)
                tensor.copy_(noise + (1.0 if key.endswith("norm.weight") else 0.0))
    return model.double()


def fields_of(model):
    """The config as a file has it."""
    name = model.config.model_type
    return Fields(model.config.to_dict(), file="config.json", defaults=CLASSES[name][2])


def carried(model):
    """Our config, and the weights by the names of the torch reference."""
    format_ = FORMATS[model.config.model_type]
    config = format_.read(fields_of(model)).replace(dtype="float64", param_dtype="float64")
    stored = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    computed = {name: table.astype(np.float64) for name, table in format_.computed(config).items()}
    return config, format_.mapping(config).apply(computed | stored)


def batch(config, seed, *, rows=4, src_len=9, tgt_len=7):
    """Source padded on the right and on the left, target on the right, as that class shifts it."""
    rng = np.random.default_rng(seed)

    def ids(vocab, length):
        special = {config.pad_id, config.bos_id, config.eos_id}
        return rng.choice([i for i in range(vocab) if i not in special], (rows, length))

    src, tgt = ids(config.src_vocab_size, src_len), ids(config.tgt_vocab_size, tgt_len)
    src[:, -1] = config.eos_id
    src[1, 5:], src[1, 4] = config.pad_id, config.eos_id
    src[2, :3] = config.pad_id
    tgt_in = np.concatenate([np.full((rows, 1), config.bos_id), tgt[:, :-1]], axis=1)
    tgt[3, 4], tgt[3, 5:], tgt_in[3, 5:] = config.eos_id, config.pad_id, config.pad_id
    return src, tgt_in, tgt


def their_logits(model, src, tgt_in):
    """With padding masked in the source, and nothing but the future in the target, as `generate` has it."""
    src, tgt_in = torch.from_numpy(src), torch.from_numpy(tgt_in)
    mask = (src != model.config.pad_token_id).long()
    # The class makes its mask in float32 whatever it computes in, and fails in float64.
    modeling_fsmt.fill_with_neg_inf = lambda zeros: zeros.fill_(torch.finfo(zeros.dtype).min)
    return model(input_ids=src, attention_mask=mask, decoder_input_ids=tgt_in, use_cache=False).logits
