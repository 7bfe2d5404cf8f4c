import math
from unittest.mock import Mock

import jax
import jax.extend
import jax.numpy as jnp
import pytest

from flax_transformer.parameters import abstract_model, parameter_shapes, with_parameters
from train.flops import forward_matmul_flops, matmul_flops, measured_matmul_rate, peak_flops
from transformer_config import TransformerConfig

CONFIGS = {
    "tiny": TransformerConfig.tiny(),
    "other": TransformerConfig.tiny(
        src_vocab_size=53,
        tgt_vocab_size=53,
        tie_embeddings="all",
        d_model=18,
        d_ff=26,
        num_heads=3,
        num_encoder_layers=3,
        num_decoder_layers=1,
        norm_order="pre",
        positions="learned",
        window=2,
    ),
    "untied": TransformerConfig.tiny(tie_embeddings="none", num_encoder_layers=1, use_bias=False),
}
SHAPE = {"src_len": 7, "tgt_len": 11, "rows": 4}


def dot_flops(jaxpr: jax.extend.core.Jaxpr) -> int:
    """2mkn over every dot_general of a jaxpr and of those inside it."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            k = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * k * math.prod(equation.outvars[0].aval.shape)
        inner = [dot_flops(inner) for inner in jax.extend.core.jaxprs_in_params(equation.params)]
        assert not sum(inner) or equation.primitive.name not in ("scan", "while", "cond"), "would run another number"
        total += sum(inner)
    return total


def programs(config: TransformerConfig):
    """The sum of the logits, its gradient, and their arguments as shapes."""
    model = abstract_model(config)

    def forward(params, src, tgt):
        return with_parameters(model, params)(src, tgt).sum()

    ids = [jax.ShapeDtypeStruct((SHAPE["rows"], SHAPE[name]), jnp.int32) for name in ("src_len", "tgt_len")]
    return forward, jax.grad(forward), (parameter_shapes(config), *ids)


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_are_those_of_the_traced_programs(name):
    """Exactly, forward and backward: no gradient of a product can be left out."""
    forward, gradient, arguments = programs(CONFIGS[name])
    assert forward_matmul_flops(CONFIGS[name], **SHAPE) == dot_flops(jax.make_jaxpr(forward)(*arguments).jaxpr)
    assert matmul_flops(CONFIGS[name], **SHAPE) == dot_flops(jax.make_jaxpr(gradient)(*arguments).jaxpr)


def test_recomputation_is_not_counted():
    config = CONFIGS["tiny"].replace(gradient_checkpointing=True)
    _, gradient, arguments = programs(config)
    assert matmul_flops(config, **SHAPE) == matmul_flops(CONFIGS["tiny"], **SHAPE)
    assert matmul_flops(config, **SHAPE) < dot_flops(jax.make_jaxpr(gradient)(*arguments).jaxpr)


def test_base_model_is_near_six_times_its_parameters_a_token():
    """6N a token (Kaplan et al. 2020) for the parameters a token of a side passes through; attention comes on top."""
    config = TransformerConfig.base()
    flops = matmul_flops(config, src_len=32, tgt_len=32, rows=64)
    assert flops / (64 * 32) == pytest.approx(6 * 63e6, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "dtype", "tera"),
    [
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA H200", "float32", 494.7),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "float32", 156),
        ("Tesla V100-SXM2-16GB", "float32", 15.7),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("Tesla T4", "float16", 65),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L40S", "bfloat16", None),
        ("NVIDIA A10", "bfloat16", None),
        ("TPU v4", "bfloat16", 275),
        ("TPU v4 lite", "bfloat16", None),
        ("TPU v5 lite", "bfloat16", 197),
        ("TPU v5", "bfloat16", 459),
        ("TPU v5p", "float32", 459),
        ("TPU v6 lite", "bfloat16", 918),
        ("cpu", "float32", None),
        ("NVIDIA H200", "float64", None),
    ],
)
def test_peaks_by_name(kind, dtype, tera):
    peak = peak_flops(Mock(spec=jax.Device, device_kind=kind), dtype=dtype)
    assert peak == (None if tera is None else pytest.approx(tera * 1e12))


def test_a_device_of_jax_and_its_measured_rate():
    assert peak_flops(jax.devices("cpu")[0]) is None
    assert 1e8 < measured_matmul_rate(0.02) < 1e14
