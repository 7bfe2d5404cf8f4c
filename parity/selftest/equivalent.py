"""Mutations that change a program and none of its results, each with the reason. Written by hand, judged by people.

The key is (file, function, what stood there, what stands there now).
"""

_TILING, _CUT_KEYS = ("blockwise.py", "_Tiling.of"), ("blockwise.py", "_Tiling.cut_keys")
_KEEP_TILE = ("dropout.py", "DropoutMasks.keep_tile")
_IN_BLOCKS = (
    "output = blockwise_attention(query, key, value, mask, block_size=self.block_size, source=source, rate=self.rate) "
    "weights = attention_weights(query, key, _dense(mask, query, key)) if return_weights else None "
    "return AttentionOutput(output, weights)"
)
_BEYOND_THE_MASK = (
    "rows and columns beyond the mask are those of padding, whose result is cut off; jax clips too large indices"
)

ARGUMENTS: dict[tuple[str, str, str, str], str] = {
    (*_TILING, "num_queries != num_keys", "num_queries == num_keys"): (
        "self-attention with a window visits every block of keys; the mask forbids what is outside "
        "it, so the result is the same and only the time differs. No attention with a window has other lengths"
    ),
    (*_TILING, "num_queries / block_size", "num_queries * block_size"): (
        "more groups of queries, all of them padding that join_queries cuts off; only memory and time differ"
    ),
    (*_TILING, "num_keys / block_size", "num_keys * block_size"): (
        "more blocks of padding behind the keys, none of which any query may attend to; only memory and time differ"
    ),
    (*_TILING, "1", "2"): (
        "without a window: a second group of queries, all of them padding that join_queries cuts off; only memory and "
        "time differ"
    ),
    (*_TILING, "groups - 1", "groups + 1"): (
        "more blocks of padding in front of the keys; their positions are negative, so they are never allowed"
    ),
    (
        *_CUT_KEYS,
        "(self.steps - 1 + self.groups) * self.key_block - before",
        "(self.steps - 1 + self.groups) * self.key_block + before",
    ): "more blocks of padding behind the keys, which no step takes and join_keys cuts off",
    ("blockwise.py", "_backward", "0", "-1"): (
        "one more step before the first, over keys at negative positions or beyond the window: none is allowed, so its "
        "weights and what it adds are 0; only time differs"
    ),
    (*_KEEP_TILE, "mask.shape[2] - 1", "mask.shape[2] + 1"): _BEYOND_THE_MASK,
    (*_KEEP_TILE, "mask.shape[3] - 1", "mask.shape[3] + 1"): _BEYOND_THE_MASK,
    (*_KEEP_TILE, "1", "0"): _BEYOND_THE_MASK,
    (
        "attention.py",
        "MultiHeadAttention.attend",
        f"if self.implementation == 'blockwise': {_IN_BLOCKS}",
        f"if False: {_IN_BLOCKS}",
    ): "plain attention in the place of attention in blocks: two ways to compute one function, apart in memory alone",
    ("primitives.py", "LayerNorm.__call__", "wide(x)", "(lambda x, *_, **__: x)(x)"): (
        "the same in float64 and float32. In bfloat16 mean and deviation are rounded too, and the result is 2.0 "
        "half-units from the answer instead of 0.9; nnx.GroupNorm, which is right, is 2.2 away. A fault of the size of "
        "what right modules round is not told from them"
    ),
}
