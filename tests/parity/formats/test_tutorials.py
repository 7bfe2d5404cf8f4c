"""Models in the layouts of tutorials, carried to the reference and to Flax: same logits, same gradients."""

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch

from flax_transformer.parameters import abstract_model, fixed_shapes, parameter_shapes, with_parameters
from parity.weights.formats import FORMATS, FieldError, Fields
from parity.weights.rules import bits_equal
from parity.weights.store import read_tensors
from parity.weights.twins import twin_mapping
from tests.parity.formats import tutorial_models as models
from tests.parity.formats.foreign import batch
from tests.parity.formats.test_transformers import assert_near, loss, reference

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")

SIZES = {"src": 41, "tgt": 47, "d_model": 12, "d_ff": 20, "heads": 3, "layers": (2, 3), "rows": 40}
TIED = {**SIZES, "src": 47}
BUILD = {
    "tutorial-tiny": (lambda: models.ModelW(**SIZES), {}),
    "tutorial-theory-to-code": (lambda: models.ModelW(**SIZES, theory=True), {}),
    "tutorial-from-scratch": (lambda: models.ModelFromScratch(**SIZES), {}),
    "annotated": (lambda: models.ModelAnnotated(**SIZES), {}),
    "annotated, tied": (lambda: models.ModelAnnotated(**TIED, tied=True), {}),
    "torch-transformer": (lambda: models.ModelTorch(**SIZES), {}),
    "torch-transformer, pre-norm": (
        lambda: models.ModelTorch(**SIZES, norm_first=True, activation="gelu"),
        {"norm_order": "pre", "activation": "gelu"},
    ),
    "torch-transformer, no bias": (lambda: models.ModelTorch(**SIZES, bias=False), {}),
}


class Carried(NamedTuple):
    model: Any
    state: dict[str, np.ndarray]
    """As its file has it."""
    config: Any
    mapping: Any
    weights: dict[str, np.ndarray]
    """By the names of the reference."""


@pytest.fixture(params=BUILD)
def carried(request, tmp_path):
    """A model in float64."""
    build, given = BUILD[request.param]
    torch.manual_seed(7)
    model = build().double().eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1:
                tensor.add_(0.3 * torch.randn(tensor.shape, dtype=torch.float64))
    state = {name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}
    torch.save(state, tmp_path / "model.pt")
    checkpoint = read_tensors(tmp_path / "model.pt")
    format_ = FORMATS[request.param.partition(",")[0]]
    fields = Fields({**format_.measure(checkpoint), "num_heads": 3, **given}, file="model.pt")
    config = format_.read(fields).replace(dtype="float64", param_dtype="float64")
    state = checkpoint.with_aliases()
    mapping = format_.mapping(config)
    return Carried(model=model, state=state, config=config, mapping=mapping, weights=mapping.apply(state))


def test_what_is_measured(carried):
    config = carried.config
    sizes = (config.tgt_vocab_size, config.d_model, config.d_ff, config.num_encoder_layers, config.num_decoder_layers)
    assert sizes == (47, 12, 20, 2, 3)
    assert config.max_len == (40 if config.positions == "fixed" else 1024)


def test_logits_and_gradients(carried):
    model, config, weights = carried.model, carried.config, carried.weights
    module = reference(config, weights)
    src, tgt_in, tgt = batch(config, 0)
    src[2, :3] = 5  # a row with padding on the left has rows in which nothing may be attended to
    real = torch.from_numpy(tgt != config.pad_id)
    theirs, ours = (each(torch.from_numpy(src), torch.from_numpy(tgt_in)) for each in (model, module))
    assert_near(ours[real].detach().numpy(), theirs[real].detach().numpy(), what="logits")
    for logits in (theirs, ours):
        loss(logits, torch.from_numpy(tgt), config.pad_id).backward()
    of_theirs = {
        name.removeprefix("transformer."): parameter.grad.numpy()
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    expected = carried.mapping.apply(of_theirs, kind="gradient")
    largest = max(np.abs(array).max() for array in expected.values())
    for key, parameter in module.named_parameters():
        assert np.abs(parameter.grad.numpy() - expected[key]).max() <= 1e-12 * largest, key


@pytest.mark.usefixtures("x64")
def test_logits_of_the_flax_twin(carried):
    model, config, weights = carried.model, carried.config, carried.weights
    shapes = parameter_shapes(config) | fixed_shapes(config)
    params = twin_mapping(tied=config.tie_embeddings == "all").apply(
        {name: array.astype(np.float64) for name, array in weights.items()}, expected=shapes
    )
    src, tgt_in, tgt = batch(config, 0)
    src[2, :3] = 5
    run = jax.jit(lambda params, src, tgt: with_parameters(abstract_model(config), params)(src, tgt))
    ours = np.asarray(run(params, src.astype(np.int32), tgt_in.astype(np.int32)))
    theirs = model(torch.from_numpy(src), torch.from_numpy(tgt_in)).detach().numpy()
    real = tgt != config.pad_id
    assert_near(ours[real], theirs[real], what="logits")


def test_there_and_back_is_bit_identical(carried):
    back = carried.mapping.inverse().apply(carried.weights)
    assert back.keys() == carried.state.keys()
    assert all(bits_equal(back[name], carried.state[name]) for name in carried.state)


def test_heads_stand_in_no_tensor():
    with pytest.raises(FieldError, match=r"model\.pt: expected num_heads, which no tensor says"):
        FORMATS["tutorial-tiny"].read(Fields({"d_model": 12}, file="model.pt"))
