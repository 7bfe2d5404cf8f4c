"""What corresponds to what: names, a few rules, layers stacked or shared, ties, and what is left over."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity.weights.mapping import MappingError, Rule, WeightMapping
from parity.weights.rules import Split, Transpose
from tests.parity.weights.derivation import RNGS, Port, Reference, derived, random, weights_of


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = torch.nn.Linear(6, 18), torch.nn.Linear(6, 6)


class PortAttention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q, self.k, self.v, self.o = (nnx.Linear(6, 6, rngs=rngs) for _ in range(4))


def decoder_only() -> tuple[torch.nn.Module, nnx.Module]:
    blocks = (Reference(attn=Attention(), ln_1=torch.nn.LayerNorm(6)) for _ in range(2))
    reference = Reference(h=torch.nn.ModuleList(blocks), ln_f=torch.nn.LayerNorm(6))
    layers = nnx.List([Port(attention=PortAttention(RNGS), ln_1=nnx.LayerNorm(6, rngs=RNGS)) for _ in range(2)])
    return reference, Port(layers=layers, ln_f=nnx.LayerNorm(6, rngs=RNGS))


FUSED = ("h.{i}.attn.c_attn", "layers.{i}.attention.{q,k,v}")
OUT = ("h.{i}.attn.c_proj", "layers.{i}.attention.o")


@pytest.mark.parametrize("how", ["modules", "rules between modules", "rules"])
def test_a_few_rules_with_placeholders(how: str) -> None:
    reference, port = decoder_only()
    if how == "modules":
        found = derived(reference, port, modules=(FUSED, OUT))
    elif how == "rules between modules":
        found = derived(reference, port, mapping=(Rule(*FUSED), Rule(*OUT)))
    else:
        rules = [
            Rule("h.{i}.attn.c_attn.weight", "layers.{i}.attention.{q,k,v}.kernel", (Split(3), Transpose())),
            Rule("h.{i}.attn.c_attn.bias", "layers.{i}.attention.{q,k,v}.bias", (Split(3),)),
            Rule("h.{i}.attn.c_proj.weight", "layers.{i}.attention.o.kernel", (Transpose(),)),
        ]
        found = derived(reference, port, mapping=rules, modules=(OUT,))
    assert found.problems == ()
    assert found.modules["layers.1.attention.o"] == "h.1.attn.c_proj"
    # Outer modules correspond if what is inside them does.
    assert found.modules["layers.1.attention"] == "h.1.attn"
    assert found.pairs["layers.0.ln_1"] == "h.0.ln_1"
    weights = weights_of(reference)
    ported = found.mapping.apply(weights)
    assert np.array_equal(ported["layers.1.attention.k.kernel"], weights["h.1.attn.c_attn.weight"][6:12].T)
    assert np.array_equal(ported["layers.0.ln_1.scale"], weights["h.0.ln_1.weight"])
    assert ported.keys() == _variables(port)


def _variables(port: nnx.Module) -> set[str]:
    return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(port, nnx.Param))}


def test_separate_projections_are_fused() -> None:
    reference = Reference(q=torch.nn.Linear(4, 6), kv=torch.nn.Linear(4, 10))
    port = Port(qkv=nnx.Linear(4, 16, rngs=RNGS))
    found = derived(reference, port, modules=(("{q,kv}", "qkv"),))
    weights = weights_of(reference)
    kernel = found.mapping.apply(weights)["qkv.kernel"]
    assert np.array_equal(kernel, np.concatenate([weights["q.weight"], weights["kv.weight"]]).T)


def test_sequential_has_no_layers_in_torch() -> None:
    reference = Reference(net=torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)))
    port = Port(net=nnx.Sequential(nnx.Linear(4, 5, rngs=RNGS), nnx.relu, nnx.Linear(5, 3, rngs=RNGS)))
    found = derived(reference, port)
    assert found.modules == {"net.layers.0": "net.0", "net.layers.2": "net.2"}
    assert found.mapping.apply(weights_of(reference)).keys() == _variables(port)


def test_layers_stacked_by_vmap() -> None:
    def layer(rngs: nnx.Rngs) -> nnx.Module:
        return Port(fc=nnx.Linear(4, 5, rngs=rngs), attn=nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs))

    stacked = nnx.vmap(layer, in_axes=0, out_axes=0)(nnx.Rngs(0).split(3))
    reference = Reference(
        layers=torch.nn.ModuleList(
            Reference(fc=torch.nn.Linear(4, 5), attn=torch.nn.MultiheadAttention(6, 2)) for _ in range(3)
        )
    )
    found = derived(reference, Port(layers=stacked))
    assert found.stacked == {"layers": ("layers.0", "layers.1", "layers.2")}
    weights = weights_of(reference)
    ported = found.mapping.apply(weights)
    assert ported["layers.fc.kernel"].shape == (3, 4, 5)
    assert np.array_equal(ported["layers.fc.kernel"][1], weights["layers.1.fc.weight"].T)
    key = weights["layers.2.attn.in_proj_weight"][6:12].T.reshape(6, 2, 3)
    assert np.array_equal(ported["layers.attn.key.kernel"][2], key)
    back = found.mapping.inverse().apply(ported)
    assert all(np.array_equal(back[name], weights[name]) for name in weights)


def test_stacked_layers_under_other_names_with_fused_projections() -> None:
    stacked = nnx.vmap(lambda rngs: Port(attention=PortAttention(rngs)), in_axes=0, out_axes=0)(nnx.Rngs(0).split(2))
    reference = Reference(h=torch.nn.ModuleList(Reference(attn=Attention()) for _ in range(2)))
    found = derived(reference, Port(layers=stacked), modules=(FUSED, OUT))
    assert found.problems == ()
    assert found.modules["layers.1.attention.o"] == "h.1.attn.c_proj"
    weights = weights_of(reference)
    ported = found.mapping.apply(weights)
    assert np.array_equal(ported["layers.attention.v.kernel"][1], weights["h.1.attn.c_attn.weight"][12:].T)
    back = found.mapping.inverse().apply(ported)
    assert all(np.array_equal(back[name], weights[name]) for name in weights)


def test_stacked_layers_that_differ_are_left_over() -> None:
    stacked = nnx.vmap(lambda rngs: Port(fc=nnx.Linear(4, 5, rngs=rngs)), in_axes=0, out_axes=0)(nnx.Rngs(0).split(2))
    layers = (Reference(fc=torch.nn.Linear(4, 5)), Reference(fc=torch.nn.Linear(4, 5, bias=False)))
    problems = derived(Reference(layers=torch.nn.ModuleList(layers)), Port(layers=stacked)).problems
    assert any(problem.startswith("missing 'layers.fc.bias' (2, 5)") for problem in problems)
    assert any(problem.startswith("unused 'layers.0.fc.bias' (5,)") for problem in problems)


def tied(reference_too: bool = True) -> tuple[torch.nn.Module, nnx.Module]:
    reference = Reference(wte=torch.nn.Embedding(7, 4), head=torch.nn.Linear(4, 7, bias=False))
    if reference_too:
        reference.head.weight = reference.wte.weight
    return reference, Port(wte=nnx.Embed(7, 4, rngs=RNGS))


def test_tied_weights() -> None:
    reference, port = tied()
    found = derived(reference, port)
    assert found.problems == ()
    weights = dict.fromkeys(("wte.weight", "head.weight"), random(7, 4))  # a state dict has both names
    assert found.mapping.apply(weights).keys() == {"wte.embedding"}
    assert found.mapping.apply({"wte.weight": random(7, 4)}).keys() == {"wte.embedding"}


def test_tied_on_one_side_only() -> None:
    reference, port = tied()
    port.head = nnx.Linear(4, 7, use_bias=False, rngs=RNGS)
    found = derived(reference, port)
    assert any("tied in the reference only: its 'wte.weight' is" in problem for problem in found.problems)
    reference, port = Reference(a=torch.nn.Linear(3, 5), b=torch.nn.Linear(3, 5)), Port(a=nnx.Linear(3, 5, rngs=RNGS))
    port.b = port.a
    found = derived(reference, port)
    assert any("unused 'b.weight'" in problem for problem in found.problems)


def test_shared_modules_under_other_first_names() -> None:
    """torch goes by order of definition, Flax by the alphabet."""
    shared = torch.nn.Linear(3, 5)
    reference = Reference(zeta=shared, alpha=shared)
    port = Port(zeta=nnx.Linear(3, 5, rngs=RNGS))
    port.alpha = port.zeta
    found = derived(reference, port)
    assert found.problems == ()
    assert found.mapping.apply({"zeta.weight": random(5, 3), "zeta.bias": random(5)}).keys() == _variables(port)
    assert found.modules == {"alpha": "zeta"}


class OwnTorchLinear(torch.nn.Module):
    """Stored (in, out), as GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.scale = torch.nn.Parameter(torch.randn(4))


class OwnFlaxLinear(nnx.Module):
    def __init__(self, **shapes: tuple[int, ...]) -> None:
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.ones(shape)))


def test_a_layout_is_not_inferred_from_a_shape() -> None:
    """A square matrix of an unknown type may be stored either way: the reader is told which rules to choose from."""
    reference, port = Reference(fc=OwnTorchLinear()), Port(fc=OwnFlaxLinear(kernel=(4, 4), scale=(4,)))
    problems = derived(reference, port).problems
    assert len(problems) == 2
    assert "Rule('fc.weight', 'fc.kernel', (Transpose(),)) if the weight is (out, in)" in problems[0]
    rule = Rule("fc.weight", "fc.kernel")
    assert derived(reference, port, mapping=[rule]).problems == ()


def test_own_types_map_by_name_where_shapes_agree() -> None:
    reference = Reference(fc=OwnTorchLinear())
    assert derived(reference, Port(fc=OwnFlaxLinear(weight=(4, 4), scale=(4,)))).problems == ()
    problems = derived(reference, Port(fc=OwnFlaxLinear(weight=(4, 5), scale=(4,)))).problems
    assert any("unused 'fc.weight' (4, 4) float32" in problem for problem in problems)


def test_what_is_missing_is_named() -> None:
    reference = Reference(fc=torch.nn.Linear(3, 5), norm=torch.nn.LayerNorm(5))
    found = derived(reference, Port(fc=nnx.Linear(3, 5, use_bias=False, rngs=RNGS), extra=nnx.Linear(3, 2, rngs=RNGS)))
    with pytest.raises(MappingError) as error:
        _ = found.mapping
    text = str(error.value)
    assert "unused 'norm.weight' (5,) float32: the port has no module 'norm'" in text
    assert "unused 'fc.bias'" in text
    assert "missing 'extra.kernel'" in text
    assert "missing 'fc.kernel'" not in text


def test_frameworks_own_types_that_do_not_fit() -> None:
    found = derived(Reference(a=torch.nn.Linear(3, 5)), Port(a=nnx.Conv(3, 5, (1,), rngs=RNGS)))
    assert any("no conversion from a Linear to a Conv is known" in problem for problem in found.problems)


def test_buffers_of_one_side_stay_where_they_are() -> None:
    reference, port = Reference(norm=torch.nn.BatchNorm1d(4)), Port(norm=nnx.BatchNorm(4, rngs=RNGS))
    reference.register_buffer("pe", torch.ones(5, 4))
    port.table = nnx.Variable(jnp.ones((5, 4)))
    found = derived(reference, port)
    assert found.stays == {"pe", "norm.num_batches_tracked"}
    assert found.own == {"table"}
    assert [known.kind for known in found.known] == ["running variance"]
    assert found.mapping.apply(
        {n: a for n, a in weights_of(reference).items() if found.travels(n)}
    ).keys() == _variables(port) | {"norm.mean", "norm.var"}


def test_a_given_mapping_is_taken_as_it_is() -> None:
    mapping = WeightMapping([Rule("a.weight", "b.kernel", (Transpose(),)), Rule("a.bias", "b.bias")])
    reference, port = Reference(a=torch.nn.Linear(3, 5)), Port(b=nnx.Linear(3, 5, rngs=RNGS))
    found = derived(reference, port, mapping=mapping)
    assert found.mapping is mapping
    assert found.modules == {"b": "a"}


@pytest.mark.parametrize(
    ("modules", "text"),
    [((("a", "nothing"),), "no module of the port is named 'nothing'"), ((("b.{i}", "a"),), None)],
)
def test_patterns_that_lead_nowhere(modules: Any, text: str | None) -> None:
    reference, port = Reference(a=torch.nn.Linear(3, 5)), Port(a=nnx.Linear(3, 5, rngs=RNGS))
    if text is None:
        with pytest.raises(ValueError, match="expected the same placeholders"):
            derived(reference, port, modules=modules)
    else:
        assert text in derived(reference, port, modules=modules).problems


def test_types_decide_between_modules() -> None:
    reference, port = Reference(a=torch.nn.Linear(3, 5)), Port(b=nnx.Linear(3, 5, rngs=RNGS))
    with pytest.raises(ValueError, match="expected no operations between modules"):
        derived(reference, port, mapping=[Rule("a", "b", (Transpose(),))])
