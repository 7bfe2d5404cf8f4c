import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from torch_reference import NO_DROPOUT, DropoutMasks, DropoutSeed, Transformer, TransformerConfig

ALL_DROPOUT = {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.4}


class Recorder:
    """Keeps everything, and notes every site that asks for a mask."""

    def __init__(self, sites=None, path=""):
        self.sites, self.path = {} if sites is None else sites, path

    def at(self, name):
        return Recorder(self.sites, f"{self.path}.{name}" if self.path else name)

    def keep(self, shape, *, rate, device=None):
        assert self.path not in self.sites, self.path
        self.sites[self.path] = tuple(shape)

    def keep_tile(self, lead, query_index, key_index, *, rate, step):
        raise NotImplementedError


def gradients(model, src, tgt, dropout=NO_DROPOUT):
    model.zero_grad()
    model(src, tgt, dropout=dropout).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(first, second, *, atol):
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(
            first[name], second[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def by_hand(model: Transformer, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
    """The paper's post-norm or the pre-norm model in torch's own functions, straight down the page."""
    config, p = model.config, dict(model.state_dict())

    def affine(name, x):
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    def norm(name, x):
        return F.layer_norm(x, (config.d_model,), p[f"{name}.weight"], p.get(f"{name}.bias"), eps=config.norm_eps)

    def attention(name, x, memory, forbidden):
        query, key, value = (
            affine(f"{name}.{part}_proj", y).view(*y.shape[:2], config.num_heads, -1)
            for part, y in (("q", x), ("k", memory), ("v", memory))
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(config.head_dim)
        weights = scores.masked_fill(forbidden, -math.inf).softmax(dim=-1)
        return affine(f"{name}.out_proj", torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2))

    def sublayer(name, x, function):
        return x + function(norm(name, x)) if config.norm_order == "pre" else norm(name, x + function(x))

    def feed_forward(name, x):
        return affine(f"{name}.linear2", F.relu(affine(f"{name}.linear1", x)))

    def embed(side, ids):
        return p[f"{side}_embedding.weight"][ids] * math.sqrt(config.d_model) + getattr(model, f"{side}_positions")(
            ids.shape[1]
        )

    src_pad, tgt_pad = (ids.eq(config.pad_id)[:, None, None, :] for ids in (src, tgt))
    future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
    x = embed("src", src)
    for i in range(config.num_encoder_layers):
        name = f"encoder.layers.{i}"
        x = sublayer(f"{name}.norm1", x, lambda y, n=name: attention(f"{n}.self_attn", y, y, src_pad))
        x = sublayer(f"{name}.norm2", x, lambda y, n=name: feed_forward(f"{n}.feed_forward", y))
    memory = norm("encoder.final_norm", x) if config.norm_order == "pre" else x
    x = embed("tgt", tgt)
    for i in range(config.num_decoder_layers):
        name = f"decoder.layers.{i}"
        x = sublayer(f"{name}.norm1", x, lambda y, n=name: attention(f"{n}.self_attn", y, y, tgt_pad | future))
        x = sublayer(f"{name}.norm2", x, lambda y, n=name: attention(f"{n}.cross_attn", y, memory, src_pad))
        x = sublayer(f"{name}.norm3", x, lambda y, n=name: feed_forward(f"{n}.feed_forward", y))
    x = norm("decoder.final_norm", x) if config.norm_order == "pre" else x
    return affine("output_projection", x) if config.tie_embeddings == "none" else x @ p["tgt_embedding.weight"].T


@pytest.mark.parametrize("norm_order", ["post", "pre"])
@pytest.mark.parametrize("tie", ["none", "output"])
def test_model_equals_the_paper_written_down_the_page(build, ids, norm_order, tie):
    model = build(norm_order=norm_order, tie_embeddings=tie, activation="relu")
    src, tgt = (x[:3] for x in ids)  # rows with at least one key
    torch.testing.assert_close(model(src, tgt), by_hand(model, src, tgt), rtol=0, atol=1e-11)


@pytest.mark.parametrize("attention", ["plain", "blockwise", "library"])
def test_padding_changes_nothing(build, ids, attention):
    """T1, D3: the same sentence with more padding, beside other sentences, gives the same logits and gradients."""
    model = build(attention=attention)
    src, tgt = (x[1:2] for x in ids)
    short = model(src[:, :4], tgt[:, :3])
    assert short.isfinite().all()
    torch.testing.assert_close(model(*ids)[1:2, :3], short, rtol=0, atol=1e-12)
    padded = F.pad(src, (0, 5)), F.pad(tgt, (0, 4))
    torch.testing.assert_close(model(*padded)[:, :3], short, rtol=0, atol=1e-12)
    model.zero_grad()
    short.square().sum().backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model(*padded)[:, :3].square().sum().backward()
    assert_same({name: parameter.grad for name, parameter in model.named_parameters()}, before, atol=1e-9)


@pytest.mark.parametrize("attention", ["blockwise", "library"])
@pytest.mark.parametrize("norm_order", ["post", "pre"])
def test_implementations_agree_on_the_whole_model(build, ids, attention, norm_order):
    """With a source row of nothing but padding (P17)."""
    plain, other = (build(attention=name, norm_order=norm_order, window=2) for name in ("plain", attention))
    torch.testing.assert_close(other(*ids), plain(*ids), rtol=0, atol=1e-12)
    expected = gradients(plain, *ids)
    assert all(gradient.isfinite().all() for gradient in expected.values())
    assert_same(gradients(other, *ids), expected, atol=1e-12)


def test_the_future_cannot_be_seen_and_a_window_reaches_so_far(build, ids):
    src, tgt = ids
    changed = tgt.clone()
    changed[:, 3:] = 9
    model = build()
    torch.testing.assert_close(model(src, tgt)[:, :3], model(src, changed)[:, :3], rtol=0, atol=1e-13)
    assert (model(src, tgt)[0, 3:] != model(src, changed)[0, 3:]).all()
    # Three layers of a window of 0 see no more than one position of the target.
    model = build(window=0)
    changed = tgt.clone()
    changed[:, 0] = 9
    torch.testing.assert_close(model(src, tgt)[:, 1:], model(src, changed)[:, 1:], rtol=0, atol=1e-13)


def test_every_site_draws_once_under_its_name(build, ids):
    model, recorder = build(**ALL_DROPOUT), Recorder()
    model(*ids, dropout=recorder)
    expected = {"src_dropout": (4, 7, 30), "tgt_dropout": (4, 5, 30)}
    for i in range(2):
        layer = f"encoder.layers.{i}"
        expected[f"{layer}.self_attn.weights"] = (4, 5, 7, 7)
        expected[f"{layer}.feed_forward.activation"] = (4, 7, 44)
        expected |= {f"{layer}.dropout{n}": (4, 7, 30) for n in (1, 2)}
    for i in range(3):
        layer = f"decoder.layers.{i}"
        expected[f"{layer}.self_attn.weights"] = (4, 5, 5, 5)
        expected[f"{layer}.cross_attn.weights"] = (4, 5, 5, 7)
        expected[f"{layer}.feed_forward.activation"] = (4, 5, 44)
        expected |= {f"{layer}.dropout{n}": (4, 5, 30) for n in (1, 2, 3)}
    assert recorder.sites == expected


def test_given_masks_are_the_seeds_masks(build, ids):
    model, recorder = build(**ALL_DROPOUT), Recorder()
    model(*ids, dropout=recorder)
    rates = {"weights": 0.3, "activation": 0.4}
    masks = {}
    for name, shape in recorder.sites.items():
        source = DropoutSeed(7)
        for part in name.split("."):
            source = source.at(part)
        masks[name] = source.keep(shape, rate=rates.get(name.split(".")[-1], 0.2)).numpy()
    drawn, given = model(*ids, dropout=DropoutSeed(7)), model(*ids, dropout=DropoutMasks(masks))
    assert torch.equal(drawn, given)
    assert not torch.equal(drawn, model(*ids, dropout=DropoutSeed(8)))
    assert not torch.equal(drawn, model(*ids))


@pytest.mark.parametrize("attention", ["plain", "blockwise"])
def test_gradient_checkpointing_sees_the_same_masks(build, ids, attention):
    models = [build(attention=attention, gradient_checkpointing=on, **ALL_DROPOUT) for on in (False, True)]
    expected, got = (gradients(model, *ids, dropout=DropoutSeed(3)) for model in models)
    assert_same(got, expected, atol=1e-14)
    assert not torch.equal(gradients(models[1], *ids)["src_embedding.weight"], expected["src_embedding.weight"])


@pytest.mark.parametrize("attention", ["plain", "blockwise", "library"])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_width_compute_with_float32_parameters(build, ids, name, attention):
    exact = build(attention=attention, norm_order="pre")
    narrow = Transformer(
        exact.config.replace(dtype=name, param_dtype="float32"), generator=torch.Generator().manual_seed(0)
    )
    narrow.load_state_dict(exact.state_dict())
    logits = narrow(*ids)
    assert logits.dtype == getattr(torch, name)
    error = (logits.double() - exact(*ids)).abs().max()
    assert 0 < error < 60 * torch.finfo(logits.dtype).eps * exact(*ids).abs().max()
    for gradient in gradients(narrow, *ids).values():
        assert gradient.dtype == torch.float32
        assert gradient.isfinite().all()


def test_tied_weights_are_one_parameter():
    """P13, P19: the parameter inventory."""

    def inventory(**changes):
        model = Transformer(TransformerConfig.tiny(**changes), generator=torch.Generator().manual_seed(0))
        return {name for name, _ in model.named_parameters()}, set(model.state_dict())

    parameters, state = inventory(tie_embeddings="all", tgt_vocab_size=71)
    assert "tgt_embedding.weight" not in parameters
    assert "tgt_embedding.weight" in state
    parameters, state = inventory(tie_embeddings="output")
    assert parameters == state
    assert {"src_embedding.weight", "tgt_embedding.weight"} <= parameters
    assert not any("output_projection" in name or "final_norm" in name or "positions" in name for name in state)
    untied, _ = inventory(tie_embeddings="none")
    assert untied - parameters == {"output_projection.weight", "output_projection.bias"}
    pre, _ = inventory(norm_order="pre")
    assert len(pre - parameters) == 4
    learned, _ = inventory(positions="learned")
    assert learned - parameters == {"src_positions.table", "tgt_positions.table"}
    no_bias, _ = inventory(use_bias=False, tie_embeddings="none")
    assert untied - no_bias == {name for name in untied if name.endswith(".bias")}


def test_base_model_has_the_papers_65_million_parameters():
    with torch.device("meta"):
        model = Transformer(TransformerConfig.base(), generator=torch.Generator(device="cpu"))
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) in range(60, 68)


def test_attention_weights_by_name(build, ids):
    model = build(**ALL_DROPOUT)
    weights = model.attention_weights(*ids)
    assert weights.keys() == {
        *(f"encoder.layers.{i}.self_attn" for i in range(2)),
        *(f"decoder.layers.{i}.{name}" for i in range(3) for name in ("self_attn", "cross_attn")),
    }
    cross = weights["decoder.layers.2.cross_attn"].detach()
    assert cross.shape == (4, 5, 5, 7)
    torch.testing.assert_close(cross[:3].sum(dim=-1), torch.ones(3, 5, 5, dtype=torch.float64), rtol=0, atol=1e-14)
    assert (cross[1, :, :, 4:] == 0).all()
    assert (cross[3] == 0).all()


def test_callers_mistakes(build, ids):
    src, tgt = ids
    with pytest.raises(ValueError, match=r"src: expected ids in \[0, 71\), got 71"):
        build()(src.clone().fill_(71), tgt)
    with pytest.raises(ValueError, match=r"tgt: expected ids in \[0, 67\), got -1"):
        build()(src, tgt.clone().fill_(-1))
    with pytest.raises(ValueError, match="at most 33 positions"):
        build(positions="learned")(src, tgt.repeat(1, 7))
    with pytest.raises(ValueError, match="where weights are asked for, got 'library'"):
        build(attention="library").attention_weights(src, tgt)
    with pytest.raises(TypeError, match="generator"):
        Transformer(TransformerConfig.tiny())


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations(build, ids, activation):
    """P2."""
    model = build(activation=activation, num_encoder_layers=1)
    network, x = model.encoder.layers[0].feed_forward, torch.linspace(-3, 3, 30, dtype=torch.float64).expand(1, 2, 30)
    formula = {
        "relu": lambda v: max(v, 0.0),
        "gelu": lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))),
        "gelu_tanh": lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
        "silu": lambda v: v / (1 + math.exp(-v)),
    }[activation]
    inner = [[formula(v) for v in row] for row in network.linear1(x)[0].tolist()]
    expected = network.linear2(torch.tensor([inner], dtype=torch.float64))
    torch.testing.assert_close(network(x), expected, rtol=0, atol=1e-13)
