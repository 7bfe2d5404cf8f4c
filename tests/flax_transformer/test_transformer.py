import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_transformer import NO_DROPOUT, DropoutKey, DropoutMasks, Transformer, TransformerConfig
from flax_transformer.attention import MultiHeadAttention
from flax_transformer.masks import AttentionMask
from flax_transformer.parameters import (
    abstract_model,
    fixed_arrays,
    parameter_shapes,
    parameters,
    with_parameters,
)

ALL_DROPOUT = {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.4}


@functools.cache
def compiled(config):
    model = abstract_model(config)
    return jax.jit(lambda params, src, tgt, dropout: with_parameters(model, params)(src, tgt, dropout=dropout))


def logits(model, src, tgt, dropout=NO_DROPOUT):
    return np.asarray(compiled(model.config)(parameters(model) | fixed_arrays(model), src, tgt, dropout))


def values_and_gradients(model, src, tgt, dropout=NO_DROPOUT):
    """Logits, and the gradient of the mean of their squares."""

    def loss(params):
        output = with_parameters(model, params)(jnp.asarray(src), jnp.asarray(tgt), dropout=dropout)
        return jnp.square(output).mean(), output

    (_, output), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(parameters(model))
    return {"logits": output, **gradients}


def assert_same(first, second, *, atol):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=0, atol=atol, err_msg=name)


class Recorder:
    """Keeps everything, and notes every site that asks for a mask."""

    def __init__(self, sites=None, path=""):
        self.sites, self.path = {} if sites is None else sites, path

    def at(self, name):
        return Recorder(self.sites, f"{self.path}.{name}" if self.path else name)

    def for_rows(self, rows):
        return self

    def keep(self, shape, *, rate):
        assert self.path not in self.sites, self.path
        self.sites[self.path] = (shape, rate)

    def keep_tile(self, lead, query_index, key_index, *, rate, step):
        raise NotImplementedError


def normed(config, x):
    centred = x - x.mean(axis=-1, keepdims=True)
    if config.norm_formula == "variance":
        return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + config.norm_eps)
    return centred / (x.std(axis=-1, ddof=1, keepdims=True) + config.norm_eps)


def of_tokens(config, positions, real):
    """A row's positions, or those of its real tokens."""
    if not config.positions_skip_padding:
        return positions
    rows = real.astype(int)
    return np.array([[positions[sum(row[:i])] * row[i] for i in range(len(row))] for row in rows])


def by_hand(model, src, tgt):
    """The paper's post-norm or the pre-norm model in numpy, straight down the page."""
    config = model.config
    p = {name: np.asarray(value) for name, value in (parameters(model) | fixed_arrays(model)).items()}

    def affine(name, x):
        return x @ p[f"{name}.kernel"] + p.get(f"{name}.bias", 0)

    def norm(name, x):
        return normed(config, x) * p[f"{name}.scale"] + p.get(f"{name}.bias", 0)

    def attention(name, x, memory, allowed):
        query, key, value = (
            affine(f"{name}.{part}_proj", y).reshape(*y.shape[:2], config.num_heads, -1)
            for part, y in (("q", x), ("k", memory), ("v", memory))
        )
        scores = np.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(config.head_dim)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True)) * allowed
        weights /= weights.sum(axis=-1, keepdims=True)
        return affine(f"{name}.out_proj", np.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape))

    def sublayer(name, x, function):
        return x + function(norm(name, x)) if config.norm_order == "pre" else norm(name, x + function(x))

    def feed_forward(name, x):
        return affine(f"{name}.linear2", np.maximum(affine(f"{name}.linear1", x), 0))

    tables = {side: p.get(f"{side}_embedding.weight", p["src_embedding.weight"]) for side in ("src", "tgt")}

    def embed(side, ids, real):
        positions = np.asarray(getattr(model, f"{side}_positions")(ids.shape[1]))
        scale = math.sqrt(config.d_model) if config.embedding_scale else 1
        return scale * tables[side][ids] + of_tokens(config, positions, real[:, 0, 0])

    src_real, tgt_real = (ids[:, None, None, :] != config.pad_id for ids in (src, tgt))
    if config.bos_id == config.pad_id:
        tgt_real[..., 0] = True
    past = np.tril(np.ones((tgt.shape[1], tgt.shape[1]), bool))
    x = embed("src", src, src_real)
    for i in range(config.num_encoder_layers):
        name = f"encoder.layers.{i}"
        x = sublayer(f"{name}.norm1", x, lambda y, n=name: attention(f"{n}.self_attn", y, y, src_real))
        x = sublayer(f"{name}.norm2", x, lambda y, n=name: feed_forward(f"{n}.feed_forward", y))
    memory = norm("encoder.final_norm", x) if "encoder.final_norm.scale" in p else x
    x = embed("tgt", tgt, tgt_real)
    for i in range(config.num_decoder_layers):
        name = f"decoder.layers.{i}"
        x = sublayer(f"{name}.norm1", x, lambda y, n=name: attention(f"{n}.self_attn", y, y, tgt_real & past))
        x = sublayer(f"{name}.norm2", x, lambda y, n=name: attention(f"{n}.cross_attn", y, memory, src_real))
        x = sublayer(f"{name}.norm3", x, lambda y, n=name: feed_forward(f"{n}.feed_forward", y))
    x = norm("decoder.final_norm", x) if "decoder.final_norm.scale" in p else x
    logits = affine("output_projection", x) if config.tie_embeddings == "none" else x @ tables["tgt"].T
    return logits + p.get("output_bias", 0)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "changes",
    [
        {"num_encoder_layers": 2, "num_decoder_layers": 3},
        {"norm_order": "pre", "tie_embeddings": "none"},
        {"use_bias": False, "tie_embeddings": "none"},
        {"final_norm": "always", "norm_formula": "unbiased_deviation", "norm_eps": 1e-2},
        {"final_norm": "never", "norm_order": "pre", "embedding_scale": False, "positions_skip_padding": True},
        {"bos_id": 0, "output_bias": "trained", "tie_embeddings": "all", "src_vocab_size": 67},
        {"output_bias": "trained", "use_bias": False, "tie_embeddings": "none"},
        {"positions": "fixed", "positions_skip_padding": True, "output_bias": "fixed"},
    ],
)
def test_model_equals_the_paper_written_down_the_page(build, ids, changes):
    """P13, P14."""
    model = build(activation="relu", **changes)
    src, tgt = (x[:3] for x in ids)  # rows with at least one key
    if changes.get("positions_skip_padding"):
        src = src[:, ::-1]  # padding on the left
    if "bos_id" in changes:
        tgt = np.concatenate([np.zeros_like(tgt[:, :1]), tgt], axis=1)
    np.testing.assert_allclose(logits(model, src, tgt), by_hand(model, src, tgt), rtol=0, atol=1e-11)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("attention", ["plain", "blockwise", "library"])
def test_padding_and_neighbours_change_nothing(build, ids, attention):
    """D3; the library's softmax is float32 even here."""
    model = build(attention=attention)
    src, tgt = (x[1:2] for x in ids)
    short = logits(model, src[:, :4], tgt[:, :3])
    atol = 1e-5 if attention == "library" else 1e-12
    np.testing.assert_allclose(logits(model, *ids)[1:2, :3], short, rtol=0, atol=atol)
    padded = np.pad(src, ((0, 0), (0, 5))), np.pad(tgt, ((0, 0), (0, 4)))
    np.testing.assert_allclose(logits(model, *padded)[:, :3], short, rtol=0, atol=atol)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("changes", [{}, {"norm_order": "pre", "window": 2}])
def test_blockwise_and_plain_agree_on_the_whole_model(build, ids, changes):
    """With a source row of nothing but padding (P17), and dropout masks handed in for the attention weights."""
    rate = {"attention_dropout": 0.3}
    plain, other = (build(attention=name, **rate, **changes) for name in ("plain", "blockwise"))
    rng, sites = np.random.default_rng(0), Recorder()
    plain(*map(jnp.asarray, ids), dropout=sites)
    masks = DropoutMasks({name: jnp.asarray(rng.random(shape) > 0.3) for name, (shape, _) in sites.sites.items()})
    assert len(sites.sites) == 3
    expected = values_and_gradients(plain, *ids, masks)
    assert all(np.isfinite(value).all() for value in expected.values())
    assert_same(values_and_gradients(other, *ids, masks), expected, atol=1e-12)


def test_an_empty_source_sentence_is_finite_in_every_implementation(build, ids):
    for attention in ("plain", "blockwise", "library"):
        assert np.isfinite(logits(build(attention=attention), *ids)).all()


def test_the_future_cannot_be_seen_and_a_window_reaches_so_far(build, ids):
    src, tgt = ids
    changed = tgt.copy()
    changed[:, 3:] = 9
    first, second = (logits(build(), src, x) for x in (tgt, changed))
    assert (first[:, :3] == second[:, :3]).all()
    assert (first[0, 3:] != second[0, 3:]).all()
    changed = tgt.copy()
    changed[:, 0] = 9
    first, second = (logits(build(window=0), src, x) for x in (tgt, changed))
    assert (first[:, 1:] == second[:, 1:]).all()
    assert (first[:, 0] != second[:, 0]).all()


def test_every_site_draws_once_under_its_name(ids):
    recorder = Recorder()
    config = TransformerConfig.tiny(**ALL_DROPOUT)
    run = lambda params: with_parameters(abstract_model(config), params)(*map(jnp.asarray, ids), dropout=recorder)  # noqa: E731
    jax.eval_shape(run, parameter_shapes(config))
    expected = {"src_dropout": ((4, 7, 30), 0.2), "tgt_dropout": ((4, 5, 30), 0.2)}
    for i in range(2):
        layer = f"encoder.layers.{i}"
        expected[f"{layer}.self_attn.weights"] = (4, 5, 7, 7), 0.3
        expected[f"{layer}.feed_forward.activation"] = (4, 7, 44), 0.4
        expected |= {f"{layer}.dropout{n}": ((4, 7, 30), 0.2) for n in (1, 2)}
    for i in range(3):
        layer = f"decoder.layers.{i}"
        expected[f"{layer}.self_attn.weights"] = (4, 5, 5, 5), 0.3
        expected[f"{layer}.cross_attn.weights"] = (4, 5, 5, 7), 0.3
        expected[f"{layer}.feed_forward.activation"] = (4, 5, 44), 0.4
        expected |= {f"{layer}.dropout{n}": ((4, 5, 30), 0.2) for n in (1, 2, 3)}
    assert recorder.sites == expected


def test_dropout_changes_the_logits_by_its_key_alone(build, ids):
    model = build(**ALL_DROPOUT)
    with_key = [logits(model, *ids, DropoutKey(jax.random.key(seed))) for seed in (0, 0, 1)]
    assert (with_key[0] == with_key[1]).all()
    assert (with_key[0] != with_key[2]).any()
    assert (with_key[0] != logits(model, *ids)).any()
    assert (logits(model, *ids) == logits(build(), *ids)).all()  # evaluation does not drop


@pytest.mark.usefixtures("x64")
def test_gradient_checkpointing_changes_no_gradient(build, ids):
    """The same masks are drawn again in the recomputation, in that of the blockwise attention inside it too."""
    key = DropoutKey(jax.random.key(0))
    plain, checkpointed = (
        build(attention="blockwise", gradient_checkpointing=flag, **ALL_DROPOUT) for flag in (False, True)
    )
    assert_same(values_and_gradients(checkpointed, *ids, key), values_and_gradients(plain, *ids, key), atol=1e-12)
    text = str(
        jax.make_jaxpr(lambda p: with_parameters(checkpointed, p)(*map(jnp.asarray, ids)))(parameters(checkpointed))
    )
    assert "remat" in text or "checkpoint" in text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_width(build, ids, dtype):
    """T15: activations and logits are narrow, parameters float32, softmax and norms computed in float32."""
    model = build(dtype=dtype)
    params = parameters(model)
    assert {value.dtype for value in params.values()} == {jnp.dtype("float32")}
    got = logits(model, *ids)
    assert got.dtype == dtype
    error = np.abs(got.astype(np.float64) - logits(build(), *ids)).max()
    assert 0 < error < 30 * float(jnp.finfo(dtype).eps)
    jaxpr = jax.make_jaxpr(lambda p: with_parameters(model, p)(*map(jnp.asarray, ids)))(params)
    dtypes = {(e.primitive.name, e.outvars[0].aval.dtype.name) for e in walk(jaxpr.jaxpr)}
    for primitive in ("exp", "rsqrt"):
        assert {kind for name, kind in dtypes if name == primitive} == {"float32"}
    assert {kind for name, kind in dtypes if name == "dot_general"} == {dtype}


def walk(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                yield from walk(inner.jaxpr)
            elif hasattr(inner, "eqns"):
                yield from walk(inner)


@pytest.mark.parametrize("param_dtype", ["bfloat16", "float16"])
def test_narrow_parameters(build, ids, param_dtype):
    model = build(param_dtype=param_dtype)
    assert {value.dtype for value in parameters(model).values()} == {jnp.dtype(param_dtype)}
    assert logits(model, *ids).dtype == np.float32


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("attention", ["plain", "library"])
def test_encoding_and_decoding_apart_is_the_whole_model(build, ids, attention):
    model = build(attention=attention)
    src, tgt = map(jnp.asarray, ids)

    def apart(params):
        m = with_parameters(model, params)
        memory = m.encode(src)
        return m.decode(tgt, memory, src_mask=src != 0, tgt_mask=tgt != 0)

    np.testing.assert_array_equal(jax.jit(apart)(parameters(model)), logits(model, *ids))


@pytest.mark.parametrize("attention", ["plain", "blockwise"])
def test_attention_weights_by_name(build, ids, attention):
    model = build(attention=attention, num_encoder_layers=2, window=2)
    src, tgt = ids
    weights = jax.jit(lambda p: with_parameters(model, p).attention_weights(*map(jnp.asarray, ids)))(parameters(model))
    assert {name: value.shape for name, value in weights.items()} == {
        "encoder.layers.0.self_attn": (4, 5, 7, 7),
        "encoder.layers.1.self_attn": (4, 5, 7, 7),
        "decoder.layers.0.self_attn": (4, 5, 5, 5),
        "decoder.layers.0.cross_attn": (4, 5, 5, 7),
    }
    near = lambda n: np.abs(np.arange(n)[:, None] - np.arange(n)) <= 2  # noqa: E731
    allowed = {
        "encoder.layers.0.self_attn": (src != 0)[:, None, :] & near(7),
        "decoder.layers.0.self_attn": (tgt != 0)[:, None, :] & near(5) & np.tril(np.ones((5, 5), bool)),
        "decoder.layers.0.cross_attn": np.broadcast_to((src != 0)[:, None, :], (4, 5, 7)),
    }
    for name, may in allowed.items():
        value = np.asarray(weights[name])
        assert (value[np.broadcast_to(~may[:, None], value.shape)] == 0).all()
        has_key = np.broadcast_to(may.any(axis=-1)[:, None], value.shape[:3])
        np.testing.assert_allclose(value.sum(axis=-1), has_key, atol=1e-6)


def test_the_library_has_no_weights_to_give(build, ids):
    with pytest.raises(ValueError, match="expected attention='plain' or 'blockwise' where weights are asked for"):
        build(attention="library").attention_weights(*map(jnp.asarray, ids))


@pytest.mark.parametrize(
    ("side", "value", "message"), [(0, 71, "src: .* 71"), (0, -1, "src: .* -1"), (1, 67, "tgt: .* 67")]
)
def test_ids_outside_the_vocabulary(build, ids, side, value, message):
    ids[side][0, 2] = value
    with pytest.raises(ValueError, match=rf"expected ids in \[0, .*got {value}") as error:
        build()(*map(jnp.asarray, ids))
    assert str(error.value).startswith(message[:4])


def test_sequences_beyond_a_learned_table(build, ids):
    model = build(positions="learned", max_len=6)
    with pytest.raises(ValueError, match="at most 6 positions, the table's, got a sequence of 7"):
        model(*map(jnp.asarray, ids))


def test_wrong_shapes_are_refused_by_their_annotations(build, ids):
    """The checks that run with these tests see a batch of another size."""
    with pytest.raises(Exception, match="Type-check error"):
        build()(jnp.asarray(ids[0][:2]), jnp.asarray(ids[1]))


def test_attention_heads_are_split_side_by_side():
    from flax import nnx

    module = MultiHeadAttention(TransformerConfig.tiny(), rngs=nnx.Rngs(0))
    x = jnp.arange(2 * 3 * 30.0).reshape(2, 3, 30)
    heads = module.split_heads(x)
    assert heads.shape == (2, 5, 3, 6)
    assert (heads[1, 2, 0] == x[1, 0, 12:18]).all()
    assert (module.merge_heads(heads) == x).all()
    assert module(x, x, mask=AttentionMask()).weights is None


def test_nothing_is_stored_besides_parameters():
    """P26: no buffer that the twin would train, nor the reverse."""
    from flax import nnx

    model = abstract_model(TransformerConfig.tiny())
    _, _, rest = nnx.split(model, nnx.Param, ...)
    assert not jax.tree.leaves(rest)
    assert isinstance(model, Transformer)
