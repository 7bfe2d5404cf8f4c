import dataclasses
import json
import subprocess
import sys
from collections import Counter

import pytest

from transformer_config import TransformerConfig

tiny = TransformerConfig.tiny
AT_LEAST_1 = [
    *("src_vocab_size", "tgt_vocab_size", "d_model", "d_ff", "num_heads", "max_len"),
    *("num_encoder_layers", "num_decoder_layers"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[
            ({name: 0}, f"{name}: expected at least 1, got 0")
            for name in ("src_vocab_size", "tgt_vocab_size", "d_model")
        ],
        *[({name: 0}, f"{name}: expected at least 1, got 0") for name in ("d_ff", "num_heads", "max_len")],
        *[({name: 0}, f"{name}: expected at least 1, got 0") for name in ("num_encoder_layers", "num_decoder_layers")],
        ({"position_offset": -1}, "position_offset: expected at least 0, got -1"),
        *[
            ({name: value}, rf"{name}: expected a rate in \[0, 1\), got {value}")
            for name, value in (("dropout", 1.0), ("attention_dropout", -0.1), ("activation_dropout", 1.5))
        ],
        ({"attention_block_size": 0}, "attention_block_size: expected at least 1, got 0"),
        ({"norm_eps": 0.0}, r"norm_eps: expected more than 0, got 0\.0"),
        ({"num_heads": 4}, "num_heads: expected a divisor of d_model=30, got 4"),
        ({"d_model": 15}, "d_model: expected an even number, for pairs of sine and cosine, got 15"),
        (
            {"d_model": 2, "num_heads": 1, "positions": "concatenated_half_minus_1"},
            "d_model: expected at least 4, .* got 2",
        ),
        ({"interpolated_len": 32}, r"interpolated_len: expected at least max_len=33 \(and 2\), or None, got 32"),
        ({"max_len": 1, "interpolated_len": 1}, r"interpolated_len: expected at least max_len=1 \(and 2\)"),
        *[({name: 67}, f"{name}: expected an id below 67, got 67") for name in ("pad_id", "bos_id", "eos_id")],
        ({"tie_embeddings": "all"}, "tgt_vocab_size: expected src_vocab_size=71, since tie_embeddings='all' .* got 67"),
        ({"window": -1}, "window: expected at least 0, or None, got -1"),
        (
            {"attention": "library", "attention_dropout": 0.1},
            r"attention_dropout: expected 0 with attention='library', whose .* got 0\.1",
        ),
        ({"activation": "tanh"}, "activation: expected one of relu, gelu, gelu_tanh, silu, got 'tanh'"),
        ({"attention": "flash"}, "attention: expected one of plain, blockwise, library, got 'flash'"),
        ({"dtype": "int8"}, "dtype: expected one of float64, float32, bfloat16, float16, got 'int8'"),
        ({"param_dtype": "f32"}, "param_dtype: expected one of .* got 'f32'"),
        ({"norm_order": "both"}, "norm_order: expected one of post, pre, got 'both'"),
        ({"positions": "rope"}, "positions: expected one of interleaved, .* got 'rope'"),
        ({"tie_embeddings": True}, "tie_embeddings: expected one of none, output, all, got True"),
        ({"d_model": 30.0}, r"d_model: expected an integer, got 30\.0"),
        ({"num_heads": True}, "num_heads: expected an integer, got True"),
        ({"window": "3"}, "window: expected an integer, got '3'"),
        ({"d_ff": None}, "d_ff: expected an integer, got None"),
        ({"dropout": "0.1"}, "dropout: expected a number, got '0.1'"),
        ({"use_bias": 1}, "use_bias: expected True or False, got 1"),
    ],
)
def test_each_wrong_value_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_replace_validates_again():
    assert tiny().replace(d_ff=99).d_ff == 99
    with pytest.raises(ValueError, match="num_heads"):
        tiny().replace(num_heads=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny().d_ff = 3
    with pytest.raises(TypeError):
        TransformerConfig(5)


@pytest.mark.parametrize("config", [tiny(window=2, interpolated_len=40), TransformerConfig.base(), TransformerConfig()])
def test_through_json_and_back(config):
    assert TransformerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_fields_are_named():
    with pytest.raises(ValueError, match="expected fields of TransformerConfig, got unknown heads, n_layers"):
        TransformerConfig.from_dict({"n_layers": 6, "heads": 8, "d_model": 30})


def test_dimensions_of_the_tiny_model_are_pairwise_distinct():
    """P3: no two dimensions alike that could hide a transpose."""
    config = tiny()
    sizes = [config.src_vocab_size, config.tgt_vocab_size, config.d_model, config.d_ff, config.num_heads]
    sizes += [config.head_dim, config.num_encoder_layers, config.num_decoder_layers, config.max_len]
    sizes += [config.attention_block_size]
    assert max(Counter(sizes).values()) == 1


def test_the_papers_numbers():
    """Table 3."""
    base, big = TransformerConfig.base(), TransformerConfig.big()
    assert (base.d_model, base.d_ff, base.num_heads, base.head_dim, base.dropout) == (512, 2048, 8, 64, 0.1)
    assert (big.d_model, big.d_ff, big.num_heads, big.head_dim, big.dropout) == (1024, 4096, 16, 64, 0.3)
    assert base.num_encoder_layers == base.num_decoder_layers == big.num_encoder_layers == 6
    assert (base.norm_order, base.tie_embeddings, base.activation) == ("post", "all", "relu")


def test_sequence_limit():
    assert tiny().sequence_limit is None
    assert tiny(positions="learned").sequence_limit == 33
    assert tiny(positions="learned", interpolated_len=50).sequence_limit == 50


def test_standard_library_only():
    code = "import sys, transformer_config; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "jax", "torch", "flax", "jaxtyping"} & set(loaded)
