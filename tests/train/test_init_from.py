"""Runs that begin with the parameters of another."""

import dataclasses

import numpy as np
import pytest

from tests.train.conftest import Ended, bits, train
from train import init_from
from train.average import average_run
from train.config import TokenizerConfig
from train.init_from import adopted, first_state
from train.presets import multi30k_de_en
from train.run_dir import RunDir
from train.search import SearchConfig, SearchOptions
from train.state import initial_state
from train.translate import load_run


def test_the_first_state_is_the_others_parameters_and_fresh_moments(tmp_path, whole: Ended) -> None:
    optimizer = dataclasses.replace(whole.config.optimizer, ema_decay=0.9)
    config = whole.config.replace(
        run_dir=tmp_path, init_from=whole.config.run_dir, optimizer=optimizer, seed=5
    ).with_vocabulary(RunDir(whole.config.run_dir).tokenizer().size)
    state, drawn = first_state(config), initial_state(config)
    trained = {name: np.asarray(array) for name, array in load_run(whole.config.run_dir).params.items()}
    assert bits(dict(sorted(state.params.items()))) == bits(dict(sorted(trained.items())))
    assert bits(dict(sorted(state.ema.items()))) == bits(dict(sorted(trained.items())))
    assert int(state.step) == 0
    assert bits(state.opt_state) == bits(drawn.opt_state)
    assert bits(state.params) != bits(drawn.params)


def test_a_run_begins_with_an_average_and_continues(tmp_path, whole: Ended) -> None:
    average_run(whole.config.run_dir, tmp_path / "average", last=2)
    model = whole.config.model.replace(d_model=36, dropout=0.0)
    config = whole.config.replace(run_dir=tmp_path / "new", init_from=tmp_path / "average", model=model, epochs=1)
    _, shown = train(config)
    assert f"Parameters, model and tokenizer are those of {tmp_path / 'average'}." in "".join(shown.split("\n"))
    written = RunDir(tmp_path / "new").read_config()
    assert (written.model.d_model, written.model.dropout) == (18, 0.0)
    assert (tmp_path / "new" / "tokenizer.json").read_text() == RunDir(tmp_path / "average").tokenizer().to_json()
    (tmp_path / "average").rename(tmp_path / "gone")
    train(config.replace(epochs=2))
    changed = config.replace(model=model.replace(dropout=0.3))
    with pytest.raises(ValueError, match=r"got model\.dropout: 0\.0 before, 0\.3 now"):
        train(changed)


def test_what_is_missing_is_named(tmp_path, whole: Ended) -> None:
    config = whole.config.replace(run_dir=tmp_path / "new", init_from=tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"init_from: expected the folder of a run, found no .*none"):
        train(config)
    whole.copy(tmp_path / "none")
    for step in (tmp_path / "none" / "checkpoints").iterdir():
        step.rename(tmp_path / step.name)
    with pytest.raises(FileNotFoundError, match=r"none/checkpoints: expected a finished checkpoint to begin with"):
        train(config)


def test_another_kind_of_tokenizer_has_to_come_from_somewhere(tmp_path, whole: Ended) -> None:
    config = whole.config.replace(run_dir=tmp_path, tokenizer=TokenizerConfig(kind="transformers"))
    with pytest.raises(ValueError, match=r"tokenizer\.kind: expected 'bpe' where no init_from brings another"):
        train(config)


def test_the_search_of_the_other_run_but_for_what_is_asked_for(tmp_path, whole: Ended) -> None:
    theirs = SearchConfig(beam_size=6, alpha=0.2, first_id=7, never=(0, 1), max_len_ratio=None)
    source = whole.copy(tmp_path / "source").replace(search=theirs)
    RunDir(tmp_path / "source").write_config(source)
    config = whole.config.replace(
        run_dir=tmp_path / "new", init_from=tmp_path / "source", search=SearchConfig(alpha=1.0)
    )
    assert adopted(config).search == dataclasses.replace(theirs, alpha=1.0)
    search = SearchOptions(beam=3).search(max_len=9, run=theirs)
    assert (search.beam_size, search.alpha, search.first_id, search.never) == (3, 0.2, 7, (0, 1))
    assert (search.max_len, search.max_len_ratio) == (9, None)


def test_fields_of_training_are_fields_of_a_model() -> None:
    assert set(init_from.OF_TRAINING) < {field.name for field in dataclasses.fields(multi30k_de_en().model)}
    assert multi30k_de_en().search.alpha == 1.0
