"""Models of `transformers` as runs: they translate as `generate` does with their own tokenizer, and are fine-tuned."""

import dataclasses
import json
import re

import pytest
import torch
from transformers import AutoTokenizer

from parity import __main__ as cli
from parity.twins import checkpoint_pair
from tests import foreign_tokenizers
from tests.foreign_tokenizers import ENGLISH, GERMAN
from tests.parity.formats.foreign import CLASSES, random_model
from tests.train.conftest import metrics, train
from train.config import BatchConfig, CorpusConfig, EvaluationConfig, OptimizerConfig, ReportConfig, TrainConfig
from train.run_dir import RunDir
from train.search import SearchOptions
from train.translate import load_run
from train.translator import Translator
from transformer_config import TransformerConfig

LINES = (*GERMAN, "ein Hund", "  der Park  ")


def folder_of(name, path, *, seed=1, separate=False, **generation):
    """A random model of the class and its tokenizer, as `save_pretrained` has them."""
    if name == "marian":
        src, tgt = foreign_tokenizers.marian(path, separate=separate)
        sizes = {
            "vocab_size": src,
            "decoder_vocab_size": tgt,
            "pad_token_id": src - 1,
            "decoder_start_token_id": src - 1,
        }
        sizes |= {"share_encoder_decoder_embeddings": not separate, "tie_word_embeddings": not separate}
    elif name == "fsmt":
        src, tgt = foreign_tokenizers.fsmt(path)
        sizes = {"src_vocab_size": src, "tgt_vocab_size": tgt, "tie_word_embeddings": False}
    else:
        sizes = {"vocab_size": getattr(foreign_tokenizers, name)(path), "max_position_embeddings": 80}
    # Layers are what compiling takes time for, and their number is tested elsewhere.
    wide = {"d_model": 24, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    wide |= {"encoder_layers": 1, "decoder_layers": 1}
    model = random_model("m2m_100" if name == "nllb" else name, seed, **wide, **sizes).float()
    if name == "nllb":  # most ids are tags, which are no text: they are to be unlikely
        with torch.no_grad():
            model.model.shared.weight[-202:] *= 0.1
    # Padding is never chosen by ours, nor by a model that has been trained.
    generation = {"bad_words_ids": [[model.config.pad_token_id]], **generation}
    model.generation_config.update(num_beams=3, max_length=20, length_penalty=0.8, **generation)
    model.save_pretrained(path)
    return model


LANGUAGES = {"m2m_100": ("de", "en"), "nllb": ("deu_Latn", "eng_Latn")}


def imported(tmp_path, name, *options, **changes):
    """The run, and the model that it was."""
    model = folder_of(name, tmp_path / "theirs", **changes)
    more = ("--languages", *LANGUAGES[name]) if name in LANGUAGES else ()
    assert cli.main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", "run", *more, *options]) == 0
    return tmp_path / "ours", model


def their_translations(folder, model, *, languages=None):
    named = {} if languages is None else dict(zip(("src_lang", "tgt_lang"), languages, strict=True))
    tokenizer = AutoTokenizer.from_pretrained(folder, **named)
    forced = {}
    if languages is not None:  # the tag that a target begins with, which the decoder has to be told
        forced["forced_bos_token_id"] = tokenizer(text_target=[""]).input_ids[0][0]
    with torch.no_grad():
        found = [model.generate(**tokenizer([line.strip()], return_tensors="pt"), **forced)[0] for line in LINES]
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in found]


def our_translations(run_dir):
    trained = load_run(run_dir)
    search = SearchOptions().search(max_len=trained.config.evaluation.max_decode_len, run=trained.config.search)
    translator = Translator(trained.config, trained.tokenizer, trained.devices, search=search)
    return list(translator.translate(trained.params, LINES).lines)


@pytest.mark.parametrize("separate", [False, True], ids=["one vocabulary", "two vocabularies"])
def test_marian_translates_as_generate_does(tmp_path, separate):
    run_dir, model = imported(tmp_path, "marian", separate=separate)
    assert our_translations(run_dir) == their_translations(tmp_path / "theirs", model)


def test_fsmt_translates_as_generate_does(tmp_path):
    run_dir, model = imported(tmp_path, "fsmt")
    assert our_translations(run_dir) == their_translations(tmp_path / "theirs", model)


@pytest.mark.parametrize(("name", "another"), [("m2m_100", "fr"), ("nllb", "fra_Latn")])
def test_translations_are_in_the_language_that_is_asked_for(tmp_path, name, another):
    run_dir, model = imported(tmp_path, name, seed=6)
    source, target = LANGUAGES[name]
    theirs = their_translations(tmp_path / "theirs", model, languages=(source, target))
    assert our_translations(run_dir) == theirs
    assert theirs != their_translations(tmp_path / "theirs", model, languages=(source, another))


def test_the_config_says_what_generation_config_said(tmp_path):
    run_dir, model = imported(tmp_path, "marian", forced_eos_token_id=0)
    config = RunDir(run_dir).read_config()
    search = config.search
    assert (search.beam_size, search.alpha, search.stopping) == (3, 0.8, "transformers")
    assert (search.forced_end, search.never, search.first_id) == (True, (model.config.pad_token_id,), None)
    assert (config.corpus.source_language, config.corpus.target_language) == ("de", "en")
    assert config.evaluation.max_decode_len == 19


def corpus_in(folder):
    """The sentences that the tokenizers know, as every split."""
    folder.mkdir(exist_ok=True)
    for split in ("train", "val", "test_2016_flickr"):
        for language, lines in (("de", GERMAN), ("en", ENGLISH)):
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines))
    return CorpusConfig(kind="files", path=folder, cache=folder / "cache")


def fine_tuned(tmp_path, run_dir, **changes):
    """Some steps; returns the config."""
    config = TrainConfig(
        run_dir=tmp_path / "tuned",
        init_from=run_dir,
        corpus=corpus_in(tmp_path / "corpus"),
        model=TransformerConfig(dropout=0.0),
        batch=BatchConfig(max_tokens=160, num_buckets=1, max_len=40),
        evaluation=EvaluationConfig(max_decode_len=30, batch_size=4),
        optimizer=OptimizerConfig(schedule="constant", learning_rate=1e-2, warmup_steps=1),
        report=ReportConfig(log_every_steps=1),
        **{"epochs": 12, "label_smoothing": 0.0, **changes},
    )
    train(config)
    return config


@pytest.mark.parametrize("name", list(CLASSES))
def test_fine_tuning_begins_with_the_loss_of_the_class(tmp_path, name):
    run_dir, model = imported(tmp_path, name)
    config = fine_tuned(tmp_path, run_dir)
    first, *_, last = [record["nll"] for record in metrics(config.run_dir) if record["kind"] == "train"]
    tokenizer = RunDir(run_dir).tokenizer()
    losses, pieces = 0.0, 0
    for source, target in zip(GERMAN, ENGLISH, strict=True):
        src = torch.tensor(tokenizer.encode_sources([source]))
        tgt = tokenizer.encode_targets([target])
        tgt_in = torch.tensor([[tokenizer.bos_id, *tgt[0][:-1]]])
        logits = model(input_ids=src, decoder_input_ids=tgt_in, use_cache=False).logits[0]
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(tgt[0]), reduction="sum").item()
        pieces += len(tgt[0])
    assert first == pytest.approx(losses / pieces, rel=1e-4)
    assert last < 0.8 * first


def test_a_tuned_model_goes_back_with_its_tokenizer(tmp_path):
    run_dir, _ = imported(tmp_path, "marian")
    config = fine_tuned(tmp_path, run_dir)
    assert cli.main(["convert", str(config.run_dir), str(tmp_path / "back"), "--to", "marian"]) == 0
    model = CLASSES["marian"][1].from_pretrained(tmp_path / "back").eval()
    assert model.generation_config.num_beams == 3
    model.generation_config.max_length = config.evaluation.max_decode_len + 1
    assert our_translations(config.run_dir) == their_translations(tmp_path / "back", model)


def test_a_tuned_run_is_continued_where_the_imported_one_has_gone(tmp_path):
    run_dir, _ = imported(tmp_path, "marian")
    config = fine_tuned(tmp_path, run_dir, epochs=2)
    run_dir.rename(tmp_path / "elsewhere")
    train(dataclasses.replace(config, epochs=3))
    assert RunDir(config.run_dir).read_config().epochs == 3


def test_an_imported_run_is_not_trained_itself(tmp_path):
    run_dir, _ = imported(tmp_path, "marian")
    config = RunDir(run_dir).read_config().replace(run_dir=run_dir, corpus=corpus_in(tmp_path / "corpus"))
    with pytest.raises(ValueError, match=r"inference only: imported from theirs \(marian\).* --init-from"):
        train(config)


FAULTS = {
    "no tokenizer": (lambda folder: (folder / "source.spm").unlink(), (), r"theirs: expected a tokenizer"),
    "too many pieces": (
        lambda folder: (folder / "vocab.json").write_text(
            json.dumps(json.loads((folder / "vocab.json").read_text()) | {"more": 500})
        ),
        (),
        r"expected a tokenizer with ids below \d+, the model's, got 501",
    ),
    "another padding": (
        lambda folder: (folder / "tokenizer_config.json").write_text('{"pad_token": "<unk>", "source_lang": "de"}'),
        (),
        r"expected a tokenizer with the model's pad_id=\d+, got 1",
    ),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_what_does_not_fit_is_named(tmp_path, name, capsys):
    damage, options, message = FAULTS[name]
    folder_of("marian", tmp_path / "theirs")
    damage(tmp_path / "theirs")
    assert cli.main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", "run", *options]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


WRONG_LANGUAGES = {
    "none of many": ("m2m_100", (), "expected --languages SOURCE TARGET"),
    "an unknown source": ("m2m_100", ("xx", "en"), "--languages: expected languages of its tokenizer, got 'xx'"),
    "an unknown target": (
        "m2m_100",
        ("de", "xx"),
        r"--languages: expected languages of its tokenizer, got \('de', 'xx'\)",
    ),
    "short for long": ("nllb", ("de", "en"), r"--languages: expected languages of its tokenizer, got \('de', 'en'\)"),
    "the other way about": ("fsmt", ("en", "de"), r"--languages: expected none, or its own \('de', 'en'\), got"),
}


@pytest.mark.parametrize("case", list(WRONG_LANGUAGES))
def test_languages_are_those_of_the_tokenizer(tmp_path, case, capsys):
    name, languages, message = WRONG_LANGUAGES[case]
    folder_of(name, tmp_path / "theirs")
    options = ("--languages", *languages) if languages else ()
    assert cli.main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", "run", *options]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error), error


def test_languages_count_more_than_what_the_folder_forces(tmp_path):
    run_dir, model = imported(tmp_path, "m2m_100", forced_bos_token_id=100)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert RunDir(run_dir).read_config().search.first_id == tokenizer.get_lang_id("en") != 100
    assert model.generation_config.forced_bos_token_id == 100


def test_parity_of_an_imported_run_is_checked_on_random_ids(tmp_path):
    run_dir, _ = imported(tmp_path, "marian")
    pair = checkpoint_pair(run_dir, pairs=4)
    assert "on random ids" in pair.name
