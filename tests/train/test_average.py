"""Averages of parameters: what they are, and that they are for inference only (T11)."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from parity.weights.store import read_tensors
from tests.train.conftest import Ended, bits, listing, metrics, saved, steps_saved, train
from tests.train.test_translate import translate
from train import average
from train.average import average_run
from train.batching import evaluation_batches, extend_buckets, plan_buckets
from train.checkpoint import Checkpoints
from train.config import CheckpointConfig, OptimizerConfig, TrainConfig
from train.corpus import load_corpus
from train.evaluate import held_out_loss
from train.run_dir import RunDir
from train.sentences import encode_text
from train.translate import load_run


def parameters(config: TrainConfig, step: int, item: str = "params") -> dict[str, np.ndarray]:
    config = config.with_vocabulary(RunDir(config.run_dir).tokenizer().size)
    checkpoints = Checkpoints(config.run_dir / "checkpoints", keep=1, read_only=True)
    try:
        return checkpoints.restore_params(config.model, step, item=item)
    finally:
        checkpoints.close()


def test_the_mean_is_added_in_float64_and_rounded_once() -> None:
    rng = np.random.default_rng(0)
    every = [{"w": rng.normal(size=999).astype(np.float32)} for _ in range(7)]
    exact = sum(params["w"].astype(np.longdouble) for params in every) / 7
    mean = average._mean(every)["w"]
    assert mean.dtype == np.float32
    assert (mean == exact.astype(np.float32)).all()
    narrow = sum((params["w"] for params in every), np.zeros(999, np.float32)) / np.float32(7)
    assert (mean != narrow).any(), "the test wants numbers where it makes a difference"


def test_the_newest_are_averaged(tiny_run, tmp_path: Path, whole: Ended) -> None:
    config = tiny_run(tmp_path / "run", checkpoint=CheckpointConfig(every_steps=3, keep=4))
    train(config)
    assert steps_saved(config.run_dir) == [3, 6, 9, 12]
    before = listing(config.run_dir)
    output = tmp_path / "average"
    said = average_run(config.run_dir, output, last=3)
    assert said == f"{output}: the average of steps 6, 9, 12 of {config.run_dir}, for inference only"
    assert listing(config.run_dir) == before
    every = [parameters(config, step) for step in (6, 9, 12)]
    loaded = load_run(output)
    assert loaded.step == 12
    assert bits({name: np.asarray(value) for name, value in loaded.params.items()}) == bits(average._mean(every))
    assert bits(average._mean(every)) != bits(every[-1])

    assert len(translate(output, b"eins zwei\n\ndrei\n")) == 3
    assert sorted(read_tensors(output / "checkpoints" / "12" / "params").tensors) == sorted(every[0])

    before = listing(output / "checkpoints")
    for run in (config.replace(run_dir=output), config.replace(run_dir=output, epochs=3)):
        with pytest.raises(ValueError, match=r"got one for inference only: the average of steps 6, 9, 12 of"):
            train(run)
    assert listing(output / "checkpoints") == before
    with pytest.raises(ValueError, match="got one for inference only: the average of"):
        average_run(output, tmp_path / "again", last=1)
    assert not (tmp_path / "again").exists()


def test_what_cannot_be_averaged_is_refused(tmp_path: Path, whole: Ended) -> None:
    run = whole.config.run_dir
    output = tmp_path / "average"
    with pytest.raises(ValueError, match=r"expected at least 5 checkpoints to average, got \[9, 12\]"):
        average_run(run, output)
    with pytest.raises(ValueError, match=r"--last: expected at least 1, got 0"):
        average_run(run, output, last=0)
    with pytest.raises(ValueError, match=rf"{run}/checkpoints/12: expected a checkpoint with ema, got one"):
        average_run(run, output, ema=True)
    with pytest.raises(FileNotFoundError, match=r"nowhere/config\.json"):
        average_run(tmp_path / "nowhere", output)
    assert list(tmp_path.iterdir()) == []
    output.mkdir()
    (output / "precious").write_text("mine")
    with pytest.raises(FileExistsError, match=rf"{output}: expected a folder that does not exist yet"):
        average_run(run, output, last=2)
    assert listing(tmp_path) == {"average": "folder", "average/precious": listing(output)["precious"]}


@pytest.fixture(scope="module")
def moving(tiny_run, tmp_path_factory: pytest.TempPathFactory):
    """A run with a moving average that was never stopped, and its result."""
    config = tiny_run(tmp_path_factory.mktemp("moving"), optimizer=OptimizerConfig(warmup_steps=10, ema_decay=0.6))
    return config, *train(config)


def test_the_moving_average_is_off_by_default(whole: Ended) -> None:
    assert TrainConfig(run_dir=Path("x")).optimizer.ema_decay is None
    assert not list(whole.config.run_dir.glob("checkpoints/*/ema"))


def test_the_moving_average_moves_as_it_says(tiny_run, tmp_path: Path, moving) -> None:
    """By hand from the parameters of every step: decay min(0.6, (1 + t) / (10 + t))."""
    config = tiny_run(tmp_path, optimizer=moving[0].optimizer, checkpoint=CheckpointConfig(every_steps=1, keep=9))
    train(config.replace(max_steps=7))
    expected = {name: value.astype(np.float64) for name, value in parameters(config, 1, "ema").items()}
    for step in range(2, 8):
        decay = min(0.6, (1 + step) / (10 + step))
        now = parameters(config, step)
        expected = {name: decay * old + (1 - decay) * now[name] for name, old in expected.items()}
        for name, value in parameters(config, step, "ema").items():
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-6, err_msg=f"{name} at step {step}")


def test_the_moving_average_is_what_is_evaluated_and_exported(tmp_path: Path, moving) -> None:
    config, result, _ = moving
    run, ema = parameters(config, 12), parameters(config, 12, "ema")
    assert bits(run) != bits(ema)
    loaded = load_run(config.run_dir)
    assert bits({name: np.asarray(value) for name, value in loaded.params.items()}) == bits(ema)
    corpus = load_corpus(config.corpus)
    train_text, held_out = (encode_text(text, loaded.tokenizer) for text in (corpus.train, corpus.validation))
    buckets = extend_buckets(held_out, plan_buckets(train_text, config=config.batch))
    step = loaded.devices.for_evaluation().compile_evaluation_step(loaded.config.model)
    losses = [
        held_out_loss(
            step,
            loaded.devices.place_params(params),
            evaluation_batches(held_out, buckets),
            target=corpus.validation.target,
            vocab_sizes=loaded.config.model.vocab_sizes,
            devices=loaded.devices.for_evaluation(),
        )
        for params in (ema, run)
    ]
    assert losses[0] == result.validation
    assert losses[1] != result.validation

    output = tmp_path / "ema"
    said = average_run(config.run_dir, output, ema=True)
    assert said == f"{output}: the moving average at step 12 of {config.run_dir}, for inference only"
    exported = load_run(output)
    assert bits({name: np.asarray(value) for name, value in exported.params.items()}) == bits(ema)
    with pytest.raises(ValueError, match="got one for inference only: the moving average at step 12"):
        train(config.replace(run_dir=output))
    # The parameters themselves can still be averaged.
    average_run(config.run_dir, tmp_path / "mean", last=1)
    assert bits(parameters(dataclasses.replace(config, run_dir=tmp_path / "mean"), 12)) == bits(run)


def test_a_moving_average_goes_on_bit_identical(tiny_run, tmp_path: Path, moving) -> None:
    config = tiny_run(tmp_path, optimizer=moving[0].optimizer)
    for stop in (5, None):
        result, _ = train(config.replace(max_steps=stop))
    assert result == moving[1]
    assert saved(config) == saved(moving[0])
    assert any("ema" in name for name, *_ in saved(config)[2])
    assert metrics(tmp_path) == metrics(moving[0].run_dir)
