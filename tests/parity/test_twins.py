"""The twins are equal, over a matrix of configs: module outputs, logits, loss, gradients, float32 errors, dropout."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import flax_transformer
import torch_reference
from flax_transformer.parameters import abstract_model, with_parameters
from parity import ladder, twins
from parity.compare import relative_error
from parity.tolerances import FLOAT64_RULE
from parity.weights.twins import twin_mapping
from torch_reference.training import label_smoothed_cross_entropy as torch_loss
from train.loss import label_smoothed_cross_entropy as jax_loss
from transformer_config import TransformerConfig

ONE_LAYER = {"num_encoder_layers": 1, "num_decoder_layers": 1}
SHARED = {"tie_embeddings": "all", "tgt_vocab_size": 71}

VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "paper": {"activation": "relu", **SHARED},
    "pre-norm": {"norm_order": "pre", **ONE_LAYER},
    "pre-norm, untied, relu": {"norm_order": "pre", "tie_embeddings": "none", "activation": "relu", **ONE_LAYER},
    "no biases, untied": {"use_bias": False, "tie_embeddings": "none", **ONE_LAYER},
    "no biases, pre-norm": {"use_bias": False, "norm_order": "pre", **ONE_LAYER},
    "tanh gelu": {"activation": "gelu_tanh", **ONE_LAYER},
    "silu": {"activation": "silu", **ONE_LAYER},
    "concatenated": {"positions": "concatenated", **ONE_LAYER},
    "half minus 1, offset": {"positions": "concatenated_half_minus_1", "position_offset": 2, **ONE_LAYER},
    "learned": {"positions": "learned", **ONE_LAYER},
    "learned, offset": {"positions": "learned", "position_offset": 2, **ONE_LAYER},
    "beyond max_len": {"max_len": 4, **ONE_LAYER},
    "interpolated sinusoids": {"max_len": 5, "interpolated_len": 12, **ONE_LAYER},
    "interpolated learned": {"max_len": 5, "interpolated_len": 12, "positions": "learned", **ONE_LAYER},
    "fixed positions": {"positions": "fixed", "position_offset": 2, "d_model": 35, **ONE_LAYER},
    "sinusoids that skip padding": {"positions_skip_padding": True, "position_offset": 1, **ONE_LAYER},
    "fixed positions that skip padding": {"positions": "fixed", "positions_skip_padding": True, **ONE_LAYER},
    "final norms, post-norm": {"final_norm": "always", **ONE_LAYER},
    "no final norms, pre-norm": {"final_norm": "never", "norm_order": "pre", **ONE_LAYER},
    "unbiased deviation": {"norm_formula": "unbiased_deviation", "norm_eps": 1e-6, "norm_order": "pre", **ONE_LAYER},
    "unscaled embeddings": {"embedding_scale": False, **ONE_LAYER},
    "frozen padding": {"freeze_padding": True, **SHARED, **ONE_LAYER},
    "starts with padding": {"bos_id": 0, "freeze_padding": True, **SHARED, **ONE_LAYER},
    "output bias, tied": {"output_bias": "trained", **SHARED, **ONE_LAYER},
    "output bias alone": {"output_bias": "trained", "tie_embeddings": "none", "use_bias": False, **ONE_LAYER},
    "no output bias, untied": {"output_bias": "never", "tie_embeddings": "none", **ONE_LAYER},
    "fixed output bias": {"output_bias": "fixed", **ONE_LAYER},
    "fixed output bias, untied": {"output_bias": "fixed", "tie_embeddings": "none", **ONE_LAYER},
    "window": {"window": 2, **ONE_LAYER},
    "blockwise": {"attention": "blockwise", **ONE_LAYER},
    "blockwise, one block": {"attention": "blockwise", "attention_block_size": 64, **ONE_LAYER},
    "blockwise, window": {"attention": "blockwise", "window": 2, "norm_order": "pre", **ONE_LAYER},
    "blockwise, wide window": {"attention": "blockwise", "window": 7, "attention_block_size": 3, **ONE_LAYER},
    "large eps": {"norm_eps": 1e-2, **ONE_LAYER},
    "one head": {"num_heads": 1, **ONE_LAYER},
    "gradient checkpointing": {"gradient_checkpointing": True, **ONE_LAYER},
    "uneven stacks": {"num_encoder_layers": 3, "num_decoder_layers": 1, "norm_order": "pre"},
    "other special ids": {"pad_id": 2, "bos_id": 0, "eos_id": 1, **ONE_LAYER},
}


CORE = ("weights", "forward", "loss", "gradients")


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str) -> None:
    config = TransformerConfig.tiny(**VARIANTS[name])
    outcome = ladder.check(twins.preset_pair(config, seed=len(name), name=name), rungs=CORE)
    assert outcome.passed, outcome.failed
    assert [rung.name for rung in outcome.rungs if rung.passed] == list(CORE)
    assert outcome.first_difference is None
    assert outcome.redrawn == (), "twice the reference's float32 error, without a second look"
    assert outcome.gradients_identical.share > 0.999
    for section in (section for rung in outcome.rungs for section in rung.outcome.sections):
        # Tighter than the harness's bound for anybody's models: ours are known.
        if section.precision == "float64" and section.rule == FLOAT64_RULE:
            assert all(comparison.error <= 1e-13 for comparison in section.comparisons), section.worst
    # One zero gradient for each key projection's bias, and none besides: each is counted, none swallowed.
    attentions = config.num_encoder_layers + 2 * config.num_decoder_layers
    assert len(outcome.zero_gradients) == (attentions if config.use_bias else 0)
    assert all(parameter.endswith("k_proj.bias") for parameter in outcome.zero_gradients)


@pytest.mark.parametrize("attention", ["plain", "blockwise"])
def test_the_whole_ladder(attention: str) -> None:
    """Every rung compared and passed; among the hard inputs rows in which every key is masked (P17)."""
    config = TransformerConfig.tiny(attention=attention, **ONE_LAYER)
    outcome = ladder.check(twins.preset_pair(config), keep_going=True)
    assert [rung.name for rung in outcome.rungs if not rung.passed] == [], [
        (rung.name, rung.skipped, rung.failures[:3]) for rung in outcome.rungs if not rung.passed
    ]
    hard = {section.title: section for section in outcome.rung("adversarial").outcome.sections}
    assert {"padding on the left", "a source and a target of padding only", "a length of 1"} <= hard.keys()


def test_library_attention_is_kept_out_of_the_float64_gate() -> None:
    with pytest.raises(ValueError, match="plain"):
        twins.preset_pair(TransformerConfig.tiny(attention="library"))


class RecordingMasks:
    """A DropoutSource for torch that draws masks and remembers them by site."""

    def __init__(self, masks: dict[str, np.ndarray], rng: np.random.Generator, path: str = ""):
        self.masks, self.rng, self.path = masks, rng, path

    def at(self, name: str) -> "RecordingMasks":
        return RecordingMasks(self.masks, self.rng, f"{self.path}.{name}" if self.path else name)

    def keep(self, shape: tuple[int, ...], *, rate: float, device: object = None) -> torch.Tensor:
        assert self.path not in self.masks, f"two masks for {self.path}"
        self.masks[self.path] = self.rng.random(shape) >= rate
        return torch.from_numpy(self.masks[self.path])

    def keep_tile(self, *_: object, **__: object) -> None:
        raise AssertionError("expected the plain implementation")


@pytest.mark.parametrize("attention", ["plain", "blockwise"])
@pytest.mark.parametrize("norm_order", ["post", "pre"])
def test_the_same_dropout_masks_give_the_same_gradients(attention: str, norm_order: str) -> None:
    config = TransformerConfig.tiny(
        dropout=0.2,
        attention_dropout=0.3,
        activation_dropout=0.1,
        norm_order=norm_order,
        dtype="float64",
        param_dtype="float64",
        **ONE_LAYER,
    )
    weights, batch = twins.random_weights(config, seed=1), twins.random_batch(config, seed=1)
    model = torch_reference.Transformer(config, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights[parameter_name].astype(np.float64)))
    masks: dict[str, np.ndarray] = {}
    src, tgt_in, tgt_out = (torch.from_numpy(batch[key]) for key in ("src", "tgt_in", "tgt_out"))
    model(src, tgt_in, dropout=RecordingMasks(masks, np.random.default_rng(2)))
    # Two embeddings; residuals 2 + 3, attention weights 1 + 2, activations 1 + 1.
    assert len(masks) == 2 + 5 + 3 + 2

    config = config.replace(attention=attention)
    model.config = config
    for attention_module in (m for m in model.modules() if isinstance(m, torch_reference.attention.MultiHeadAttention)):
        attention_module.implementation = attention
    sums = torch_loss(model(src, tgt_in, dropout=torch_reference.DropoutMasks(masks)), tgt_out, smoothing=0.1, pad_id=0)
    sums.loss.backward()
    mapping = twin_mapping(tied=False)
    expected = mapping.apply({n: p.grad.numpy() for n, p in model.named_parameters()}, kind="gradient")

    with jax.enable_x64(True):
        like = abstract_model(config)
        params = {n: jnp.asarray(w, jnp.float64) for n, w in mapping.apply(weights).items()}
        dropout = flax_transformer.DropoutMasks({n: jnp.asarray(m) for n, m in masks.items()})

        def loss(params: dict[str, jax.Array]) -> jax.Array:
            logits = with_parameters(like, params)(
                jnp.asarray(batch["src"]), jnp.asarray(batch["tgt_in"]), dropout=dropout
            )
            return jax_loss(logits, jnp.asarray(batch["tgt_out"]), smoothing=0.1, pad_id=0).loss

        value, gradients = jax.jit(jax.value_and_grad(loss))(params)
        assert float(value) == pytest.approx(sums.loss.item(), rel=1e-13)
        for parameter_name, gradient in gradients.items():
            if not parameter_name.endswith("k_proj.bias"):
                assert relative_error(np.asarray(gradient), expected[parameter_name]) < 1e-12, parameter_name


def test_dropout_sites_bear_the_same_names_in_both() -> None:
    config = TransformerConfig.tiny(dropout=0.1, attention_dropout=0.1, activation_dropout=0.1)
    batch = twins.random_batch(config, seed=0)
    masks: dict[str, np.ndarray] = {}
    reference = torch_reference.Transformer(config, generator=torch.Generator().manual_seed(0))
    reference(
        torch.from_numpy(batch["src"]),
        torch.from_numpy(batch["tgt_in"]),
        dropout=RecordingMasks(masks, np.random.default_rng(0)),
    )
    port = flax_transformer.Transformer(config, rngs=nnx.Rngs(0))
    for site in masks:
        others = flax_transformer.DropoutMasks({k: jnp.asarray(m) for k, m in masks.items() if k != site})
        with pytest.raises(ValueError, match=f"for {site}, got none".replace(".", r"\.")):
            jax.eval_shape(lambda o=others: port(jnp.asarray(batch["src"]), jnp.asarray(batch["tgt_in"]), dropout=o))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_width_twins_are_equally_far_from_the_answer(dtype: str) -> None:
    exact = TransformerConfig.tiny(dtype="float64", param_dtype="float64")
    half = TransformerConfig.tiny(dtype=dtype)
    weights, batch = twins.random_weights(exact, seed=3), twins.random_batch(exact, seed=3)
    src, tgt = torch.from_numpy(batch["src"]), torch.from_numpy(batch["tgt_in"])

    def torch_logits(config: TransformerConfig) -> np.ndarray:
        model = torch_reference.Transformer(config, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(weights[name]))
            return model(src, tgt).double().numpy()

    answer = torch_logits(exact)
    params = {n: jnp.asarray(w) for n, w in twin_mapping(tied=False).apply(weights).items()}
    port = jax.jit(with_parameters(abstract_model(half), params))(
        jnp.asarray(batch["src"]), jnp.asarray(batch["tgt_in"])
    )
    assert port.dtype == jnp.dtype(dtype)
    theirs, ours = relative_error(torch_logits(half), answer), relative_error(np.asarray(port, np.float64), answer)
    assert ours < 2 * theirs
    assert theirs < 2 * ours
    # Near the precision of the format: 8 and 11 bits.
    assert ours < (0.05 if dtype == "bfloat16" else 0.01)


def test_both_draw_from_the_same_distributions() -> None:
    config = TransformerConfig.tiny(tie_embeddings="none", positions="learned")
    mapping = twin_mapping(tied=False)
    draws = 40
    theirs = [
        mapping.apply({n: p.detach().numpy() for n, p in _reference(config, seed).named_parameters()})
        for seed in range(draws)
    ]
    init = jax.jit(lambda key: flax_transformer.parameters.initial_parameters(config, key))
    ours = [init(jax.random.key(seed)) for seed in range(draws)]
    for name in theirs[0]:
        a = np.concatenate([np.ravel(draw[name]) for draw in theirs]).astype(np.float64)
        b = np.concatenate([np.ravel(draw[name]) for draw in ours]).astype(np.float64)
        if a.std() == 0.0:
            assert np.array_equal(np.unique(a), np.unique(b)), name
            continue
        # Six standard errors: a scale off by a few percent is seen, chance is not (1e-8 a parameter).
        assert abs(a.mean() - b.mean()) < 6 * a.std() * np.sqrt(2 / a.size), name
        assert abs(a.var() / b.var() - 1.0) < 6 * np.sqrt(2 * (2.0 + 0.0) / a.size), name
        assert np.abs(a).max() == pytest.approx(np.abs(b).max(), rel=0.35), name


def _reference(config: TransformerConfig, seed: int) -> torch_reference.Transformer:
    return torch_reference.Transformer(config, generator=torch.Generator().manual_seed(seed))
