"""Recipes: functions that return a full TrainConfig."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.config import (
    BatchConfig,
    CheckpointConfig,
    CorpusConfig,
    EvaluationConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)
from train.search import SearchConfig
from transformer_config import TransformerConfig


def demo() -> TrainConfig:
    """A small model on the embedded corpus: minutes on two CPU cores."""
    return TrainConfig(
        run_dir=Path("runs/demo"),
        corpus=CorpusConfig(kind="demo"),
        tokenizer=TokenizerConfig(vocab_size=2_000, split_digits=True),
        model=TransformerConfig(
            src_vocab_size=2_000,
            tgt_vocab_size=2_000,
            d_model=128,
            d_ff=256,
            num_heads=4,
            num_encoder_layers=2,
            num_decoder_layers=2,
            norm_order="pre",  # in few epochs well ahead of post-norm: 96% against 90% exact after six
            dropout=0.0,
            max_len=128,
        ),
        batch=BatchConfig(max_tokens=1_024, num_buckets=3, max_len=64),
        optimizer=OptimizerConfig(noam_factor=0.7, warmup_steps=400),
        evaluation=EvaluationConfig(every_epochs=1, batch_size=256, max_decode_len=64),
        epochs=9,
    )


def multi30k_de_en() -> TrainConfig:
    """Multi30k, German to English: 3+3 layers, d_model 256, joint BPE of 8,000, 2,500 tokens a batch, 20 epochs.

    Its scores, how long it takes and what else was tried: benchmarks/results.

    From the hub, not from files: `multi30k-de-en --corpus.kind hub --corpus.hub bentrevett/multi30k
    --corpus.validation-split validation --corpus.test-split test`.
    """
    return _multi30k("de", "en")


def multi30k_en_de() -> TrainConfig:
    """The same, English to German."""
    return _multi30k("en", "de")


def _multi30k(source: str, target: str) -> TrainConfig:
    return TrainConfig(
        run_dir=Path(f"runs/multi30k-{source}-{target}"),
        corpus=CorpusConfig(kind="files", path=Path("data/multi30k"), source_language=source, target_language=target),
        tokenizer=TokenizerConfig(vocab_size=8_000),
        model=TransformerConfig(
            src_vocab_size=8_000,
            tgt_vocab_size=8_000,
            d_model=256,
            d_ff=1024,
            num_heads=8,
            num_encoder_layers=3,
            num_decoder_layers=3,
            norm_order="pre",
            dropout=0.2,
            max_len=256,
        ),
        batch=BatchConfig(max_tokens=2_500, num_buckets=8, max_len=128),
        optimizer=OptimizerConfig(
            schedule="cosine",
            learning_rate=2e-3,
            warmup_steps=400,
            decay_steps=4_260,  # all there are: 20 epochs of 213
            ema_decay=0.998,
        ),
        evaluation=EvaluationConfig(batch_size=64, max_decode_len=80),
        search=SearchConfig(alpha=1.0),
        checkpoint=CheckpointConfig(every_steps=100),
        epochs=20,
    )


def iwslt16_de_en() -> TrainConfig:
    """IWSLT 2016, German to English: 6+6 layers, d_model 512 with a narrow d_ff, much dropout for little text."""
    return _iwslt(
        Path("runs/iwslt16-de-en"),
        CorpusConfig(kind="iwslt", path=Path("data/iwslt16"), validation_split="tst2013", test_split="tst2014"),
    )


def iwslt17_de_en() -> TrainConfig:
    """IWSLT 2017 from the hub, German to English: the model of iwslt16-de-en.

    The dataset is a script, so the hub's own conversion of it to Parquet is read. Tried against a stand-in for the hub
    alone: nothing was downloaded from the real one.
    """
    return _iwslt(
        Path("runs/iwslt17-de-en"),
        CorpusConfig(
            kind="hub",
            hub="IWSLT/iwslt2017",
            hub_config="iwslt2017-de-en",
            hub_revision="refs/convert/parquet",
            validation_split="validation",
            test_split="test",
        ),
    )


def _iwslt(run_dir: Path, corpus: CorpusConfig) -> TrainConfig:
    return TrainConfig(
        run_dir=run_dir,
        corpus=corpus,
        tokenizer=TokenizerConfig(vocab_size=10_000),
        model=TransformerConfig(
            src_vocab_size=10_000,
            tgt_vocab_size=10_000,
            d_model=512,
            d_ff=1024,
            num_heads=4,
            num_encoder_layers=6,
            num_decoder_layers=6,
            dropout=0.3,
            max_len=512,
        ),
        batch=BatchConfig(max_tokens=4_096, num_buckets=8, max_len=256),
        optimizer=OptimizerConfig(schedule="inverse_sqrt", learning_rate=5e-4, warmup_steps=4_000),
        evaluation=EvaluationConfig(batch_size=64, max_decode_len=256),
        checkpoint=CheckpointConfig(every_steps=1_000, keep=5),
        epochs=60,
    )


def wmt14_en_de_base() -> TrainConfig:
    """WMT 2014 from the hub, English to German: the paper's base model, 100,000 steps of 25,000 tokens a side.

    The paper's (Vaswani et al. 2017, sections 5.1, 5.3, 5.4, 6.1, table 3): layers, widths, heads, dropout, shared BPE
    of 37,000, batches, Adam, schedule, label smoothing, steps, and as many checkpoints to average as it did, 5, at the
    distance in steps of its 10 minutes. Ours: byte-level BPE; a cap of 256 pieces; a token budget that counts padding,
    so that a batch holds fewer real tokens; activations in bfloat16, with parameters, softmax and loss in float32.
    """
    return _wmt14(
        "base",
        # 0.4 seconds a step (5.2): 1,500 steps in 10 minutes.
        checkpoint=CheckpointConfig(every_steps=1_500, keep=5),
        max_steps=100_000,
    )


def wmt14_en_de_big() -> TrainConfig:
    """The same with the paper's big model: d_model 1024, d_ff 4096, 16 heads, dropout 0.3, 300,000 steps.

    Of it the paper averages the last 20 checkpoints.
    """
    return _wmt14(
        "big",
        # 1.0 seconds a step (5.2): 600 steps in 10 minutes.
        checkpoint=CheckpointConfig(every_steps=600, keep=20),
        max_steps=300_000,
        d_model=1024,
        d_ff=4096,
        num_heads=16,
        dropout=0.3,
    )


def _wmt14(size: str, *, checkpoint: CheckpointConfig, max_steps: int, **model: Any) -> TrainConfig:
    return TrainConfig(
        run_dir=Path(f"runs/wmt14-en-de-{size}"),
        corpus=CorpusConfig(
            kind="hub",
            hub="wmt/wmt14",
            hub_config="de-en",
            source_language="en",
            target_language="de",
            validation_split="validation",
            test_split="test",
        ),
        tokenizer=TokenizerConfig(vocab_size=37_000),
        model=TransformerConfig(dtype="bfloat16", **model),  # whose defaults are the base model
        batch=BatchConfig(max_tokens=25_000, num_buckets=8, max_len=256),
        optimizer=OptimizerConfig(b1=0.9, b2=0.98, eps=1e-9, schedule="noam", warmup_steps=4_000, clip_norm=None),
        evaluation=EvaluationConfig(batch_size=64, max_decode_len=256),
        checkpoint=checkpoint,
        label_smoothing=0.1,
        epochs=100,  # more than max_steps has room for: 4.5 million pairs are some 5,000 steps
        max_steps=max_steps,
    )


PRESETS: dict[str, Callable[[], TrainConfig]] = {
    "demo": demo,
    "multi30k-de-en": multi30k_de_en,
    "multi30k-en-de": multi30k_en_de,
    "iwslt16-de-en": iwslt16_de_en,
    "iwslt17-de-en": iwslt17_de_en,
    "wmt14-en-de-base": wmt14_en_de_base,
    "wmt14-en-de-big": wmt14_en_de_big,
}
