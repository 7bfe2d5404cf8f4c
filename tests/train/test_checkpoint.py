import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from train.checkpoint import Checkpoints, RunPosition
from train.config import TrainConfig
from train.state import initial_state
from transformer_config import TransformerConfig


def config(tmp_path: Path, **changes: object) -> TrainConfig:
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    return TrainConfig(run_dir=tmp_path, model=TransformerConfig.tiny(**layers, **changes))


@pytest.fixture
def checkpoints(tmp_path: Path):
    opened = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield opened
    opened.close()


def random_state(run: TrainConfig, *, step: int, seed: int = 0):
    """A state with noise in every array, moments included, all bits in use."""
    rng = np.random.default_rng(seed)
    state = jax.eval_shape(functools.partial(initial_state, run), jax.random.key(0))
    noise = jax.tree.map(lambda x: np.asarray(rng.normal(size=x.shape) * 9).astype(x.dtype), state)
    return noise._replace(step=np.asarray(step, np.int32))


def bits(tree) -> list:
    return [(str(path), x.dtype, x.shape, np.asarray(x).tobytes()) for path, x in jax.tree.leaves_with_path(tree)]


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_restored_bit_for_bit(tmp_path, checkpoints, param_dtype):
    run = config(tmp_path, param_dtype=param_dtype)
    state = random_state(run, step=7)
    position = RunPosition(epoch=3, batch=5)
    checkpoints.save(state, position)
    restored, where = checkpoints.restore(run, 7)
    assert where == position
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    assert {str(x.dtype) for x in restored.params.values()} == {param_dtype}
    assert bits(checkpoints.restore_params(run.model, 7)) == bits(state.params)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")  # of the shapes, which are traced without x64
def test_float64_without_x64(tmp_path, checkpoints):
    """Orbax would restore it as float32 without a word."""
    run = config(tmp_path, param_dtype="float64")
    with jax.enable_x64(True):
        state = random_state(run, step=1)
        checkpoints.save(state, RunPosition())
    restored = checkpoints.restore_params(run.model, 1)
    assert bits(restored) == bits(state.params)


def test_the_newest_are_kept(tmp_path, checkpoints):
    run = config(tmp_path)
    assert checkpoints.latest_step() is None
    for step in (3, 6, 9):
        checkpoints.save(random_state(run, step=step, seed=step), RunPosition(batch=step))
    checkpoints.save(random_state(run, step=9, seed=1), RunPosition(batch=0))  # the same step: saved already
    assert checkpoints.latest_step() == 9
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()) == ["6", "9"]
    restored, where = checkpoints.restore(run, 6)
    assert bits(restored) == bits(random_state(run, step=6, seed=6))
    assert where.batch == 6
    assert checkpoints.restore(run, 9)[1].batch == 9


def test_a_half_written_checkpoint_is_not_seen(tmp_path, checkpoints):
    """T4: what a killed process leaves has Orbax's temporary name, or lacks its mark."""
    run = config(tmp_path)
    checkpoints.save(random_state(run, step=3), RunPosition(batch=3))
    folder = tmp_path / "checkpoints"
    (folder / "6.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    (folder / "6.orbax-checkpoint-tmp" / "params" / "manifest.ocdbt").write_bytes(b"half")
    again = Checkpoints(folder, keep=2)
    try:
        assert again.latest_step() == 3
        assert again.restore(run, 3)[1].batch == 3
        again.save(random_state(run, step=6), RunPosition(batch=6))  # and it is not in the way
        assert again.latest_step() == 6
    finally:
        again.close()
