"""The table between the weights of our own two models.

Both have the same modules under the same paths; only leaves differ: a torch Linear stores (out, in) as `weight`, a
Flax one (in, out) as `kernel`, and what torch calls the `weight` of a norm is `scale` in Flax.
"""

from parity.weights.mapping import Rule, WeightMapping
from parity.weights.rules import Transpose
from transformer_config import TransformerConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")
FEED_FORWARD = ("linear1", "linear2")
NORMS = ("norm1", "norm2", "norm3", "final_norm")


def twin_mapping(*, tied: bool) -> WeightMapping:
    """From the torch reference to the Flax twin; `.inverse()` is the way back.

    `tied`: source and target embedding are one tensor (`TransformerConfig.tie_embeddings == "all"`), which torch's
    state dict lists under both names, Flax's state under the source's only.
    """
    linears = [f"{{path*}}.{name}" for name in ATTENTION + FEED_FORWARD] + ["output_projection"]
    norms = [f"{{path*}}.{name}" for name in NORMS]
    unchanged = [f"{path}.bias" for path in linears + norms] + ["src_embedding.weight"]
    unchanged += ["src_positions.table", "tgt_positions.table", "output_bias"]
    if not tied:
        unchanged.append("tgt_embedding.weight")
    return WeightMapping(
        [Rule(f"{path}.weight", f"{path}.kernel", (Transpose(),)) for path in linears]
        + [Rule(f"{path}.weight", f"{path}.scale") for path in norms]
        + [Rule(name, name) for name in unchanged],
        source_aliases={"tgt_embedding.weight": "src_embedding.weight"} if tied else None,
    )


def reference_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the torch reference by its name, tied ones under one name, without making a model."""
    d_model, tie = config.d_model, config.tie_embeddings
    shapes: dict[str, tuple[int, ...]] = {"src_embedding.weight": (config.src_vocab_size, d_model)}
    if tie != "all":
        shapes["tgt_embedding.weight"] = (config.tgt_vocab_size, d_model)
    if config.has_position_table:
        table = (config.position_offset + config.max_len, d_model)
        shapes |= {"src_positions.table": table, "tgt_positions.table": table}
    for i in range(config.num_encoder_layers):
        shapes |= _layer(f"encoder.layers.{i}", ("self_attn",), config)
    for i in range(config.num_decoder_layers):
        shapes |= _layer(f"decoder.layers.{i}", ("self_attn", "cross_attn"), config)
    if config.has_final_norm:
        shapes |= _norm("encoder.final_norm", config) | _norm("decoder.final_norm", config)
    bias = config.trains_output_bias
    if tie == "none":
        shapes |= _linear("output_projection", config.tgt_vocab_size, d_model, bias=bias)
    if config.output_bias == "fixed" or (bias and tie != "none"):
        shapes["output_bias"] = (config.tgt_vocab_size,)
    return shapes


def _layer(name: str, attentions: tuple[str, ...], config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    d_model, d_ff, bias = config.d_model, config.d_ff, config.use_bias
    shapes = _linear(f"{name}.feed_forward.linear1", d_ff, d_model, bias=bias)
    shapes |= _linear(f"{name}.feed_forward.linear2", d_model, d_ff, bias=bias)
    for attention in attentions:
        for projection in ATTENTION:
            shapes |= _linear(f"{name}.{attention}.{projection}", d_model, d_model, bias=bias)
    for n in range(len(attentions) + 1):
        shapes |= _norm(f"{name}.norm{n + 1}", config)
    return shapes


def _linear(name: str, outputs: int, inputs: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def _norm(name: str, config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{kind}": (config.d_model,) for kind in ("weight", "bias")[: 1 + config.use_bias]}
