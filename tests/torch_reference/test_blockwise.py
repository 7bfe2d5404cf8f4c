import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_reference import AttentionMask, DropoutMasks, DropoutSeed
from torch_reference.attention import plain_attention
from torch_reference.blockwise import blockwise_attention


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(queries: int, keys: int) -> list[torch.Tensor]:
    shapes = [(2, 3, queries, 5), (2, 3, keys, 5), (2, 3, keys, 5)]
    return [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def keys_mask(keys: int) -> torch.Tensor:
    real = torch.ones(2, keys, dtype=torch.bool)
    real[0, keys - keys // 3 :] = False  # padding on the right, and on the left, where causal rows lose every key
    real[1, : keys // 3] = False
    return real


CASES = [
    # queries, keys, block size, causal, window: ragged, exact, one block, a block longer than the sequence
    (7, 10, 4, False, None),
    (8, 8, 4, False, None),
    (9, 9, 4, True, None),
    (9, 9, 16, True, None),
    (11, 11, 1, True, 3),
    (11, 11, 4, False, 0),
    (11, 11, 4, False, 2),
    (11, 11, 4, True, 4),
    (11, 11, 4, True, 5),
    (11, 11, 3, False, 100),
    (5, 11, 4, False, 3),
    (1, 9, 4, False, None),
    (1, 1, 4, True, 1),
]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize(("queries", "keys", "block_size", "causal", "window"), CASES)
def test_blockwise_equals_plain(queries, keys, block_size, causal, window, rate, padded):
    mask = AttentionMask(keys=keys_mask(keys) if padded else None, causal=causal, window=window)
    source = DropoutMasks({"": normal(2, 3, queries, keys, seed=9) > -0.5})
    output_grad = normal(2, 3, queries, 5, seed=10)
    results = []
    for blockwise in (False, True):
        query, key, value = inputs(queries, keys)
        if blockwise:
            output = blockwise_attention(query, key, value, mask, block_size=block_size, source=source, rate=rate)
        else:
            allowed = mask.allowed(torch.arange(queries), torch.arange(keys))
            output = plain_attention(query, key, value, allowed, source=source, rate=rate).output
        output.backward(output_grad)
        results.append([output.detach(), query.grad, key.grad, value.grad])
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("source", [DropoutSeed(3), DropoutMasks({"": normal(2, 3, 7, 7, seed=9) > 0})])
@pytest.mark.parametrize("window", [None, 2])
def test_gradients_against_finite_differences(window, source):
    mask = AttentionMask(keys=keys_mask(7), causal=True, window=window)

    def attend(query, key, value):
        return blockwise_attention(query, key, value, mask, block_size=3, source=source, rate=0.4)

    assert torch.autograd.gradcheck(attend, inputs(7, 7))


def test_large_scores_do_not_overflow():
    query, key, value = (x.detach() * 1000 for x in inputs(9, 9))
    mask = AttentionMask(causal=True)
    allowed = mask.allowed(torch.arange(9), torch.arange(9))
    expected = plain_attention(query, key, value, allowed).output
    torch.testing.assert_close(blockwise_attention(query, key, value, mask, block_size=2), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrower_dtypes(dtype):
    query, key, value = (x.detach().to(dtype).requires_grad_() for x in inputs(9, 9))
    output = blockwise_attention(query, key, value, AttentionMask(causal=True), block_size=4)
    output.sum().backward()
    exact = blockwise_attention(*(x.detach() for x in inputs(9, 9)), AttentionMask(causal=True), block_size=4)
    assert {x.dtype for x in (output, query.grad, key.grad, value.grad)} == {dtype}
    tolerance = 50 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.detach().double(), exact, rtol=0, atol=tolerance)


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns, and counts matrix products."""

    def __init__(self):
        super().__init__()
        self.size, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.size = max([self.size, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
        self.products += func.overloadpacket is torch.ops.aten.bmm
        return result


@pytest.mark.parametrize(("window", "rate"), [(None, 0.0), (None, 0.3), (6, 0.0), (6, 0.3)])
def test_memory_is_linear_in_length(window, rate):
    sizes, products = [], []
    for length in (256, 512):
        query, key, value = (normal(1, 1, length, 4, seed=seed).requires_grad_() for seed in range(3))
        mask = AttentionMask(keys=torch.ones(1, length, dtype=torch.bool), causal=True, window=window)
        with LargestTensor() as seen:
            output = blockwise_attention(query, key, value, mask, block_size=8, source=DropoutSeed(0), rate=rate)
            output.sum().backward()
        sizes.append(seen.size)
        products.append(seen.products)
    assert sizes[0] < 256 * 256 / 8
    assert sizes[1] <= 2 * sizes[0]
    # Blocks outside the window are never visited: as many steps however long the sequence.
    assert products[1] == (products[0] if window is not None else 2 * products[0]) > 0


def test_causal_windows_skip_the_blocks_of_the_future():
    products = []
    for causal in (True, False):
        query, key, value = (normal(1, 1, 64, 4, seed=seed) for seed in range(3))
        with LargestTensor() as seen:
            blockwise_attention(query, key, value, AttentionMask(causal=causal, window=8), block_size=8)
        products.append(seen.products)
    assert products == [2 * 2, 2 * 3]  # scores and output, of the group itself and of its neighbours
