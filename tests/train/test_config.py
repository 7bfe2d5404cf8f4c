import dataclasses
import json
from pathlib import Path

import pytest
import tyro

from train.config import (
    BatchConfig,
    CheckpointConfig,
    CorpusConfig,
    EvaluationConfig,
    OptimizerConfig,
    ParallelConfig,
    ReportConfig,
    TokenizerConfig,
    TrainConfig,
)
from train.presets import PRESETS
from train.run_dir import FREE_TO_CHANGE, RunDir
from transformer_config import TransformerConfig


def config(**changes: object) -> TrainConfig:
    return TrainConfig(run_dir=Path("runs/x"), **changes)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CorpusConfig(kind="files"), r"corpus\.path: expected a folder .*'files', got None"),
        (lambda: CorpusConfig(kind="iwslt"), r"corpus\.path: expected a folder .*'iwslt', got None"),
        (lambda: CorpusConfig(kind="hub"), r"corpus\.hub: expected the name of a dataset .*'hub', got None"),
        (lambda: CorpusConfig(kind="hub", hub=""), r"corpus\.hub: expected the name of a dataset .*'hub', got ''"),
        (lambda: CorpusConfig(hub="a/b"), r"corpus\.hub: expected None with corpus\.kind='demo', got 'a/b'"),
        (
            lambda: CorpusConfig(kind="files", path=Path("x"), hub_config="de-en"),
            r"corpus\.hub_config: expected None with corpus\.kind='files', got 'de-en'",
        ),
        (
            lambda: CorpusConfig(kind="iwslt", path=Path("x"), hub_revision="main"),
            r"corpus\.hub_revision: expected None with corpus\.kind='iwslt', got 'main'",
        ),
        (
            lambda: CorpusConfig(kind="hub", hub="a/b", hub_revision="refs/convert/parquet"),
            r"corpus\.hub_config: expected a folder of the branch .*'refs/convert/parquet', got None",
        ),
        (lambda: CorpusConfig(num_pairs=0), r"corpus\.num_pairs: expected more than 0, got 0"),
        (lambda: TokenizerConfig(vocab_size=259), r"tokenizer\.vocab_size: expected at least 260 .*, got 259"),
        (lambda: BatchConfig(max_tokens=0), r"batch\.max_tokens: expected more than 0"),
        (lambda: BatchConfig(num_buckets=-1), r"batch\.num_buckets: expected more than 0, got -1"),
        (lambda: BatchConfig(max_tokens=100, max_len=101), r"batch\.max_tokens: .*max_len=101.*, got 100"),
        (lambda: OptimizerConfig(b1=1.0), r"optimizer\.b1: expected a rate in \[0, 1\), got 1\.0"),
        (lambda: OptimizerConfig(b2=-0.1), r"optimizer\.b2: .*got -0\.1"),
        (lambda: OptimizerConfig(eps=0.0), r"optimizer\.eps: expected more than 0"),
        (lambda: OptimizerConfig(warmup_steps=0), r"optimizer\.warmup_steps: expected more than 0"),
        (lambda: OptimizerConfig(noam_factor=float("nan")), r"optimizer\.noam_factor: expected more than 0, got nan"),
        (lambda: OptimizerConfig(clip_norm=0.0), r"optimizer\.clip_norm: expected more than 0"),
        (lambda: OptimizerConfig(weight_decay=0.1), r"optimizer\.weight_decay: .*'adamw', got 0\.1 with 'adam'"),
        (lambda: OptimizerConfig(name="adamw", weight_decay=-1.0), r"optimizer\.weight_decay: expected at least 0"),
        (lambda: OptimizerConfig(learning_rate=1e-3), r"optimizer\.learning_rate: expected None with .*'noam'"),
        (lambda: OptimizerConfig(schedule="constant"), r"optimizer\.learning_rate: expected the peak, got None"),
        (lambda: OptimizerConfig(schedule="constant", learning_rate=0.0), r"optimizer\.learning_rate: .* more than 0"),
        (
            lambda: OptimizerConfig(schedule="cosine", learning_rate=1e-3),
            r"optimizer\.decay_steps: expected the last step of the decay, got None with 'cosine'",
        ),
        (lambda: OptimizerConfig(decay_steps=9), r"optimizer\.decay_steps: expected None, got 9 with 'noam'"),
        (
            lambda: OptimizerConfig(schedule="cosine", learning_rate=1e-3, warmup_steps=5, decay_steps=5),
            r"optimizer\.decay_steps: expected more than warmup_steps=5, got 5",
        ),
        (lambda: OptimizerConfig(final_share=1.5), r"optimizer\.final_share: expected a share in \[0, 1\], got 1\.5"),
        (lambda: EvaluationConfig(batch_size=0), r"evaluation\.batch_size: expected more than 0"),
        (lambda: EvaluationConfig(bleu_every_epochs=0), r"evaluation\.bleu_every_epochs: expected more than 0"),
        (lambda: EvaluationConfig(every_steps=0), r"evaluation\.every_steps: expected more than 0, got 0"),
        (lambda: EvaluationConfig(every_epochs=0), r"evaluation\.every_epochs: expected more than 0, got 0"),
        (lambda: EvaluationConfig(patience=0), r"evaluation\.patience: expected more than 0, got 0"),
        (
            lambda: EvaluationConfig(metric="bleu"),
            r"evaluation\.bleu_every_epochs: expected a number with evaluation\.metric='bleu', got None",
        ),
        (lambda: CheckpointConfig(keep=0), r"checkpoint\.keep: expected more than 0"),
        (lambda: CheckpointConfig(every_steps=0), r"checkpoint\.every_steps: expected more than 0"),
        (lambda: OptimizerConfig(ema_decay=1.0), r"optimizer\.ema_decay: expected a share in \[0, 1\), got 1\.0"),
        (lambda: OptimizerConfig(ema_decay=-0.1), r"optimizer\.ema_decay: expected a share in \[0, 1\), got -0\.1"),
        (lambda: ParallelConfig(fsdp=0), r"parallel\.fsdp: expected more than 0, got 0"),
        (lambda: ParallelConfig(accumulation_steps=0), r"parallel\.accumulation_steps: expected more than 0, got 0"),
        (lambda: ParallelConfig(num_devices=0), r"parallel\.num_devices: expected more than 0, got 0"),
        (
            lambda: ParallelConfig(num_devices=8, fsdp=3),
            r"parallel\.fsdp: expected a divisor of num_devices=8, got 3",
        ),
        (
            lambda: ParallelConfig(mode="pmap", fsdp=2),
            r"parallel\.fsdp: expected 1 with parallel\.mode='pmap', got 2",
        ),
        (
            lambda: ParallelConfig(coordinator_address="host:1", num_processes=2),
            r"parallel: expected coordinator_address, num_processes and process_id, all three or none, got 'host:1', 2",
        ),
        (lambda: ReportConfig(log_every_steps=0), r"report\.log_every_steps: expected more than 0, got 0"),
        (lambda: ReportConfig(profile_steps=-1), r"report\.profile_steps: expected at least 0, got -1"),
        (lambda: config(label_smoothing=1.0), r"label_smoothing: expected a share in \[0, 1\), got 1\.0"),
        (lambda: config(epochs=0), r"epochs: expected more than 0, got 0"),
        (lambda: config(max_steps=0), r"max_steps: expected more than 0, got 0"),
        (lambda: config(seed=-1), r"seed: expected at least 0, got -1"),
        (
            lambda: config(model=TransformerConfig(positions="learned", max_len=100)),
            r"batch\.max_len: expected at most the 100 positions of the model's table, got 128",
        ),
        (
            lambda: config(model=TransformerConfig(positions="learned", max_len=100), batch=BatchConfig(max_len=100)),
            r"evaluation\.max_decode_len: expected at most the 100 positions .*, got 128",
        ),
    ],
)
def test_each_wrong_value_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_go_through_json_and_back(name):
    preset = PRESETS[name]()
    again = TrainConfig.from_dict(json.loads(json.dumps(preset.to_dict())))
    assert again == preset
    assert isinstance(again.run_dir, Path)


@pytest.mark.parametrize(
    ("size", "numbers"),
    [("base", (512, 2048, 8, 0.1, 100_000, 5)), ("big", (1024, 4096, 16, 0.3, 300_000, 20))],
)
def test_wmt14_has_the_papers_numbers(size, numbers):
    """Vaswani et al. 2017: table 3, and sections 3.4, 5.1, 5.3, 5.4, 6.1."""
    preset = PRESETS[f"wmt14-en-de-{size}"]()
    model, optimizer = preset.model, preset.optimizer
    widths = (model.d_model, model.d_ff, model.num_heads, model.dropout)
    assert (*widths, preset.max_steps, preset.checkpoint.keep) == numbers
    assert (model.num_encoder_layers, model.num_decoder_layers, model.norm_order, model.activation) == (
        *(6, 6),
        *("post", "relu"),
    )
    assert (model.tie_embeddings, model.positions) == ("all", "interleaved")
    assert (model.attention_dropout, model.activation_dropout) == (0.0, 0.0)
    assert (preset.tokenizer.vocab_size, model.src_vocab_size, model.tgt_vocab_size) == (37_000, 37_000, 37_000)
    assert (preset.batch.max_tokens, preset.label_smoothing) == (25_000, 0.1)
    assert (optimizer.name, optimizer.b1, optimizer.b2, optimizer.eps) == ("adam", 0.9, 0.98, 1e-9)
    assert (optimizer.schedule, optimizer.noam_factor, optimizer.warmup_steps) == ("noam", 1.0, 4_000)
    assert (optimizer.clip_norm, optimizer.weight_decay) == (None, 0.0)
    assert (model.dtype, model.param_dtype) == ("bfloat16", "float32")
    # More epochs than the steps have room for: 4.5 million pairs of some 25 pieces a side.
    assert preset.epochs * 4_500_000 * 25 / preset.batch.max_tokens > preset.max_steps
    corpus = preset.corpus
    assert (corpus.kind, corpus.hub, corpus.hub_config) == ("hub", "wmt/wmt14", "de-en")
    assert (corpus.source_language, corpus.target_language) == ("en", "de")
    assert (corpus.train_split, corpus.validation_split, corpus.test_split) == ("train", "validation", "test")


def test_the_iwslt_presets_differ_in_their_text_alone():
    ours, theirs = PRESETS["iwslt17-de-en"](), PRESETS["iwslt16-de-en"]()
    assert ours.corpus.hub_is_converted
    assert ours.replace(corpus=theirs.corpus, run_dir=theirs.run_dir) == theirs


def test_multi30k_from_the_hub_on_the_command_line():
    """As the preset's docstring has it: the path of its files stays, unused."""
    from train.__main__ import Preset

    example = PRESETS["multi30k-de-en"].__doc__.partition("`")[2].partition("`")[0]
    corpus = tyro.cli(Preset, args=example.split()).corpus
    assert (corpus.kind, corpus.hub, corpus.hub_config) == ("hub", "bentrevett/multi30k", None)
    assert (corpus.train_split, corpus.validation_split, corpus.test_split) == ("train", "validation", "test")


def test_unknown_fields_are_named_with_their_section():
    values = config().to_dict()
    values["batch"] = {**values["batch"], "max_token": 5}
    with pytest.raises(ValueError, match=r"unknown batch\.max_token"):
        TrainConfig.from_dict(values)
    with pytest.raises(ValueError, match="unknown epoch"):
        TrainConfig.from_dict({**config().to_dict(), "epoch": 1})


def test_vocabulary_of_the_tokenizer():
    model = config().with_vocabulary(271).model
    assert (model.src_vocab_size, model.tgt_vocab_size) == (271, 271)


def test_fields_that_are_free_to_change_exist():
    values = config().to_dict()
    names = set(values) | {
        f"{section}.{name}" for section in values if isinstance(values[section], dict) for name in values[section]
    }
    assert set(FREE_TO_CHANGE) <= names


def test_a_changed_config_is_refused_naming_each_field(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    first = config()
    run_dir.write_config(first)
    assert run_dir.read_config() == first
    free = first.replace(
        epochs=7,
        max_steps=3,
        report=ReportConfig(log_every_steps=1),
        run_dir=tmp_path,
        checkpoint=CheckpointConfig(keep=1),
    )
    run_dir.write_config(free)
    changed = free.replace(seed=5, optimizer=OptimizerConfig(b1=0.8))
    with pytest.raises(ValueError, match=r"optimizer\.b1: 0\.9 before, 0\.8 now; seed: 0 before, 5 now"):
        run_dir.write_config(changed)
    assert run_dir.read_config() == free


def test_a_broken_config_file_is_named(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json: expected the config of a run"):
        run_dir.read_config()
    for text in ("{", '{"epochs": 3}', '{"run_dir": "x", "epochs": 0}'):
        run_dir.config_file.write_text(text)
        with pytest.raises(ValueError, match=r"config\.json: "):
            run_dir.read_config()


def test_configs_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().epochs = 3
    with pytest.raises(TypeError):
        BatchConfig(5)


@pytest.mark.parametrize("name", ["pad_id", "bos_id", "eos_id"])
def test_special_ids_are_the_tokenizers(tmp_path, name):
    """Batches hold the tokenizer's; a loss or mask by other ids would count padding."""
    model = TransformerConfig.tiny(**{name: 7})
    with pytest.raises(ValueError, match=rf"model\.{name}: expected \d, the tokenizer's, got 7"):
        TrainConfig(run_dir=tmp_path, model=model)
