"""`python -m parity convert-state`: a run of the trainer goes on in torch, and back, as if it had never stopped."""

import contextlib
import dataclasses
import io
import json

import jax
import numpy as np
import pytest
import torch
from rich.console import Console

import torch_reference
from parity.__main__ import main
from parity.twins_reference import training_options
from parity.twins_state import run_to_torch, torch_to_run
from parity.weights.checkpoint import StoreError
from parity.weights.formats import FORMATS
from parity.weights.models import detect, read_model
from parity.weights.problems import MappingError
from tests.train.conftest import bits, write_corpus
from torch_reference import training as reference
from train.checkpoint import Checkpoints, RunRecord
from train.config import (
    BatchConfig,
    CheckpointConfig,
    CorpusConfig,
    OptimizerConfig,
    ParallelConfig,
    TokenizerConfig,
    TrainConfig,
)
from train.loop import Trainer
from train.parallel import Devices
from train.prepare import prepare
from train.run_dir import RunDir
from train.signals import StopRequest
from train.state import initial_state
from transformer_config import TransformerConfig

BEFORE, AFTER, AT_LAST = 4, 5, 2
QUIET = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Without dropout, which both draw for themselves; the schedule turns while torch goes on."""
    folder = tmp_path_factory.mktemp("corpus")
    return TrainConfig(
        run_dir=folder / "never written",
        corpus=CorpusConfig(kind="files", path=write_corpus(folder / "text"), test_split="test", cache=folder / "c"),
        tokenizer=TokenizerConfig(vocab_size=280),
        model=TransformerConfig.tiny(
            d_model=18,
            d_ff=26,
            num_heads=3,
            num_encoder_layers=1,
            num_decoder_layers=1,
            dropout=0.0,
            tie_embeddings="all",
            tgt_vocab_size=71,
            dtype="float64",
            param_dtype="float64",
        ),
        batch=BatchConfig(max_tokens=160, num_buckets=1, max_len=30),
        optimizer=OptimizerConfig(warmup_steps=6),
        checkpoint=CheckpointConfig(keep=5),
        parallel=ParallelConfig(num_devices=1),
    )


@contextlib.contextmanager
def trainer_in(config, folder):
    """The trainer of a run, new or to be continued, as `train.loop.run` makes it."""
    config, run_dir = config.replace(run_dir=folder), RunDir(folder)
    run_dir.write_config(config)
    data = prepare(config, run_dir, console=QUIET)
    config = config.with_vocabulary(data.tokenizer.size)
    checkpoints = Checkpoints(run_dir.checkpoints, keep=5)
    devices, stop = Devices(config.parallel), StopRequest()
    trainer = Trainer(
        config, data=data, run_dir=run_dir, checkpoints=checkpoints, console=QUIET, devices=devices, stop=stop
    )
    try:
        yield trainer
    finally:
        trainer.close()
        checkpoints.close()


def steps(trainer, numbers):
    losses = []
    for number in numbers:
        trainer.state, metrics = trainer.train_step(trainer.state, trainer.made(number).arrays)
        losses.append(float(trainer.devices.metrics(metrics).loss))
    return losses


def save(trainer):
    trainer._save()
    trainer.checkpoints.wait()


def of_torch(file, config):
    """The reference, as someone takes it out of the file who has nothing else."""
    loaded = torch.load(file, weights_only=True)
    model_config = TransformerConfig.from_dict(json.loads(loaded["metadata"]["transformer_config"]))
    model = torch_reference.Transformer(model_config, generator=torch.Generator())
    model.load_state_dict(loaded["model"])
    options = training_options(config.optimizer, smoothing=config.label_smoothing)
    state = reference.initial_state(model, options)
    reference.resume(state, step=loaded["step"], optimizer=loaded["optimizer"])
    return state, options


def steps_of_torch(state, options, trainer, numbers):
    losses = []
    for number in numbers:
        epoch, i = divmod(number, trainer.steps_per_epoch)
        batch = trainer.data.epoch(epoch).batch(i)
        ids = (torch.from_numpy(array) for array in (batch.src, batch.tgt_in, batch.tgt_out))
        losses.append(reference.train_step(state, [reference.Batch(*ids)], options).loss)
    return losses


@pytest.mark.usefixtures("x64")
def test_stop_in_one_and_go_on_in_the_other(config, tmp_path):
    run, file, again = tmp_path / "run", tmp_path / "state.pt", tmp_path / "again"
    with trainer_in(config, run) as trainer:
        steps(trainer, range(BEFORE))
        save(trainer)
        assert main(["convert-state", str(run), str(file)]) == 0
        state, options = of_torch(file, config)
        numbers = range(BEFORE, BEFORE + AFTER)
        rate = torch.load(file, weights_only=True)["optimizer"]["param_groups"][0]["lr"]
        assert state.schedule.get_last_lr()[0] == pytest.approx(rate)
        found = steps_of_torch(state, options, trainer, numbers)
        np.testing.assert_allclose(found, steps(trainer, numbers), rtol=1e-10)

        there = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict(), "step": state.step}
        torch.save(there, tmp_path / "later.pt")
        assert main(["convert-state", str(tmp_path / "later.pt"), str(again), "--like", str(run)]) == 0
        with trainer_in(config, again) as continued:
            assert (continued.step, continued.config.model) == (BEFORE + AFTER, trainer.config.model)
            numbers = range(BEFORE + AFTER, BEFORE + AFTER + AT_LAST)
            np.testing.assert_allclose(steps(continued, numbers), steps(trainer, numbers), rtol=1e-10)
            ours, theirs = continued.state.params, trainer.state.params
            for name in theirs:
                if not name.endswith("k_proj.bias"):  # whose gradient is rounding alone
                    np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-9, err_msg=name)


def a_run(folder, config, *, step=7, inference_only=None, metrics=""):
    """With noise in every array, and no training."""
    config, run_dir = config.replace(run_dir=folder), RunDir(folder)
    run_dir.write_config(config)
    prepare(config, run_dir, console=QUIET)
    config = config.with_vocabulary(run_dir.tokenizer().size)
    rng = np.random.default_rng(step)
    shapes = jax.eval_shape(lambda: initial_state(config))
    noise = jax.tree.map(lambda x: np.asarray(rng.uniform(1, 2, x.shape)).astype(x.dtype), shapes)
    count = np.asarray(step, np.int32)
    whole = jax.tree.map(lambda x: count if x.dtype == np.int32 else x, noise)
    with contextlib.closing(Checkpoints(run_dir.checkpoints, keep=2)) as checkpoints:
        record = RunRecord(
            config=config.to_dict(),
            tokenizer=run_dir.tokenizer().to_json(),
            metrics=metrics,
            evaluated_step=step,
            corpus_sha256=run_dir.corpus_file.read_text().strip(),
            inference_only=inference_only,
        )
        checkpoints.save(whole, record)
        checkpoints.wait()
    return whole


def restored(folder):
    run_dir = RunDir(folder)
    config = run_dir.read_config().with_vocabulary(run_dir.tokenizer().size)
    with contextlib.closing(Checkpoints(run_dir.checkpoints, keep=1, read_only=True)) as checkpoints:
        step = checkpoints.latest_step()
        return checkpoints.restore(config, step), checkpoints.record(step)


KINDS = {
    "adam": {},
    "adamw": {"optimizer": OptimizerConfig(name="adamw", weight_decay=0.1, clip_norm=None)},
    "bfloat16": {"model": {"dtype": "bfloat16", "param_dtype": "bfloat16"}},
    "untied": {"model": {"tie_embeddings": "none"}},
    "with a table": {"model": {"positions": "fixed", "output_bias": "fixed", "max_len": 130}},
    "cosine": {
        "optimizer": OptimizerConfig(schedule="cosine", learning_rate=1e-3, decay_steps=90, warmup_steps=5),
    },
}


@pytest.fixture(scope="module")
def small(config):
    """In float32, as runs are."""
    return config.replace(model=config.model.replace(dtype="float32", param_dtype="float32"))


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_is_bit_identical(kind, small, tmp_path):
    changes = dict(KINDS[kind])
    if "model" in changes:
        changes["model"] = small.model.replace(**changes["model"])
    config = small.replace(**changes)
    lines = "".join(json.dumps({"kind": "train", "step": step}) + "\n" for step in range(1, 10))
    state = a_run(tmp_path / "run", config, metrics=lines)
    run_to_torch(tmp_path / "run", tmp_path / "a.pt")
    torch_to_run(tmp_path / "a.pt", tmp_path / "back", like=tmp_path / "run")
    found, record = restored(tmp_path / "back")
    assert bits(found) == bits(state)
    assert record.metrics.count("\n") == 7, "of later steps nothing is known there"
    assert RunDir(tmp_path / "back").read_config().run_dir == tmp_path / "back"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "back", "run"]
    assert detect(tmp_path / "a.pt") == "torch-reference", "a file of weights, too"
    assert read_model(tmp_path / "a.pt").format_ is FORMATS["torch-reference"]


def test_the_optimizer_of_torch_takes_it(small, tmp_path):
    a_run(tmp_path / "run", small.replace(**KINDS["adamw"]))
    run_to_torch(tmp_path / "run", tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    decayed, plain = loaded["optimizer"]["param_groups"]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert all(name.endswith("bias") or "norm" in name for name in plain["param_names"])
    config = TransformerConfig.from_dict(json.loads(loaded["metadata"]["transformer_config"]))
    model = torch_reference.Transformer(config, generator=torch.Generator())
    named = dict(model.named_parameters())
    groups = [{"params": [named[name] for name in group["param_names"]]} for group in (decayed, plain)]
    optimizer = torch.optim.AdamW(groups)
    optimizer.load_state_dict(loaded["optimizer"])
    assert optimizer.state[named["src_embedding.weight"]]["step"] == 7


def changed(path, change):
    loaded = torch.load(path, weights_only=True)
    change(loaded)
    torch.save(loaded, path)


WRONG = {
    "no optimizer": (lambda c: c.pop("optimizer"), StoreError, "with model and optimizer"),
    "another step": (lambda c: c.update(step=3), StoreError, "as many steps as Adam has taken, 7, got step 3"),
    "no moments": (lambda c: c["optimizer"]["state"].pop(0), StoreError, "none of output_bias"),
    "no state at all": (lambda c: c["optimizer"].pop("state"), StoreError, "the state dict of Adam"),
    "a moment's shape": (
        lambda c: c["optimizer"]["state"][0].update(exp_avg=torch.ones(2, 2)),
        StoreError,
        r"first moments: expected our 'output_bias' \(280,\) float32, got \(2, 2\)",
    ),
    "a moment of NaN": (
        lambda c: c["optimizer"]["state"][0].update(exp_avg_sq=torch.full((280,), torch.nan)),
        StoreError,
        "second moments: expected numbers in our 'output_bias', got NaN",
    ),
    "a missing tensor": (lambda c: c["model"].pop("output_bias", None), StoreError, "difference in output_bias"),
    "an unknown tensor": (lambda c: c["model"].update(x=torch.ones(1)), MappingError, "'x'"),
    "another dtype": (
        lambda c: c["model"].update({"encoder.layers.0.norm1.bias": torch.ones(18, dtype=torch.float64)}),
        StoreError,
        r"model: expected our 'encoder\.layers\.0\.norm1\.bias' \(18,\) float32, got \(18,\) float64",
    ),
    "NaN": (
        lambda c: c["model"].update({"encoder.layers.0.norm1.bias": torch.full((18,), torch.nan)}),
        StoreError,
        "expected numbers in our",
    ),
}


@pytest.fixture(scope="module")
def carried(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("carried")
    a_run(folder / "run", small.replace(model=small.model.replace(output_bias="trained")))
    run_to_torch(folder / "run", folder / "a.pt")
    return folder


@pytest.mark.parametrize("case", WRONG)
def test_damaged_files_are_named_and_leave_nothing_behind(case, carried, tmp_path):
    change, error, message = WRONG[case]
    file = tmp_path / "a.pt"
    file.write_bytes((carried / "a.pt").read_bytes())
    changed(file, change)
    with pytest.raises(error, match=rf"a\.pt.*{message}"):
        torch_to_run(file, tmp_path / "new", like=carried / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_names_need_not_be_in_the_file(carried, tmp_path):
    """torch keeps them only where the optimizer was given them."""
    file = tmp_path / "a.pt"
    file.write_bytes((carried / "a.pt").read_bytes())
    changed(file, lambda c: c["optimizer"]["param_groups"][0].pop("param_names"))
    torch_to_run(file, tmp_path / "new", like=carried / "run")
    assert bits(restored(tmp_path / "new")[0]) == bits(restored(carried / "run")[0])


def test_runs_that_cannot_be_carried_are_refused(small, carried, tmp_path):
    a_run(tmp_path / "run", small, inference_only="an average")
    with pytest.raises(ValueError, match="for inference only: an average"):
        run_to_torch(tmp_path / "run", tmp_path / "a.pt")
    adafactor = dataclasses.replace(small.optimizer, name="adafactor")
    RunDir(tmp_path / "other").write_config(small.replace(run_dir=tmp_path / "other", optimizer=adafactor))
    with pytest.raises(ValueError, match=r"optimizer\.name: expected adam or adamw, got 'adafactor'"):
        run_to_torch(tmp_path / "other", tmp_path / "a.pt")
    with pytest.raises(StoreError, match=r"expected one of the suffixes \.pt"):
        run_to_torch(carried / "run", tmp_path / "a")
    with pytest.raises(FileExistsError):
        run_to_torch(carried / "run", carried / "a.pt")
    averaged = dataclasses.replace(small.optimizer, ema_decay=0.9)
    a_run(tmp_path / "ema", small.replace(optimizer=averaged))
    assert "moving average stays behind" in run_to_torch(tmp_path / "ema", tmp_path / "ema.pt")
    a_run(tmp_path / "half", small.replace(model=small.model.replace(dtype="float16")))
    assert run_to_torch(tmp_path / "half", tmp_path / "half.pt").startswith("7 steps")
    for name in ("ema", "half"):
        with pytest.raises(ValueError, match="without float16 and without a moving average"):
            torch_to_run(tmp_path / f"{name}.pt", tmp_path / "new", like=tmp_path / name)
    for same in (carried / "run", carried, carried / "a.pt"):
        with pytest.raises(ValueError, match="which would replace it"):
            torch_to_run(carried / "a.pt", same, like=carried / "run", overwrite=True)


def test_wrong_usage(carried, tmp_path, capsys):
    run, file, new = str(carried / "run"), str(carried / "a.pt"), str(tmp_path / "b.pt")
    for arguments, message in [
        ([file, new], "expected --like RUN with a file of torch"),
        ([run, new, "--like", run], "expected no --like with a run"),
    ]:
        assert main(["convert-state", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["convert-state", str(tmp_path / "none"), new]) == 1
    assert "which does not exist" in capsys.readouterr().err
