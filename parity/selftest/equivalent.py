"""Mutations that change a program and none of its results, each with the reason. Written by hand, judged by people.

The key is (file, function, what stood there, what stands there now).
"""

_TILING, _CUT_KEYS = ("blockwise.py", "_Tiling.of"), ("blockwise.py", "_Tiling.cut_keys")

ARGUMENTS: dict[tuple[str, str, str, str], str] = {
    (*_TILING, "num_queries != num_keys", "num_queries == num_keys"): (
        "self-attention with a window visits every block of keys; the mask forbids what is outside "
        "it, so the result is the same and only the time differs. No attention with a window has other lengths"
    ),
    (*_TILING, "num_queries / block_size", "num_queries * block_size"): (
        "more groups of queries, all of them padding that join_queries cuts off; only memory and time differ"
    ),
    (*_TILING, "groups - 1", "groups + 1"): (
        "more blocks of padding in front of the keys; their positions are negative, so they are never allowed"
    ),
    (
        *_CUT_KEYS,
        "(self.steps - 1 + self.groups) * self.key_block - before",
        "(self.steps - 1 + self.groups) * self.key_block + before",
    ): "more blocks of padding behind the keys, which no step takes and join_keys cuts off",
}
