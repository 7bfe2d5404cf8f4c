import math

import numpy as np
import pytest
import torch

from torch_reference import AttentionMask, DropoutMasks, TransformerConfig
from torch_reference.attention import MultiHeadAttention, attention_weights, plain_attention

IMPLEMENTATIONS = ["plain", "blockwise", "library"]


def heads(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def module(implementation: str = "plain", **changes: object) -> MultiHeadAttention:
    fields = {"dtype": "float64", "param_dtype": "float64", "attention": implementation, **changes}
    return MultiHeadAttention(TransformerConfig.tiny(**fields), generator=torch.Generator().manual_seed(0))


def attention_by_loops(query, key, value, allowed):
    """softmax(QKᵀ/√d) V, one number at a time."""
    batch, num_heads, queries, width = query.shape
    output = np.zeros((batch, num_heads, queries, value.shape[-1]))
    weights = np.zeros((batch, num_heads, queries, key.shape[2]))
    for b, h, q in np.ndindex(batch, num_heads, queries):
        keys = [k for k in range(key.shape[2]) if allowed[b, 0, q, k]]
        powers = {
            k: math.exp(sum(query[b, h, q, i] * key[b, h, k, i] for i in range(width)) / math.sqrt(width)) for k in keys
        }
        for k in keys:
            weights[b, h, q, k] = powers[k] / sum(powers.values())
            output[b, h, q] += weights[b, h, q, k] * value[b, h, k]
    return output, weights


def test_plain_attention_equals_the_formula_written_as_loops():
    query, key, value = heads(2, 3, 4, 5, seed=1), heads(2, 3, 6, 5, seed=2), heads(2, 3, 6, 5, seed=3)
    allowed = heads(2, 1, 4, 6, seed=4) > -0.5
    allowed[0, 0, 2] = False
    got = plain_attention(query, key, value, allowed)
    output, weights = attention_by_loops(*(x.numpy() for x in (query, key, value, allowed)))
    np.testing.assert_allclose(got.output.numpy(), output, rtol=0, atol=1e-14)
    np.testing.assert_allclose(got.weights.numpy(), weights, rtol=0, atol=1e-14)
    assert (got.output[0, :, 2] == 0).all()


def test_dropout_is_on_the_weights_and_returned_weights_are_without_it():
    query, key, value = heads(2, 3, 4, 5, seed=1), heads(2, 3, 6, 5, seed=2), heads(2, 3, 6, 5, seed=3)
    allowed = torch.ones(1, 1, 4, 6, dtype=torch.bool)
    keep = heads(2, 3, 4, 6, seed=5) > -0.5
    got = plain_attention(query, key, value, allowed, source=DropoutMasks({"": keep}), rate=0.3)
    weights = attention_weights(query, key, allowed)
    assert torch.equal(got.weights, weights)
    torch.testing.assert_close(got.output, (weights * keep / 0.7) @ value, rtol=0, atol=1e-14)


def test_multi_head_attention_is_the_papers_sum_over_heads():
    attention = module()
    x, memory = heads(2, 4, 30, seed=1), heads(2, 6, 30, seed=2)
    got = attention(x, memory, mask=AttentionMask(), return_weights=True)
    expected = attention.out_proj.bias.detach().expand(2, 4, 30).clone()
    for h in range(5):
        rows = slice(6 * h, 6 * h + 6)
        query, key, value = (
            inputs @ projection.weight[rows].T + projection.bias[rows]
            for inputs, projection in ((x, attention.q_proj), (memory, attention.k_proj), (memory, attention.v_proj))
        )
        weights = torch.softmax(query @ key.mT / math.sqrt(6), dim=-1)
        torch.testing.assert_close(got.weights[:, h], weights, rtol=0, atol=1e-14)
        expected = expected + weights @ value @ attention.out_proj.weight[:, rows].T
    torch.testing.assert_close(got.output, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("side", ["left", "right", "all"])
def test_masked_rows_are_zeros_with_finite_gradients(implementation, side):
    """P15, P17: with padding on the left a causal row may have no key at all."""
    attention = module(implementation)
    keys = torch.ones(2, 7, dtype=torch.bool)
    keys[1] = {"left": torch.arange(7) >= 3, "right": torch.arange(7) < 4, "all": torch.zeros(7, dtype=torch.bool)}[
        side
    ]
    mask = AttentionMask(keys=keys, causal=True)
    x = heads(2, 7, 30, seed=1).requires_grad_()
    key_value = attention.key_value(x)
    query = attention.split_heads(attention.q_proj(x))
    output = attention.attend(query, key_value, mask=mask).output
    empty = ~mask.allowed(torch.arange(7), torch.arange(7))[:, 0].any(dim=-1)
    assert int(empty.sum()) == {"left": 3, "right": 0, "all": 7}[side]
    at_rows = output.transpose(1, 2)
    assert (at_rows[empty] == 0).all()
    assert (at_rows[~empty] != 0).all()
    (at_rows * heads(2, 7, 5, 6, seed=2)).sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in attention.parameters() if parameter.grad is not None)]
    assert all(gradient.isfinite().all() for gradient in gradients)
    if side == "all":
        assert (x.grad[1] == 0).all()
    # What is padded cannot be seen.
    changed = x.detach().clone()
    changed[1, ~keys[1]] += 1.0
    again = attention.attend(query.detach(), attention.key_value(changed), mask=mask).output
    torch.testing.assert_close(again, output.detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("implementation", ["blockwise", "library"])
@pytest.mark.parametrize("window", [None, 2])
def test_implementations_agree(implementation, window):
    keys = torch.ones(2, 7, dtype=torch.bool)
    keys[1, 5:] = False
    results = []
    for attention in (module("plain"), module(implementation)):
        x = heads(2, 7, 30, seed=1).requires_grad_()
        output = attention(x, x, mask=AttentionMask(keys=keys, causal=True, window=window)).output
        (output * heads(2, 7, 30, seed=2)).sum().backward()
        results.append([output.detach(), x.grad, *(parameter.grad for parameter in attention.parameters())])
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_width_softmax_is_float32(name):
    dtype = getattr(torch, name)
    query, key, value = (heads(2, 3, 40, 5, seed=seed).to(dtype) for seed in (1, 2, 3))
    allowed = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    got = plain_attention(query, key, value, allowed)
    assert got.weights.dtype == torch.float32
    assert got.output.dtype == dtype
    torch.testing.assert_close(got.weights.sum(dim=-1), torch.ones(2, 3, 40), rtol=0, atol=1e-6)


def test_the_library_has_no_weights_to_give():
    attention, x = module("library"), heads(2, 7, 30, seed=1)
    with pytest.raises(ValueError, match="expected attention='plain' or 'blockwise' where weights are asked for"):
        attention(x, x, mask=AttentionMask(), return_weights=True)


def test_blockwise_gives_the_plain_weights_when_asked():
    x = heads(2, 7, 30, seed=1)
    mask = AttentionMask(causal=True, window=2)
    plain, blockwise = (module(name)(x, x, mask=mask, return_weights=True) for name in ("plain", "blockwise"))
    assert torch.equal(plain.weights, blockwise.weights)
    torch.testing.assert_close(plain.output, blockwise.output, rtol=0, atol=1e-13)
