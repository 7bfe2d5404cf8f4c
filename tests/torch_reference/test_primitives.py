import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from torch_reference import Transformer, TransformerConfig
from torch_reference.primitives import LayerNorm, Linear, wide


def test_linear_is_torchs_with_a_compute_dtype_of_its_own():
    config = TransformerConfig.tiny(dtype="bfloat16")
    linear = Linear(config, 30, 44, generator=torch.Generator().manual_seed(0))
    assert isinstance(linear, nn.Linear)
    assert linear.weight.shape == (44, 30)
    assert linear.weight.dtype == torch.float32
    y = linear(torch.ones(2, 30))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert linear.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("scale", [1e-3, 1.0])
@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_layer_norm_where_the_variance_is_near_eps_or_the_mean_large(scale, mean):
    """P1."""
    config = TransformerConfig.tiny(dtype="float64", param_dtype="float64", norm_eps=1e-5)
    norm = LayerNorm(config)
    rng = np.random.default_rng(0)
    x = mean + scale * rng.standard_normal((4, 30))
    weight, bias = rng.standard_normal((2, 30))
    norm.load_state_dict({"weight": torch.from_numpy(weight), "bias": torch.from_numpy(bias)})
    expected = np.empty_like(x)
    for row in range(4):
        centred = x[row] - sum(x[row]) / 30
        expected[row] = centred / (sum(centred**2) / 30 + 1e-5) ** 0.5 * weight + bias
    np.testing.assert_allclose(
        norm(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-12, atol=1e-12 + 1e-14 * mean / scale
    )
    assert norm.eps == 1e-5


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_layer_norm_of_half_width_is_computed_in_float32(name):
    norm = LayerNorm(TransformerConfig.tiny(dtype=name))
    x = (300 * torch.randn(5, 30, generator=torch.Generator().manual_seed(0))).to(norm.dtype)  # 300² is no float16
    assert norm(x).dtype == norm.dtype
    torch.testing.assert_close(norm(x), nn.functional.layer_norm(x.float(), (30,)).to(norm.dtype), rtol=0, atol=1e-3)
    assert [wide(torch.ones(1, dtype=d)).dtype for d in (torch.float16, torch.float32, torch.float64)] == [
        torch.float32,
        torch.float32,
        torch.float64,
    ]


def test_initial_values_have_the_papers_distributions():
    """P5. Bounds are five standard errors wide."""
    config = TransformerConfig.tiny(d_model=120, d_ff=200, src_vocab_size=300, tgt_vocab_size=310, positions="learned")
    model = Transformer(config.replace(tie_embeddings="none"), generator=torch.Generator().manual_seed(0))
    checked = set()
    for name, parameter in model.named_parameters():
        values, size = parameter.detach().double(), parameter.numel()
        if name.endswith((".bias",)):
            assert (values == 0).all(), name
        elif "norm" in name:
            assert (values == 1).all(), name
        elif "embedding" in name or name.endswith("table"):
            std = 120**-0.5
            assert abs(values.mean()) < 5 * std / size**0.5, name
            assert abs(values.std() / std - 1) < 5 / (2 * size) ** 0.5, name
            assert 3 < values.abs().max() / std < 7, name
        else:
            bound = (6 / sum(values.shape)) ** 0.5
            assert 0.99 * bound < values.abs().max() <= bound, name
            assert abs(values.mean()) < 5 * bound / (3 * size) ** 0.5, name
            # The variance of u² for u uniform in [-1, 1] is 4/45.
            assert abs(values.square().mean() / bound**2 - 1 / 3) < 5 * (4 / 45 / size) ** 0.5, name
        checked.add(name)
    assert len(checked) == len(dict(model.named_parameters())) > 50


def test_same_generator_state_same_model():
    config = TransformerConfig.tiny()
    first, second, other = (Transformer(config, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    states = [model.state_dict() for model in (first, second, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["src_embedding.weight"], states[2]["src_embedding.weight"])


def test_no_jax_is_imported():
    program = (
        "import sys, torch_reference, torch_reference.training, torch_reference.decoding\n"
        "print([name for name in ('jax', 'flax', 'optax', 'flax_transformer', 'train') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
