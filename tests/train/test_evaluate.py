import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sacrebleu

from flax_transformer.parameters import abstract_model, initial_parameters, with_parameters
from train.batching import evaluation_batches, plan_buckets
from train.bpe import BPETokenizer
from train.config import BatchConfig, ParallelConfig
from train.corpus import load_corpus
from train.evaluate import HeldOutLoss, held_out_loss, score
from train.loss import LossSums
from train.parallel import Devices
from train.sentences import encode_text
from train.translator import Translator

DEVICES = Devices(ParallelConfig(num_devices=1))


@pytest.fixture(scope="module")
def setting(tiny_run, tmp_path_factory):
    """Config with the tokenizer's vocabulary, tokenizer, corpus, untrained parameters."""
    config = tiny_run(tmp_path_factory.mktemp("evaluate"))
    corpus = load_corpus(config.corpus)
    tokenizer = BPETokenizer.train([text for pair in corpus.train for text in pair], config.tokenizer)
    config = config.with_vocabulary(tokenizer.size)
    return config, tokenizer, corpus, DEVICES.place_params(initial_parameters(config.model, jax.random.key(0)))


def test_every_held_out_token_counts_once_too_long_ones_too(setting):
    """T5: an evaluation step that counts what it sees; whole and padded batches."""
    config, tokenizer, corpus, _ = setting
    train, held_out = encode_text(corpus.train, tokenizer), encode_text(corpus.validation, tokenizer)
    buckets = plan_buckets(train, config=config.batch)
    assert held_out.lengths.max() > max(max(b.src_len, b.tgt_len) for b in buckets), "the test wants a longer pair"
    seen = []

    def count(_, arrays):
        (rows,) = np.asarray(arrays.tgt_out)
        real = rows != 0
        seen.extend(tuple(row[keep].tolist()) for row, keep in zip(rows, real, strict=True))
        return LossSums(jnp.float32(0), jnp.float32(2 * real.sum()), jnp.int32(real.sum()))

    loss = held_out_loss(
        count,
        {},
        evaluation_batches(held_out, buckets),
        target=corpus.validation.target,
        vocab_sizes=(1000, 1000),
        devices=DEVICES,
    )
    tokens = sum(map(len, held_out.tgt))
    assert sorted(row for row in seen if row) == sorted(tuple(row.tolist()) for row in held_out.tgt)
    characters = sum(map(len, corpus.validation.target))
    assert loss == HeldOutLoss(nll=2.0 * tokens, num_tokens=tokens, num_characters=characters)
    assert loss.per_token == 2
    assert math.isclose(loss.per_character, 2 * tokens / characters)


def test_loss_equals_sentence_by_sentence(setting):
    config, tokenizer, corpus, params = setting
    held_out = encode_text(corpus.validation, tokenizer)
    plan = evaluation_batches(
        held_out, plan_buckets(held_out, config=BatchConfig(max_tokens=60, num_buckets=2, max_len=60))
    )
    loss = held_out_loss(
        DEVICES.compile_evaluation_step(config.model),
        params,
        plan,
        target=corpus.validation.target,
        vocab_sizes=(1000, 1000),
        devices=DEVICES,
    )
    run = jax.jit(lambda p, s, t: jax.nn.log_softmax(with_parameters(abstract_model(config.model), p)(s, t)))
    total = 0.0
    for source, target in zip(held_out.src, held_out.tgt, strict=True):
        src, tgt = np.zeros((1, 40), np.int32), np.zeros((1, 60), np.int32)
        src[0, : len(source)], tgt[0, : len(target)] = source, [1, *target[:-1].tolist()]
        total -= sum(float(run(params, src, tgt)[0, i, piece]) for i, piece in enumerate(target.tolist()))
    assert math.isclose(loss.nll, total, rel_tol=1e-5)


def test_bleu_is_sacrebleus_on_text():
    """T10."""
    references = ["A man walks his dog .", "Two dogs run.", "Nobody is here, really.", "A red ball"]
    hypotheses = ["A man walks a dog .", "Two dogs run.", "nobody is here , really.", ""]
    scores = score(hypotheses, references)
    assert scores.bleu == sacrebleu.corpus_bleu(hypotheses, [references]).score
    assert scores.bleu_lowercased == sacrebleu.corpus_bleu(hypotheses, [references], lowercase=True).score
    assert 0 < scores.bleu < scores.bleu_lowercased < 100
    assert scores.exact_match == 0.25
    for signature, case in ((scores.bleu_signature, "mixed"), (scores.bleu_lowercased_signature, "lc")):
        assert f"case:{case}|" in signature
        assert "tok:13a" in signature
        assert f"version:{sacrebleu.__version__}" in signature
    perfect = score(references, references)
    assert perfect.bleu == pytest.approx(100)
    assert perfect.chrf == pytest.approx(100)
    assert scores.chrf == sacrebleu.corpus_chrf(hypotheses, [references]).score
    assert "case:mixed|eff:yes|nc:6|nw:0|space:no|" in scores.chrf_signature  # chrF2, not chrF++
    for some in (hypotheses[:2], [*hypotheses, "More."]):
        with pytest.raises(ValueError, match=f"as many hypotheses as references, at least one, got {len(some)} and 4"):
            score(some, references)


def test_translations_keep_the_order_and_empty_lines(setting):
    config, tokenizer, _, params = setting
    translator = Translator(config, tokenizer, DEVICES)
    lines = ["eins zwei", "", "neun", "   ", "drei vier fünf", "acht"]
    together = translator.translate(params, lines)
    assert len(together.lines) == len(lines)
    assert together.lines[1] == together.lines[3] == ""
    for i, line in enumerate(lines):
        alone = translator.translate(params, [line])
        assert alone.lines == (together.lines[i],)
        assert (0 in alone.unfinished) == (i in together.unfinished)
    assert not {1, 3} & set(together.unfinished)
    assert list(together.unfinished) == sorted(together.unfinished)
    assert translator.compilations == 1  # one padded length, the same number of rows
    assert translator.translate(params, []).lines == ()


def test_unfinished_translations_are_reported(setting):
    """A model whose embedding of EOS points away from everything never ends; one that always says EOS says nothing."""
    config, tokenizer, _, params = setting
    name = "src_embedding.weight"
    lines = ["eins zwei", "", "neun"]
    bias = "decoder.layers.0.norm3.bias"
    direction = np.zeros(18, np.float32)
    direction[0] = 100.0
    said = {}
    for sign in (1, -1):
        table = params[name].at[:, 0].set(0.0).at[2, 0].set(float(sign))
        said[sign] = Translator(config, tokenizer, DEVICES).translate(
            {**params, name: table, bias: jnp.asarray(direction)}, lines
        )
    assert said[1].lines == ("", "", "")
    assert said[1].unfinished == ()
    assert said[-1].unfinished == (0, 2)


def test_sources_beyond_a_learned_table_are_refused(setting):
    config, tokenizer, _, _ = setting
    batch = dataclasses.replace(config.batch, max_len=8)
    evaluation = dataclasses.replace(config.evaluation, max_decode_len=8)
    model = config.model.replace(positions="learned", max_len=8)
    limited = config.replace(batch=batch, evaluation=evaluation, model=model)
    with pytest.raises(ValueError, match="at most 8 pieces, got 1 longer ones"):
        Translator(limited, tokenizer, DEVICES).translate({}, ["eins", "xyzxyzxyzxyz"])
