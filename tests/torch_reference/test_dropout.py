import numpy as np
import pytest
import torch

from torch_reference import NO_DROPOUT, DropoutMasks, DropoutSeed
from torch_reference.dropout import apply_dropout


def test_kept_elements_are_scaled_and_the_rest_is_zero():
    x = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(3, 4)
    keep = np.arange(12).reshape(3, 4) % 3 != 0
    for mask in (keep, torch.from_numpy(keep)):
        dropped = apply_dropout(x, DropoutMasks({"a.b": mask}).at("a").at("b"), rate=0.2)
        np.testing.assert_array_equal(dropped.numpy(), np.where(keep, x.numpy() / 0.8, 0.0))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rate(rate):
    keep = DropoutSeed(5).at("site").keep((1000, 1000), rate=rate)
    assert abs(float((~keep).double().mean()) - rate) < 5 * (rate * (1 - rate) / 1e6) ** 0.5


def test_a_mask_is_a_function_of_seed_and_site():
    def mask(seed, *path):
        source = DropoutSeed(seed)
        for name in path:
            source = source.at(name)
        return source.keep((64, 64), rate=0.5)

    assert torch.equal(mask(3, "encoder", "a"), mask(3, "encoder", "a"))
    others = [
        mask(3, "encoder", "b"),
        mask(4, "encoder", "a"),
        mask(3, "decoder", "a"),
        mask(2**40 + 3, "encoder", "a"),
    ]
    for other in others:
        agreement = float((mask(3, "encoder", "a") == other).double().mean())
        assert abs(agreement - 0.5) < 0.05


def test_no_dropout_and_rate_zero_return_the_input_itself():
    x = torch.ones(2, 3)
    assert apply_dropout(x, NO_DROPOUT, rate=0.5) is x
    assert apply_dropout(x, DropoutSeed(0), rate=0.0) is x


def test_half_width_is_not_biased_by_the_scale():
    x = torch.ones(4, dtype=torch.bfloat16)
    dropped = apply_dropout(x, DropoutMasks({"": np.ones(4, bool)}), rate=0.1)
    assert dropped.dtype == torch.bfloat16
    assert float(dropped[0]) == float(torch.tensor(1 / 0.9).bfloat16())


def test_tiles_of_a_given_mask_and_of_a_seed():
    mask = torch.arange(2 * 3 * 5 * 6).reshape(2, 3, 5, 6) % 4 != 0
    rows, columns = torch.tensor([[0, 1], [4, 5]]), torch.tensor([[-1, 0, 1], [4, 5, 6]])
    tile = DropoutMasks({"w": mask}).at("w").keep_tile((2, 3), rows, columns, rate=0.5, step=0)
    assert tile.shape == (2, 3, 2, 2, 3)
    assert torch.equal(tile[:, :, 0, :, 1:], mask[:, :, :2, :2])
    assert torch.equal(tile[:, :, 1, 0, :2], mask[:, :, 4, 4:6])
    source = DropoutSeed(0).at("w")
    first, again, second = (source.keep_tile((2, 3), rows, columns, rate=0.5, step=step) for step in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_missing_and_misshapen_masks_are_named():
    source = DropoutMasks({"a": np.ones((2, 3), bool)})
    with pytest.raises(ValueError, match=r"shape \(2, 3\) for b, got none"):
        source.at("b").keep((2, 3), rate=0.1)
    with pytest.raises(ValueError, match=r"shape \(3, 2\) for a, got \(2, 3\)"):
        source.at("a").keep((3, 2), rate=0.1)
    index = torch.arange(2)[None]
    with pytest.raises(ValueError, match=r"for a, got \(2, 3\)"):
        source.at("a").keep_tile((1, 1), index, index, rate=0.1, step=0)
    with pytest.raises(ValueError, match="for b, got None"):
        source.at("b").keep_tile((1, 1), index, index, rate=0.1, step=0)
