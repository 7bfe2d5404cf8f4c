import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.weights.mapping import Rule, WeightMapping
from parity.weights.patterns import Pattern, expand_choices
from parity.weights.problems import MappingError, TensorSpec
from parity.weights.rules import Scale, Split, SplitHeads, Transpose, bits_equal
from parity.weights.ties import Tie
from parity.weights.twins import twin_mapping

FUSED = WeightMapping(
    [
        Rule("{path*}.in_proj_weight", "{path*}.{q,k,v}_proj.kernel", (Split(3), Transpose(), SplitHeads(3, 1))),
        Rule("{path*}.in_proj_bias", "{path*}.{q,k,v}_proj.bias", (Split(3),)),
        Rule("layers.{i}.ln{n}.weight", "block_{i}.norm{n}.scale"),
    ]
)


def fused_tensors():
    source = np.random.default_rng(0)
    return {
        "encoder.0.attn.in_proj_weight": source.standard_normal((18, 5)),
        "encoder.0.attn.in_proj_bias": source.standard_normal(18),
        "layers.11.ln2.weight": source.standard_normal(7),
    }


def assert_same(first, second):
    assert set(first) == set(second)
    assert all(bits_equal(first[name], second[name]) for name in first)


def message_of(call):
    with pytest.raises(MappingError) as caught:
        call()
    return str(caught.value)


def test_fused_projections_go_there_and_back():
    tensors = fused_tensors()
    mapped = FUSED.apply(tensors)
    assert {name: array.shape for name, array in mapped.items()} == {
        "encoder.0.attn.q_proj.kernel": (5, 3, 2),
        "encoder.0.attn.k_proj.kernel": (5, 3, 2),
        "encoder.0.attn.v_proj.kernel": (5, 3, 2),
        "encoder.0.attn.q_proj.bias": (6,),
        "encoder.0.attn.k_proj.bias": (6,),
        "encoder.0.attn.v_proj.bias": (6,),
        "block_11.norm2.scale": (7,),
    }
    kernel = tensors["encoder.0.attn.in_proj_weight"]
    np.testing.assert_array_equal(mapped["encoder.0.attn.k_proj.kernel"], kernel[6:12].T.reshape(5, 3, 2))
    assert_same(FUSED.inverse().apply(mapped), tensors)
    assert_same(FUSED.inverse().inverse().apply(tensors), mapped)


def test_the_plan_needs_names_only_and_steps_read_only_their_own():
    tensors = fused_tensors()
    steps = FUSED.plan(tensors)
    assert steps[1].sources == ("encoder.0.attn.in_proj_bias",)
    assert steps[1].targets == tuple(f"encoder.0.attn.{name}_proj.bias" for name in "qkv")
    only = {"encoder.0.attn.in_proj_bias": tensors["encoder.0.attn.in_proj_bias"]}
    assert set(steps[1].apply(only)) == set(steps[1].targets)


def test_an_unused_key_is_named_with_its_likely_counterpart():
    tensors = fused_tensors()
    tensors["encoder.1.attn.in_proj_weigth"] = np.zeros((18, 5))
    message = message_of(lambda: FUSED.apply(tensors))
    assert "unused 'encoder.1.attn.in_proj_weigth' (18, 5) float64: no rule takes it" in message
    assert "near: '{path*}.in_proj_weight'" in message
    assert "in_proj_weigth" in message_of(lambda: FUSED.plan(tensors))


def test_a_key_taken_by_two_rules_names_both():
    mapping = WeightMapping([Rule("{path*}.weight", "{path*}.kernel"), Rule("norm.weight", "norm.scale")])
    message = message_of(lambda: mapping.apply({"norm.weight": np.ones(2)}))
    assert "'norm.weight' is taken by more than one rule" in message
    assert "'{path*}.weight' -> '{path*}.kernel' and rule 'norm.weight' -> 'norm.scale'" in message


def test_a_missing_member_is_named():
    mapped = FUSED.apply(fused_tensors())
    mapped["encoder.0.attn.key_proj.bias"] = mapped.pop("encoder.0.attn.k_proj.bias")
    message = message_of(lambda: FUSED.inverse().apply(mapped))
    assert "missing 'encoder.0.attn.k_proj.bias', which rule '{path*}.{q,k,v}_proj.bias'" in message
    assert "near: 'encoder.0.attn.key_proj.bias'" in message


def test_a_target_given_twice_names_both_sources():
    mapping = WeightMapping([Rule("a.{i}", "c.{i}"), Rule("b.{i}", "c.{i}")])
    message = message_of(lambda: mapping.apply({"a.1": np.ones(2), "b.1": np.ones(2), "b.2": np.ones(2)}))
    assert "'c.1' is given twice: by 'a.1' and by 'b.1'" in message
    assert "c.2" not in message


def test_names_that_would_not_lead_back_are_refused():
    mapping = WeightMapping([Rule("{a*}.to.{b*}", "{a*}.{b*}")])
    assert "ambiguous 'p.to.q.r'" in message_of(lambda: mapping.plan(["p.to.q.r"]))
    assert mapping.plan(["p.to.q"])[0].targets == ("p.q",)


def test_differences_from_what_is_expected_come_all_at_once():
    tensors = fused_tensors()
    expected = {name: TensorSpec.of(array) for name, array in FUSED.apply(tensors).items()}
    assert_same(FUSED.apply(tensors, expected=expected), FUSED.apply(tensors))
    expected["block_11.norm2.bias"] = TensorSpec((7,), np.dtype(np.float64))
    expected["encoder.0.attn.q_proj.biass"] = expected.pop("encoder.0.attn.q_proj.bias")
    expected["encoder.0.attn.k_proj.bias"] = TensorSpec((6,), np.dtype(np.float32))
    expected["encoder.0.attn.v_proj.kernel"] = TensorSpec((3, 2, 5), np.dtype(np.float64))
    message = message_of(lambda: FUSED.apply(tensors, expected=expected))
    assert "5 problems" in message
    assert "missing 'block_11.norm2.bias' (7,) float64" in message
    assert "missing 'encoder.0.attn.q_proj.biass' (6,) float64" in message
    assert "nothing gives it; near: 'encoder.0.attn.q_proj.bias' (6,)" in message
    assert "unexpected 'encoder.0.attn.q_proj.bias' (6,) float64" in message
    assert "dtype of 'encoder.0.attn.k_proj.bias': expected float32, got float64" in message
    assert "shape of 'encoder.0.attn.v_proj.kernel': expected (3, 2, 5), got (5, 3, 2)" in message


def test_same_shape_hints_where_names_do_not_resemble():
    expected = {"output.kernel": TensorSpec((3, 7), np.dtype(np.float32))}
    message = message_of(lambda: FUSED.apply({"lm_head": np.zeros((3, 7), np.float32)}, expected=expected))
    assert "unused 'lm_head' (3, 7) float32: no rule takes it; near: 'output.kernel' (same shape and dtype)" in message
    assert "missing 'output.kernel' (3, 7) float32: nothing gives it; near: 'lm_head' (same shape and dtype)" in message


def test_an_operation_that_refuses_is_named_once_by_its_tensors():
    tensors = fused_tensors()
    expected = FUSED.apply(tensors)
    tensors["encoder.0.attn.in_proj_bias"] = np.zeros(17)
    message = message_of(lambda: FUSED.apply(tensors, expected=expected))
    assert "1 problem:" in message
    assert "'encoder.0.attn.in_proj_bias' -> ('encoder.0.attn.q_proj.bias', " in message
    assert "expected a multiple of 3 on axis 0, got (17,)" in message


def test_gradients_and_moments_take_the_same_table():
    mapping = WeightMapping([Rule("{path*}.{a,b}", "{path*}.c", (Scale(2.0), Tie(2)))])
    one, two = np.float32([1.0]), np.float32([3.0])
    assert mapping.apply({"p.a": one, "p.b": one})["p.c"] == 2.0
    assert mapping.apply({"p.a": one, "p.b": two}, kind="gradient")["p.c"] == 2.0
    assert "a second moment" in message_of(lambda: mapping.apply({"p.a": one, "p.b": two}, kind="second_moment"))


def test_aliases_are_checked_dropped_and_given_back():
    mapping = twin_mapping(tied=True)
    shared = np.float32([[np.nan, 1.0, -0.0], [2.0, 3.0, 4.0]])
    both = {"src_embedding.weight": shared, "tgt_embedding.weight": shared.copy()}
    assert_same(mapping.apply(both), {"src_embedding.weight": shared})
    assert_same(mapping.apply({"src_embedding.weight": shared}), {"src_embedding.weight": shared})
    assert_same(mapping.apply({"tgt_embedding.weight": shared}), {"src_embedding.weight": shared})  # the kept name
    assert_same(mapping.inverse().apply({"src_embedding.weight": shared}), both)
    assert_same(  # torch's named_parameters() lists the tensor once
        mapping.inverse().apply({"src_embedding.weight": shared}, expected={"src_embedding.weight": shared}),
        {"src_embedding.weight": shared},
    )
    both["tgt_embedding.weight"] = shared + 1
    message = message_of(lambda: mapping.apply(both))
    assert "expected alias 'tgt_embedding.weight' to equal 'src_embedding.weight' bit by bit" in message


def test_untied_embeddings_stay_apart_whatever_their_values():
    same = {name: np.ones((5, 3), np.float32) for name in ("src_embedding.weight", "tgt_embedding.weight")}
    assert_same(twin_mapping(tied=False).apply(same), same)
    assert "no rule takes it" in message_of(lambda: twin_mapping(tied=True).inverse().apply(same))


def twin_tensors():
    source = np.random.default_rng(1)
    tensors = {}
    for layer in ("encoder.layers.0", "decoder.layers.2"):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"):
            tensors[f"{layer}.{name}.weight"], tensors[f"{layer}.{name}.bias"] = (6, 5), (6,)
        tensors[f"{layer}.feed_forward.linear1.weight"] = (8, 6)
        tensors[f"{layer}.feed_forward.linear2.weight"] = (6, 8)
        tensors[f"{layer}.norm1.weight"], tensors[f"{layer}.norm3.bias"] = (6,), (6,)
    tensors |= {"encoder.final_norm.weight": (6,), "output_projection.weight": (7, 6), "output_projection.bias": (7,)}
    tensors |= {"src_embedding.weight": (9, 6), "tgt_embedding.weight": (7, 6), "src_positions.table": (4, 6)}
    return {name: source.standard_normal(shape).astype(np.float32) for name, shape in tensors.items()}


@pytest.mark.parametrize("kind", ["value", "gradient", "first_moment", "second_moment"])
def test_our_twins_there_and_back(kind):
    tensors, mapping = twin_tensors(), twin_mapping(tied=False)
    mapped = mapping.apply(tensors, kind=kind)
    assert mapped["decoder.layers.2.feed_forward.linear1.kernel"].shape == (6, 8)
    assert mapped["output_projection.kernel"].shape == (6, 7)
    assert bits_equal(mapped["encoder.final_norm.scale"], tensors["encoder.final_norm.weight"])
    assert bits_equal(mapped["tgt_embedding.weight"], tensors["tgt_embedding.weight"])
    assert_same(mapping.inverse().apply(mapped, kind=kind), tensors)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rule("{path*}.weight", "kernel"), "placeholders"),
        (lambda: Rule("weight", "{i}.kernel"), "placeholders"),
        (lambda: Rule(("a.{i}", "b"), "c.{i}"), "placeholders"),
        (lambda: Rule("{path*}.a", "{path}.a"), "placeholders"),
        (lambda: Rule("{a*}.{a}", "{a*}.{a}"), "got both"),
        (lambda: WeightMapping([Rule("a", "{b,c}")]), r"operations to give 2 tensor\(s\), got 1"),
        (lambda: Rule("{a,b}", "c", (Split(2),)), r"expected 1 array\(s\), got 2"),
        (lambda: Rule((), "a"), "at least one name"),
        (lambda: Pattern("a{"), "matching braces"),
        (lambda: Pattern("a.{1}"), "in a pattern"),
        (lambda: Pattern("a{path*}.b"), "whole components"),
        (lambda: expand_choices("{a,b}.{c,d}"), "at most one"),
        (lambda: expand_choices("{a,a}"), "different choices"),
        (lambda: WeightMapping([], source_aliases={"a": "b", "b": "c"}), "itself an alias"),
    ],
)
def test_rules_without_an_inverse_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


words = st.text("ab1_", min_size=1, max_size=3)


@given(st.lists(words, min_size=1, max_size=3), words, words)
def test_a_pattern_matches_what_it_fills(path, part, other):
    pattern = Pattern("{path*}.x{i}y.{j}.{i}")
    bindings = (("i", part), ("j", other), ("path", ".".join(path)))
    assert pattern.match(pattern.fill(bindings)) == bindings
    assert pattern.match(f"x{part}y.{other}.{part}") is None
    assert pattern.match(f"p.x{part}y.{other}.{part}z") is None


def test_the_layer_imports_neither_torch_nor_jax():
    code = "import parity.convert, sys; assert not {'torch', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
