"""What the tests of the Flax twin share: a tiny model, padded ids."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_transformer import Transformer, TransformerConfig
from flax_transformer.parameters import abstract_model, fixed_shapes, parameter_shapes, with_parameters


@pytest.fixture
def build() -> Callable[..., Transformer]:
    """A tiny model of 1+1 layers with fields of the config changed, every parameter drawn away from 0 and 1."""

    def build(**changes: object) -> Transformer:
        fields = {"num_encoder_layers": 1, "num_decoder_layers": 1, "dropout": 0.0}
        if jax.config.jax_enable_x64:
            fields |= {"dtype": "float64", "param_dtype": "float64"}
        config = TransformerConfig.tiny(**{**fields, **changes})
        rng = np.random.default_rng(0)

        def draw(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
            scale = name.endswith("scale") + rng.normal(size=like.shape) * (0.3 if like.ndim == 1 else 30**-0.5)
            return jnp.asarray(scale, like.dtype)

        shapes = parameter_shapes(config) | fixed_shapes(config)
        values = {name: draw(name, like) for name, like in sorted(shapes.items())}
        return with_parameters(abstract_model(config), values)

    return build


@pytest.fixture
def ids() -> tuple[np.ndarray, np.ndarray]:
    """Source and target, with padding on the right, on the left (source only), and in a whole source row."""
    rng = np.random.default_rng(1)
    src = rng.integers(4, 60, (4, 7), dtype=np.int32)
    tgt = rng.integers(4, 60, (4, 5), dtype=np.int32)
    src[1, 4:] = 0
    src[2, :3] = 0
    src[3] = 0
    tgt[:, 0] = 1
    tgt[1, 3:] = 0
    return src, tgt
