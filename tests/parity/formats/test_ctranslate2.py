"""Models in CTranslate2: the same log-probabilities, token by token, up to float32."""

import ctranslate2
import numpy as np
import pytest
import torch

import torch_reference
from parity import twins
from parity.twins_proof import sinusoids
from parity.weights.ctranslate2_export import write_ctranslate2
from parity.weights.formats import FieldError
from transformer_config import TransformerConfig

MODELS = {
    "post-norm": {},
    "pre-norm, untied, silu": {"norm_order": "pre", "activation": "silu", "tie_embeddings": "none"},
    "no biases, tanh gelu, another eps": {
        "norm_order": "pre",
        "norm_eps": 1e-3,
        "use_bias": False,
        "embedding_scale": False,
        "activation": "gelu_tanh",
    },
    "a table with an offset, a fixed bias": {
        "positions": "learned",
        "position_offset": 2,
        "output_bias": "fixed",
        "activation": "relu",
    },
    "a fixed table, one matrix, a trained bias": {
        "positions": "fixed",
        "tie_embeddings": "all",
        "src_vocab_size": 67,
        "output_bias": "trained",
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_log_probabilities(name, tmp_path):
    config = TransformerConfig.tiny(d_model=32, num_heads=4, **MODELS[name])
    weights = {
        key: array * (3 if array.ndim > 1 and "layers" in key else 1)
        for key, array in twins.random_weights(config, seed=1).items()
    }
    pieces = [str(i) for i in range(max(config.src_vocab_size, config.tgt_vocab_size))]
    write_ctranslate2(tmp_path / "model", config, weights, pieces=pieces, sinusoids=sinusoids)
    translator = ctranslate2.Translator(str(tmp_path / "model"), device="cpu", compute_type="float32")
    rng = np.random.default_rng(0)
    src, tgt = rng.integers(4, 60, (6, 7)), rng.integers(4, 60, (6, 5))
    src[:, -1] = config.eos_id
    scored = translator.score_batch(
        [[str(i) for i in row] for row in src.tolist()], [[str(i) for i in row] for row in tgt.tolist()]
    )
    model = torch_reference.Transformer(config, generator=torch.Generator())
    model.load_state_dict({key: torch.tensor(array) for key, array in weights.items()}, strict=False)
    read = np.concatenate([np.full((6, 1), config.bos_id), tgt], axis=1)
    predicted = torch.from_numpy(np.concatenate([tgt, np.full((6, 1), config.eos_id)], axis=1))
    with torch.no_grad():
        log_probs = model(torch.from_numpy(src), torch.from_numpy(read)).log_softmax(-1)
    expected = log_probs.gather(-1, predicted[..., None])[..., 0].numpy()
    np.testing.assert_allclose([each.log_probs for each in scored], expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_norm": "always"}, "final_norm='always', where it has 'if_pre'"),
        ({"window": 2}, "window=2, where it has None"),
        ({"norm_formula": "unbiased_deviation"}, "norm_formula='unbiased_deviation'"),
    ],
)
def test_what_it_cannot_express_is_refused(changes, message, tmp_path):
    config = TransformerConfig.tiny(**changes)
    with pytest.raises(FieldError, match=message):
        write_ctranslate2(tmp_path / "model", config, {}, pieces=[], sinusoids=sinusoids)
    assert not (tmp_path / "model").exists()
