"""The only file of `train` that places work on devices. For now: one device, under jit."""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Int

from flax_transformer.decoding import greedy
from flax_transformer.parameters import abstract_model, with_parameters
from flax_transformer.transformer import check_ids
from train.batching import Batch
from train.config import TrainConfig
from train.step import Arrays, EvaluationStep, TrainStep, make_evaluation_step, make_train_step
from transformer_config import TransformerConfig

P = ParamSpec("P")
R = TypeVar("R")


class Compiled(Generic[P, R]):
    """A jitted function that counts how often it was compiled: once for every new shape of its arguments (T6)."""

    def __init__(self, function: Callable[P, R], **jit_options: Any):
        self.compilations = 0

        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            # Runs when jax traces, which is when it compiles.
            self.compilations += 1
            return function(*args, **kwargs)

        self._jitted = jax.jit(counted, **jit_options)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the compiled function."""
        return self._jitted(*args, **kwargs)


def compile_train_step(config: TrainConfig) -> Compiled[..., Any]:
    """The training step; the state that goes in is given up, so that its memory is used for the one that comes out."""
    step: TrainStep = make_train_step(config)
    return Compiled(step, donate_argnums=0)


def compile_evaluation_step(config: TransformerConfig) -> Compiled[..., Any]:
    """The evaluation step."""
    step: EvaluationStep = make_evaluation_step(config)
    return Compiled(step)


def compile_greedy(config: TransformerConfig, *, max_len: int) -> Compiled[..., Any]:
    """Greedy decoding: (params, src) -> ids. Whoever calls it has checked the ids."""
    model = abstract_model(config)

    def decode(params: dict[str, Array], src: Int[Array, "batch src_len"]) -> Int[Array, "batch max_len"]:
        return greedy(with_parameters(model, params), src, max_len=max_len)

    return Compiled(decode)


def to_device(batch: Batch, *, vocab_size: int) -> Arrays:
    """The batch as arguments of a compiled step.

    Raises ValueError for ids outside the vocabulary: here, on the host, because a compiled gather clamps them.
    """
    for name, ids in (("src", batch.src), ("tgt_in", batch.tgt_in), ("tgt_out", batch.tgt_out)):
        check_ids(ids, name=name, vocab_size=vocab_size)
    return Arrays(*jax.device_put((batch.src, batch.tgt_in, batch.tgt_out)))


def to_host(tree: Any) -> Any:
    """The same tree with numpy arrays, waiting for what is still being computed."""
    return jax.tree.map(partial(np.asarray), jax.device_get(tree))
