"""fairseq's checkpoints, whose architecture FSMT of `transformers` has too: the same weights, the same logits."""

import argparse

import numpy as np
import pytest
import torch

from parity.twins_proof import sinusoids
from parity.weights.checkpoint import StoreError
from parity.weights.fairseq_files import read_fairseq
from parity.weights.formats import FieldError
from parity.weights.models import detect, read_model, write_model
from parity.weights.rules import bits_equal
from tests.parity.formats.foreign import batch, random_model, their_logits
from tests.parity.formats.test_transformers import assert_near, reference


def arguments(config, **changes):
    values = {
        "arch": "transformer_wmt_en_de_big",
        "task": "translation",
        "lr": [0.0007],
        "activation_fn": {"swish": "swish", "gelu_new": "gelu_accurate"}.get(
            config.activation_function, config.activation_function
        ),
        "dropout": 0.1,
        "encoder_embed_dim": config.d_model,
        "decoder_embed_dim": config.d_model,
        "decoder_output_dim": config.d_model,
        "decoder_input_dim": config.d_model,
        "encoder_ffn_embed_dim": config.encoder_ffn_dim,
        "decoder_ffn_embed_dim": config.decoder_ffn_dim,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "encoder_attention_heads": config.encoder_attention_heads,
        "decoder_attention_heads": config.decoder_attention_heads,
        "encoder_normalize_before": False,
        "decoder_normalize_before": False,
        "encoder_learned_pos": False,
        "decoder_learned_pos": False,
        "no_scale_embedding": not config.scale_embedding,
        "share_all_embeddings": config.tie_word_embeddings,
        "share_decoder_input_output_embed": config.tie_word_embeddings,
        "adaptive_softmax_cutoff": None,
        "max_source_positions": config.max_position_embeddings,
        "max_target_positions": config.max_position_embeddings,
    }
    return argparse.Namespace(**{**values, **changes})


def state_of(model, *, old):
    """As fairseq names it; with `old` as it did before 2020."""
    state = {}
    for name, tensor in model.state_dict().items():
        if "embed_positions" not in name:
            state[name.removeprefix("model.")] = tensor
    if old:
        for name in [name for name in state if name.endswith("q_proj.weight")]:
            path = name.removesuffix("q_proj.weight")
            for kind in ("weight", "bias"):
                parts = [state.pop(f"{path}{part}_proj.{kind}") for part in "qkv"]
                state[f"{path}in_proj_{kind}"] = torch.cat(parts)
    for stack in ("encoder", "decoder"):
        state[f"{stack}.version"] = torch.tensor([3.0])
        state[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
    return state


@pytest.mark.parametrize("new_config", [False, True], ids=["args", "cfg"])
@pytest.mark.parametrize("old", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("seed", [0, 1])
def test_logits(seed, old, new_config, tmp_path):
    model = random_model("fsmt", seed)
    given = arguments(model.config)
    beside = {"args": None, "cfg": {"model": given}} if new_config else {"args": given}
    torch.save({**beside, "model": state_of(model, old=old), "extra_state": {"epoch": 3}}, tmp_path / "model.pt")
    read = read_fairseq(tmp_path / "model.pt")
    assert read.ignored["lr"] == "no argument of the architecture"
    config = read.config.replace(dtype="float64", param_dtype="float64")
    module = reference(config, {name: np.asarray(array, np.float64) for name, array in read.weights.items()})
    src, tgt_in, tgt = batch(config, seed)
    real = tgt != config.pad_id
    ours = module(torch.from_numpy(src), torch.from_numpy(tgt_in)).detach().numpy()
    assert_near(ours[real], their_logits(model, src, tgt_in).detach().numpy()[real], what="logits")


def test_it_is_known_by_itself_and_carried_on(tmp_path):
    model = random_model("fsmt", 0).float()
    torch.save({"args": arguments(model.config), "model": state_of(model, old=True)}, tmp_path / "m.pt")
    assert detect(tmp_path / "m.pt") == "fairseq"
    read = read_model(tmp_path / "m.pt")
    write_model(read, tmp_path / "a.safetensors", "flax", source=tmp_path / "m.pt", sinusoids=sinusoids)
    again = read_model(tmp_path / "a.safetensors")
    assert again.config == read.config
    assert all(bits_equal(again.weights[name], read.weights[name]) for name in again.weights)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layernorm_embedding": True}, r"layernorm_embedding: expected None or False: it makes another architecture"),
        ({"decoder_attention_heads": 77}, r"decoder_attention_heads: expected the same as encoder_attention_heads"),
        ({"activation_fn": "linear"}, r"activation_fn: expected one of relu"),
        ({"decoder_output_dim": 5}, r"decoder_output_dim: expected .*: embeddings are not projected"),
    ],
)
def test_another_architecture_is_refused(changes, message, tmp_path):
    model = random_model("fsmt", 0)
    torch.save({"args": arguments(model.config, **changes), "model": state_of(model, old=False)}, tmp_path / "m.pt")
    with pytest.raises(FieldError, match=rf"m\.pt: {message}"):
        read_fairseq(tmp_path / "m.pt")


def test_what_is_no_checkpoint_is_named(tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "m.pt")
    with pytest.raises(StoreError, match=r"m\.pt: expected a checkpoint of fairseq"):
        read_fairseq(tmp_path / "m.pt")
    torch.save({"model": {}, "args": print}, tmp_path / "m.pt")
    with pytest.raises(StoreError, match="print; it was not run"):
        read_fairseq(tmp_path / "m.pt")
