"""The table between the weights of our own two models.

Both have the same modules under the same paths; only leaves differ: a torch Linear stores (out, in) as `weight`, a
Flax one (in, out) as `kernel`, and what torch calls the `weight` of a norm is `scale` in Flax.
"""

from parity.weights.mapping import Rule, WeightMapping
from parity.weights.rules import Transpose

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
