import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_transformer import TransformerConfig
from flax_transformer.parameters import (
    abstract_model,
    fixed_shapes,
    initial_parameters,
    parameter_shapes,
    parameters,
    with_parameters,
)


def shapes(**changes):
    return {name: v.shape for name, v in parameter_shapes(TransformerConfig.tiny(**changes)).items()}


def test_inventory_of_the_tiny_model():
    """P13: no parameter that the paper does not have. Kernels are (in, out)."""
    expected = {"src_embedding.weight": (71, 30), "tgt_embedding.weight": (67, 30)}
    for stack, layers, attentions in (("encoder", 2, ["self_attn"]), ("decoder", 3, ["self_attn", "cross_attn"])):
        for i in range(layers):
            name = f"{stack}.layers.{i}"
            for attention in attentions:
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    expected[f"{name}.{attention}.{part}.kernel"] = (30, 30)
                    expected[f"{name}.{attention}.{part}.bias"] = (30,)
            expected |= {
                f"{name}.feed_forward.linear1.kernel": (30, 44),
                f"{name}.feed_forward.linear1.bias": (44,),
                f"{name}.feed_forward.linear2.kernel": (44, 30),
                f"{name}.feed_forward.linear2.bias": (30,),
            }
            for n in range(1, len(attentions) + 2):
                expected |= {f"{name}.norm{n}.scale": (30,), f"{name}.norm{n}.bias": (30,)}
    assert shapes() == expected


def test_inventory_by_choice():
    """P19: a shared matrix stands once."""
    tied = shapes()
    assert shapes(tie_embeddings="none").items() - tied.items() == {
        ("output_projection.kernel", (30, 67)),
        ("output_projection.bias", (67,)),
    }
    assert tied.keys() - shapes(tie_embeddings="all", src_vocab_size=67).keys() == {"tgt_embedding.weight"}
    assert shapes(norm_order="pre").keys() - tied.keys() == {
        f"{stack}.final_norm.{part}" for stack in ("encoder", "decoder") for part in ("scale", "bias")
    }
    assert shapes(positions="learned", position_offset=2).items() - tied.items() == {
        ("src_positions.table", (35, 30)),
        ("tgt_positions.table", (35, 30)),
    }
    without_bias = shapes(use_bias=False, tie_embeddings="none")
    assert {name for name in without_bias if name.endswith("bias")} == set()
    assert shapes(output_bias="trained").items() - tied.items() == {("output_bias", (67,))}
    assert shapes(final_norm="always").keys() == shapes(norm_order="pre").keys()
    assert shapes(final_norm="never", norm_order="pre") == tied


def test_what_is_fixed_is_no_parameter():
    """P26."""
    config = TransformerConfig.tiny(positions="fixed", position_offset=2, output_bias="fixed", tie_embeddings="none")
    assert shapes(positions="fixed", output_bias="fixed") == shapes()
    fixed = {name: array.shape for name, array in fixed_shapes(config).items()}
    assert fixed == {"src_positions.table": (35, 30), "tgt_positions.table": (35, 30), "output_bias": (67,)}
    assert "output_projection.bias" not in parameter_shapes(config)


@pytest.mark.parametrize(("preset", "millions"), [("base", 63.1), ("big", 214.2)])
def test_size_of_the_papers_models(preset, millions):
    """Table 3 says 65 and 213 million, for vocabularies of "about" 37,000."""
    count = sum(value.size for value in parameter_shapes(getattr(TransformerConfig, preset)()).values())
    assert round(count / 1e6, 1) == millions
    assert abs(millions / {"base": 65, "big": 213}[preset] - 1) < 0.03


def test_initial_distributions():
    """P5: Xavier uniform for kernels, N(0, 1/√d_model) for tables, zero biases, unit scales; no two alike."""
    config = TransformerConfig.tiny(positions="learned", tie_embeddings="none", d_model=60, d_ff=88)
    values = {name: np.asarray(v, np.float64) for name, v in initial_parameters(config, jax.random.key(0)).items()}
    for name, value in values.items():
        kind = name.rsplit(".", 1)[1]
        if kind == "kernel":
            bound = (6 / sum(value.shape)) ** 0.5
            # The uniform distribution: all inside, some near the edge, mean and variance within five standard errors.
            assert 0.99 * bound < np.abs(value).max() <= bound, name
            assert abs(value.mean()) < 5 * bound / (3 * value.size) ** 0.5, name
            assert abs((value**2).mean() / bound**2 - 1 / 3) < 5 * (4 / 45 / value.size) ** 0.5, name
        elif kind in ("weight", "table"):
            scaled = value * 60**0.5
            assert abs(scaled.mean()) < 5 / value.size**0.5, name
            assert abs((scaled**2).mean() - 1) < 5 * (2 / value.size) ** 0.5, name
            assert abs((np.abs(scaled) < 1).mean() - 0.6827) < 5 * 0.4655 / value.size**0.5, name  # normal, not uniform
        else:
            assert (value == (kind == "scale")).all(), name
    drawn = [v.ravel()[:100] for name, v in values.items() if not name.endswith(("bias", "scale"))]
    assert len({v.tobytes() for v in drawn}) == len(drawn)


def test_one_key_one_model():
    config = TransformerConfig.tiny(num_encoder_layers=1, num_decoder_layers=1)
    first, again, other = (initial_parameters(config, jax.random.key(seed)) for seed in (0, 0, 1))
    assert all((first[name] == again[name]).all() for name in first)
    assert all((first[name] != other[name]).any() for name in first if not name.endswith(("bias", "scale")))


def test_parameters_go_out_and_come_back(build):
    model = build()
    values = {name: value + 1 for name, value in parameters(model).items()}
    for target in (model, abstract_model(model.config)):
        back = parameters(with_parameters(target, values))
        assert back.keys() == values.keys()
        assert all((back[name] == values[name]).all() for name in values)
    assert (parameters(model)["src_embedding.weight"] != values["src_embedding.weight"]).all()  # a copy was filled


def test_a_misfit_is_an_error_that_names_it(build):
    """P22."""
    model = build()
    values = parameters(model)
    name = "encoder.layers.0.norm1.scale"
    with pytest.raises(ValueError, match=r"none for \['encoder.layers.0.norm1.scale'\] and unknown \['norm'\]"):
        with_parameters(model, {"norm": values[name], **{k: v for k, v in values.items() if k != name}})
    with pytest.raises(ValueError, match=rf"{name}: expected shape \(30,\), got \(31,\)"):
        with_parameters(model, {**values, name: jnp.ones(31)})
