"""Building a port: as one program, operation by operation, or of shapes alone."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from parity.build import built
from parity.pair import Side


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layer = nnx.Linear(3, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.layer(x))


def test_drawn_weights_are_those_that_the_builder_draws() -> None:
    model = built(Side(build=lambda: Model(nnx.Rngs(7))), "float32")
    expected = Model(nnx.Rngs(7)).layer.kernel[...]
    assert jnp.allclose(model.layer.kernel[...], expected, rtol=1e-6)


def test_a_module_of_shapes_is_built_once_and_can_be_changed() -> None:
    built_so_far: list[Any] = []

    def build() -> Model:
        model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
        built_so_far.append(model)
        return model

    model = built(Side(build=build), "float32")
    assert len(built_so_far) == 1
    assert isinstance(model.layer.kernel.get_value(), jax.ShapeDtypeStruct)
    model.eval()
    assert model.drop.deterministic


def test_a_builder_that_looks_at_values_is_run_as_it_is() -> None:
    def build() -> Model:
        model = Model(nnx.Rngs(0))
        if float(model.layer.kernel[...].sum()) > 1e9:
            raise AssertionError
        return model

    assert isinstance(built(Side(build=build), "float32").layer.kernel[...], jax.Array)


def test_what_is_no_module_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"to return an nnx\.Module, got <class .int.>"):
        built(Side(build=lambda: 3), "float32")
