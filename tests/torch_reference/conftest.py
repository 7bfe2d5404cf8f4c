"""What the tests of the reference share: one thread, a tiny model, padded ids."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from torch_reference import Transformer, TransformerConfig


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _global_random_numbers_untouched() -> Iterator[None]:
    """Randomness is always an explicit argument, in every test here."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before), "torch's global random numbers were drawn from"


@pytest.fixture
def build() -> Callable[..., Transformer]:
    """A tiny float64 model with fields of the config changed, every parameter away from its initial 0 or 1."""

    def build(**changes: object) -> Transformer:
        fields = {"dtype": "float64", "param_dtype": "float64", "dropout": 0.0, **changes}
        generator = torch.Generator().manual_seed(0)
        model = Transformer(TransformerConfig.tiny(**fields), generator=generator)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        return model

    return build


@pytest.fixture
def ids() -> tuple[Tensor, Tensor]:
    """Source and target, with padding on the right, on the left (source only), and in a whole source row."""
    generator = torch.Generator().manual_seed(1)
    src = torch.randint(4, 60, (4, 7), generator=generator)
    tgt = torch.randint(4, 60, (4, 5), generator=generator)
    src[1, 4:] = 0
    src[2, :3] = 0
    src[3] = 0
    tgt[:, 0] = 1
    tgt[1, 3:] = 0
    return src, tgt
