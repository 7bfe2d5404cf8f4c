import numpy as np
import pytest
from flax import nnx

import flax_transformer.transformer as flax_model
from parity.weights.problems import TensorSpec
from parity.weights.rules import bits_equal
from parity.weights.twins import reference_shapes, twin_mapping
from transformer_config import TransformerConfig

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("norm_order", ["post", "pre"])
@pytest.mark.parametrize("tie_embeddings", ["none", "output", "all"])
def test_every_parameter_of_the_real_models_has_its_place(tie_embeddings, norm_order):
    import torch_reference.transformer as torch_model

    config = TransformerConfig.tiny(
        tie_embeddings=tie_embeddings,
        tgt_vocab_size=71 if tie_embeddings == "all" else 67,
        norm_order=norm_order,
        positions="learned" if norm_order == "pre" else "interleaved",
    )
    reference = torch_model.Transformer(config, generator=torch.Generator().manual_seed(0))
    values = {name: tensor.detach().numpy() for name, tensor in reference.state_dict().items()}
    state = nnx.to_flat_state(nnx.state(flax_model.Transformer(config, rngs=nnx.Rngs(0)), nnx.Param))
    expected = {".".join(map(str, path)): TensorSpec(leaf.shape, np.dtype(leaf.dtype)) for path, leaf in state}
    values.pop("tgt_embedding.weight" if tie_embeddings == "all" else "", None)
    assert {name: array.shape for name, array in values.items()} == reference_shapes(config)
    mapping = twin_mapping(tied=tie_embeddings == "all")
    mapped = mapping.apply(values, expected=expected)
    back = mapping.inverse().apply(mapped, expected=values)
    assert all(bits_equal(back[name], array) for name, array in values.items())
