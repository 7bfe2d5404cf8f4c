"""A model's parameters as a flat dictionary, `encoder.layers.0.self_attn.q_proj.kernel` to array, and back.

Some models have arrays besides that are carried with the parameters and not trained (see `Fixed`).
"""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from flax_transformer.primitives import Fixed
from flax_transformer.transformer import Transformer
from transformer_config import TransformerConfig


def abstract_model(config: TransformerConfig) -> Transformer:
    """A model whose parameters are shapes and dtypes only; nothing is drawn or stored."""
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def parameters(model: Transformer) -> dict[str, Array]:
    """Every parameter by its dotted name; a tied one stands once."""
    return _by_name(model, nnx.Param)


def fixed_arrays(model: Transformer) -> dict[str, Array]:
    """What is carried with the parameters and not trained, by its dotted name; of most models nothing."""
    return _by_name(model, Fixed)


def parameter_shapes(config: TransformerConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter by its dotted name; nothing is drawn or stored."""
    return _by_name(abstract_model(config), nnx.Param)


def fixed_shapes(config: TransformerConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The same of what is not trained."""
    return _by_name(abstract_model(config), Fixed)


def with_parameters(model: Transformer, values: Mapping[str, Array]) -> Transformer:
    """A model like `model` (which may be abstract) with these parameters, and what it has of fixed arrays.

    Raises ValueError that names parameters missing, unknown or of another shape.
    """
    graphdef, state = nnx.split(model, (nnx.Param, Fixed))
    flat = {".".join(map(str, path)): (path, variable) for path, variable in nnx.to_flat_state(state)}
    missing, unknown = sorted(flat.keys() - values.keys()), sorted(values.keys() - flat.keys())
    if missing or unknown:
        raise ValueError(f"expected the model's parameters, got none for {missing} and unknown {unknown}")
    filled = []
    for name, (path, variable) in flat.items():
        if variable.shape != values[name].shape:
            raise ValueError(f"{name}: expected shape {variable.shape}, got {values[name].shape}")
        filled.append((path, variable.replace(values[name])))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def without_recomputing(model: Transformer) -> Transformer:
    """The same model with nothing recomputed in a backward pass: recomputing does not work inside a loop of jax's."""
    if not model.config.gradient_checkpointing:
        return model
    plain = abstract_model(model.config.replace(gradient_checkpointing=False))
    return with_parameters(plain, parameters(model) | fixed_arrays(model))


def initial_parameters(config: TransformerConfig, key: Array) -> dict[str, Array]:
    """Freshly drawn parameters: Xavier for projections, N(0, 1/√d_model) for embeddings, zero biases."""
    return jax.jit(lambda key: parameters(Transformer(config, rngs=nnx.Rngs(params=key))))(key)


def _by_name(model: Transformer, kind: type[nnx.Variable]) -> dict[str, Any]:
    return {
        ".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model, kind))
    }
