"""Layouts of widely read PyTorch tutorials, and of `torch.nn.Transformer`."""

from collections.abc import Mapping

from parity.weights.formats.state_dict import SRC, TABLES, TGT, StateDict
from parity.weights.mapping import Rule
from parity.weights.rules import MergeHeads, Split

_POST_NORM = {"activation": "relu", "norm_order": "post", "norm_eps": 1e-5, "embedding_scale": False}
_ONE_BATCH = (MergeHeads(1, 0),)
"""A buffer of positions with an axis of length 1 for the batch: without it."""


def _modules(names: Mapping[str, str], *, theirs: str = "", ours: str = "") -> tuple[Rule, ...]:
    """A weight and a bias each, behind these prefixes."""
    return tuple(
        Rule(f"{theirs}{source}.{kind}", f"{ours}{target}.{kind}")
        for source, target in names.items()
        for kind in ("weight", "bias")
    )


def _layers(encoder: Mapping[str, str], cross: Mapping[str, str], *, theirs: str) -> tuple[Rule, ...]:
    """Of both stacks: the decoder has what the encoder has, and the attention to the encoder's output."""
    return _modules(encoder, theirs=theirs.format("encoder"), ours="encoder.layers.{i}.") + _modules(
        {**encoder, **cross}, theirs=theirs.format("decoder"), ours="decoder.layers.{i}."
    )


def _embeddings(src: str, tgt: str, output: str) -> tuple[Rule, ...]:
    return (Rule(src, SRC), Rule(tgt, TGT), *_modules({output: "output_projection"}))


_W = {"self_attn.{W_q,W_k,W_v,W_o}": "self_attn.{q,k,v,out}_proj", "norm{n}": "norm{n}"}
_CROSS_W = {"cross_attn.{W_q,W_k,W_v,W_o}": "cross_attn.{q,k,v,out}_proj"}

TINY = StateDict(
    name="tutorial-tiny",
    title="a tutorial's: encoder_layers.0.self_attn.W_q, ffn.linear1, fc_out, pos_encoding.pe",
    usual={**_POST_NORM, "positions": "fixed"},
    rules=(
        *_layers({**_W, "ffn.linear{m}": "feed_forward.linear{m}"}, _CROSS_W, theirs="{}_layers.{{i}}."),
        *_embeddings("encoder_embedding.weight", "decoder_embedding.weight", "fc_out"),
        Rule("pos_encoding.pe", TABLES[0]),
    ),
)

THEORY_TO_CODE = StateDict(
    name="tutorial-theory-to-code",
    title="a tutorial's: encoder_layers.0.self_attn.W_q, feed_forward.fc1, fc, positional_encoding.pe",
    usual={**_POST_NORM, "positions": "fixed"},
    rules=(
        *_layers({**_W, "feed_forward.fc{m}": "feed_forward.linear{m}"}, _CROSS_W, theirs="{}_layers.{{i}}."),
        *_embeddings("encoder_embedding.weight", "decoder_embedding.weight", "fc"),
        Rule("positional_encoding.pe", TABLES[0], _ONE_BATCH),
    ),
)

FROM_SCRATCH = StateDict(
    name="tutorial-from-scratch",
    title="a tutorial's layers: self_attn.q_linear, src_attn, feed_forward.0, norm1; all else by our names",
    usual={**_POST_NORM, "positions": "fixed"},
    rules=(
        *_layers(
            {
                "self_attn.{q_linear,k_linear,v_linear,out}": "self_attn.{q,k,v,out}_proj",
                "feed_forward.{0,2}": "feed_forward.{linear1,linear2}",
                "norm{n}": "norm{n}",
            },
            {"src_attn.{q_linear,k_linear,v_linear,out}": "cross_attn.{q,k,v,out}_proj"},
            theirs="{}_layers.{{i}}.",
        ),
        *_embeddings(SRC, TGT, "output_projection"),
        Rule("pe", TABLES[0], _ONE_BATCH),
    ),
)

ANNOTATED = StateDict(
    name="annotated",
    title="the Annotated Transformer's: encoder.layers.0.self_attn.linears.0, sublayer.0.norm.a_2, generator.proj",
    usual={
        "activation": "relu",
        "norm_order": "pre",
        "norm_formula": "unbiased_deviation",
        "norm_eps": 1e-6,
        "positions": "fixed",
    },
    rules=(
        *_layers(
            {
                "self_attn.linears.{0,1,2,3}": "self_attn.{q,k,v,out}_proj",
                "feed_forward.w_{m}": "feed_forward.linear{m}",
            },
            {"src_attn.linears.{0,1,2,3}": "cross_attn.{q,k,v,out}_proj"},
            theirs="{}.layers.{{i}}.",
        ),
        *(
            Rule(f"{stack}.layers.{{i}}.sublayer.{n}.norm.{theirs}", f"{stack}.layers.{{i}}.norm{n + 1}.{ours}")
            for stack, sublayers in (("encoder", 2), ("decoder", 3))
            for n in range(sublayers)
            for theirs, ours in (("a_2", "weight"), ("b_2", "bias"))
        ),
        *(
            Rule(f"{stack}.norm.{theirs}", f"{stack}.final_norm.{ours}")
            for stack in ("encoder", "decoder")
            for theirs, ours in (("a_2", "weight"), ("b_2", "bias"))
        ),
        *_embeddings("src_embed.0.lut.weight", "tgt_embed.0.lut.weight", "generator.proj"),
        Rule("src_embed.1.pe", TABLES[0], _ONE_BATCH),
        Rule("tgt_embed.1.pe", TABLES[1], _ONE_BATCH),
    ),
)

_IN_LAYERS = {
    "self_attn.out_proj": "self_attn.out_proj",
    "linear{m}": "feed_forward.linear{m}",
    "norm{n}": "norm{n}",
}
_FUSED = {"encoder": {"self_attn": "self_attn"}, "decoder": {"self_attn": "self_attn", "multihead_attn": "cross_attn"}}

TORCH_TRANSFORMER = StateDict(
    name="torch-transformer",
    title="torch.nn.Transformer's: encoder.layers.0.self_attn.in_proj_weight; embeddings and output by our names",
    usual={"activation": "relu", "norm_order": "post", "norm_eps": 1e-5},
    rules=(
        *_layers(_IN_LAYERS, {"multihead_attn.out_proj": "cross_attn.out_proj"}, theirs="{}.layers.{{i}}."),
        *(
            Rule(
                f"{stack}.layers.{{i}}.{theirs}.in_proj_{kind}",
                f"{stack}.layers.{{i}}.{ours}.{{q,k,v}}_proj.{kind}",
                (Split(3),),
            )
            for stack, attentions in _FUSED.items()
            for theirs, ours in attentions.items()
            for kind in ("weight", "bias")
        ),
        *_modules({"encoder.norm": "encoder.final_norm", "decoder.norm": "decoder.final_norm"}),
        *_embeddings(SRC, TGT, "output_projection"),
    ),
)

STATE_DICTS = (TORCH_TRANSFORMER, ANNOTATED, FROM_SCRATCH, TINY, THEORY_TO_CODE)
"""Their attention, norms and shapes are as the tutorials print them; what they get wrong is said in docs/porting.md."""
