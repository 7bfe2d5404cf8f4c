import dataclasses
import gc
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.train.conftest import bits, listing
from train.checkpoint import Checkpoints, RunRecord
from train.config import OptimizerConfig, TrainConfig
from train.state import LossScale, TrainState, initial_state
from transformer_config import TransformerConfig


def config(tmp_path: Path, *, optimizer: OptimizerConfig | None = None, **model: object) -> TrainConfig:
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    return TrainConfig(
        run_dir=tmp_path, model=TransformerConfig.tiny(**layers, **model), optimizer=optimizer or OptimizerConfig()
    )


def record(run: TrainConfig, **fields: object) -> RunRecord:
    return RunRecord(config=run.to_dict(), tokenizer='{"no": "tokenizer"}', **fields)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    opened = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield opened
    opened.close()


def random_state(run: TrainConfig, *, step: int, seed: int = 0) -> TrainState:
    """A state with noise in every array, moments included, all bits in use."""
    rng = np.random.default_rng(seed)
    state = jax.eval_shape(lambda: initial_state(run))
    noise = jax.tree.map(lambda x: np.asarray(rng.normal(size=x.shape) * 9).astype(x.dtype), state)
    return noise._replace(step=np.asarray(step, np.int32))


def save(checkpoints: Checkpoints, run: TrainConfig, *, step: int, **options: object) -> TrainState:
    """Saves noise, and waits until it is committed."""
    state = random_state(run, step=step, seed=step)
    checkpoints.save(state, record(run, evaluated_step=step), **options)
    checkpoints.wait()
    return state


RUNS = {
    "float32": {},
    "bfloat16 parameters": {"param_dtype": "bfloat16"},
    "adafactor": {"optimizer": OptimizerConfig(name="adafactor")},
    "adamw without clipping": {"optimizer": OptimizerConfig(name="adamw", weight_decay=0.1, clip_norm=None)},
    "moving average": {"optimizer": OptimizerConfig(ema_decay=0.9)},
    "float16": {"dtype": "float16"},
}


@pytest.mark.parametrize("kind", RUNS)
def test_restored_bit_for_bit(tmp_path: Path, checkpoints: Checkpoints, kind: str) -> None:
    run = config(tmp_path, **RUNS[kind])
    state = random_state(run, step=7)
    written = record(run, metrics='{"kind": "train", "note": "ö"}\n', evaluated_step=6, corpus_sha256="ab")
    checkpoints.save(state, written)
    checkpoints.wait()
    restored = checkpoints.restore(run, 7)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)  # dtypes too
    assert checkpoints.record(7) == written
    assert {str(x.dtype) for x in restored.params.values()} == {run.model.param_dtype}
    assert bits(checkpoints.restore_params(run.model, 7, item="params")) == bits(state.params)
    assert bits(checkpoints.restore_params(run.model, 7)) == bits(state.ema or state.params)
    assert (state.ema is not None) == (kind == "moving average")
    assert (state.loss_scale is not None) == (kind == "float16")


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")  # of the shapes, which are traced without x64
def test_float64_without_x64(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """Orbax would restore it as float32 without a word."""
    run = config(tmp_path, param_dtype="float64")
    with jax.enable_x64(True):
        state = random_state(run, step=1)
        checkpoints.save(state, record(run))
        checkpoints.wait()
    restored = checkpoints.restore_params(run.model, 1)
    assert bits(restored) == bits(state.params)


def test_saved_is_the_state_at_the_call_although_it_is_given_up_at_once(
    tmp_path: Path, checkpoints: Checkpoints
) -> None:
    """The save runs beside steps that write into the very memory."""
    run = config(tmp_path, src_vocab_size=3_000)
    forget = jax.jit(lambda state: jax.tree.map(lambda x: (x * 0 - 1).astype(x.dtype), state), donate_argnums=0)
    state = jax.device_put(random_state(run, step=7))
    expected = bits(state)
    checkpoints.save(state, record(run))
    for _ in range(5):
        before, state = state, forget(state)
        assert all(x.is_deleted() for x in jax.tree.leaves(before)), "the test wants memory that is used again"
    assert all((np.asarray(x) == -1).all() for x in jax.tree.leaves(state))
    checkpoints.wait()
    assert bits(checkpoints.restore(run, 7)) == expected


def test_the_newest_are_kept(tmp_path: Path, checkpoints: Checkpoints) -> None:
    run = config(tmp_path)
    assert checkpoints.latest_step() is None
    for step in (3, 6, 9):
        save(checkpoints, run, step=step)
    checkpoints.save(random_state(run, step=9, seed=1), record(run, evaluated_step=0))  # that step is saved already
    checkpoints.wait()
    assert checkpoints.latest_step() == 9
    assert checkpoints.steps() == [6, 9]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()) == ["6", "9"]
    assert bits(checkpoints.restore(run, 6)) == bits(random_state(run, step=6, seed=6))
    assert [checkpoints.record(step).evaluated_step for step in (6, 9)] == [6, 9]


@pytest.mark.parametrize(
    ("metric", "measured", "best"),
    [
        ("loss", {1: 4.0, 2: 2.0, 4: 3.0, 5: 2.5}, 2),
        ("bleu", {1: 4.0, 2: 2.0, 4: 3.0, 5: 2.5}, 1),
        ("loss", {2: 3.0, 4: 1.0}, 4),
    ],
)
def test_the_best_is_kept_too(tmp_path: Path, metric: str, measured: dict[int, float], best: int) -> None:
    """Checkpoints between evaluations have no figure, and are no candidates; a process in between forgets nothing."""
    run = config(tmp_path)
    other = {"loss": "bleu", "bleu": "loss"}[metric]
    for steps in ((1, 2, 3, 4), (5, 6, 7)):
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2, metric=metric)
        for step in steps:
            figures = {metric: measured[step], other: -step} if step in measured else None
            # Where only the other was measured there is nothing to compare by.
            save(checkpoints, run, step=step, measured=figures or {other: -100.0})
        checkpoints.close()
    again = Checkpoints(tmp_path / "checkpoints", keep=2, read_only=True)
    assert again.steps() == [best, 6, 7]
    assert bits(again.restore(run, best)) == bits(random_state(run, step=best, seed=best))
    again.close()


def test_a_half_written_checkpoint_is_not_seen(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """T4: what a killed process leaves has Orbax's temporary name, or lacks its mark."""
    run = config(tmp_path)
    save(checkpoints, run, step=3)
    folder = tmp_path / "checkpoints"
    (folder / "6.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    (folder / "6.orbax-checkpoint-tmp" / "params" / "manifest.ocdbt").write_bytes(b"half")
    again = Checkpoints(folder, keep=2)
    try:
        assert again.latest_step() == 3
        assert again.record(3).evaluated_step == 3
        state = save(again, run, step=6)  # and it is not in the way
        assert again.latest_step() == 6
        assert bits(again.restore(run, 6)) == bits(state)
    finally:
        again.close()


@pytest.fixture
def collected() -> Iterator[None]:
    yield
    gc.collect()


def untidy(test: Callable[..., None]) -> Callable[..., None]:
    """Where Orbax fails it leaves coroutines behind, which complain when they are collected: in this test, then."""
    ignored = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    return ignored(pytest.mark.usefixtures("collected")(test))


# What is not as it was: an error that names the folder, and nothing touched.


def refused(folder: Path, run: TrainConfig, message: str) -> None:
    """Opened as a run opens it, the checkpoint at step 6 cannot be used, and every file stays as it was."""
    before = listing(folder)
    opened = Checkpoints(folder, keep=2)
    try:
        assert opened.latest_step() == 6
        with pytest.raises(ValueError, match=message) as error:  # noqa: PT012
            opened.record(6)
            opened.restore(run, 6)
        assert str(folder / "6") in str(error.value)
    finally:
        opened.close()
    assert listing(folder) == before


@pytest.fixture(scope="module")
def saved_at_6(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path]:
    run = config(tmp_path_factory.mktemp("saved"))
    checkpoints = Checkpoints(run.run_dir / "checkpoints", keep=2)
    save(checkpoints, run, step=3)
    save(checkpoints, run, step=6)
    checkpoints.close()
    return run, run.run_dir / "checkpoints"


BREAKS = {
    # Whatever else is there, this is needed;
    "params/ocdbt.process_0/d/*": True,
    "opt_state/ocdbt.process_0/d/*": True,
    "params/d/*": True,
    "opt_state/d/*": True,
    "params/manifest.ocdbt": True,
    "run/metadata": True,
    # and this Orbax may or may not do without.
    "params/_METADATA": False,
    "params/ocdbt.process_0/manifest.ocdbt": False,
}


@untidy
@pytest.mark.parametrize("how", ["cut", "gone"])
@pytest.mark.parametrize("pattern", BREAKS)
def test_a_truncated_checkpoint_is_named(saved_at_6, tmp_path: Path, pattern: str, how: str) -> None:
    run, folder = saved_at_6
    copy = Path(shutil.copytree(folder, tmp_path / "checkpoints"))
    largest = max((copy / "6").glob(pattern), key=lambda path: path.stat().st_size)
    if how == "cut":
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    else:
        largest.unlink()
    if not BREAKS[pattern]:
        opened = Checkpoints(copy, keep=2)
        try:
            restored = bits(opened.restore(run, 6))
        except ValueError:
            pass
        else:
            assert restored == bits(random_state(run, step=6, seed=6))
            return
        finally:
            opened.close()
    refused(copy, run, r"cannot be read .*move that folder away to go on from the checkpoint before it")


def test_figures_that_are_cut_short_are_named(tmp_path: Path, checkpoints: Checkpoints) -> None:
    run = config(tmp_path)
    save(checkpoints, run, step=6, measured={"loss": 2.5})
    (file,) = (tmp_path / "checkpoints" / "6" / "metrics").glob("metrics")
    file.write_text(file.read_text()[:4])
    before = listing(tmp_path)
    for read_only in (True, False):
        with pytest.raises(ValueError, match=rf"{tmp_path}/checkpoints: expected checkpoints, got one that cannot be"):
            Checkpoints(tmp_path / "checkpoints", keep=2, read_only=read_only)
    assert listing(tmp_path) == before


@untidy
def test_moving_a_broken_checkpoint_away_goes_on_from_the_one_before(saved_at_6, tmp_path: Path) -> None:
    run, folder = saved_at_6
    copy = Path(shutil.copytree(folder, tmp_path / "checkpoints"))
    shutil.rmtree(copy / "6" / "params")
    refused(copy, run, "cannot be read")
    shutil.move(copy / "6", tmp_path / "away")
    opened = Checkpoints(copy, keep=2)
    assert opened.latest_step() == 3
    assert bits(opened.restore(run, 3)) == bits(random_state(run, step=3, seed=3))
    opened.close()


def test_a_folder_of_something_else_is_named(saved_at_6, tmp_path: Path) -> None:
    run, folder = saved_at_6
    copy = Path(shutil.copytree(folder, tmp_path / "checkpoints"))
    shutil.rmtree(copy / "6")
    (copy / "6").mkdir()
    (copy / "6" / "notes.txt").write_text("holiday")
    opened = Checkpoints(copy, keep=2)
    steps = opened.steps()
    opened.close()
    if 6 in steps:  # it depends on how Orbax marks what is committed
        refused(copy, run, "cannot be read")
    else:
        assert steps == [3]
    assert (copy / "6" / "notes.txt").read_text() == "holiday"


def test_an_orbax_checkpoint_of_another_program_is_named(saved_at_6, tmp_path: Path) -> None:
    run, _ = saved_at_6
    folder = tmp_path / "checkpoints"
    manager = ocp.CheckpointManager(folder)
    items = {"params": ocp.args.PyTreeSave({"w": jnp.ones(3)}), "run": ocp.args.JsonSave({"epoch": 5})}
    manager.save(6, args=ocp.args.Composite(**items))
    manager.wait_until_finished()
    manager.close()
    refused(folder, run, r"expected a checkpoint of `train`, got none of .*in it")


FOREIGN = {
    "another width": (lambda run: run.replace(model=run.model.replace(d_ff=27)), r"of shape .*27.*got"),
    "another vocabulary": (lambda run: run.with_vocabulary(17), r"of shape .*17.*got"),
    "another optimizer": (
        lambda run: run.replace(optimizer=OptimizerConfig(name="adafactor")),
        r"expected a checkpoint with .*opt_state.*|expected opt_state",
    ),
    "more layers": (lambda run: run.replace(model=run.model.replace(num_encoder_layers=2)), "cannot be read"),
    "parameters that are tied": (
        lambda run: run.replace(model=run.model.replace(tie_embeddings="all", tgt_vocab_size=71)),
        "expected",
    ),
    "no clipping": (
        lambda run: run.replace(optimizer=dataclasses.replace(run.optimizer, clip_norm=None)),
        "expected a checkpoint",
    ),
    "a moving average": (
        lambda run: run.replace(optimizer=dataclasses.replace(run.optimizer, ema_decay=0.9)),
        "expected a checkpoint with .*ema",
    ),
    "float16": (lambda run: run.replace(model=run.model.replace(dtype="float16")), "loss scale"),
}


@untidy
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_checkpoint_of_another_run_is_named(saved_at_6, kind: str) -> None:
    run, folder = saved_at_6
    change, message = FOREIGN[kind]
    refused(folder, change(run), message)


# A full disk.


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """As on a full disk, writing fails, by an OSError of the system: here a file beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@untidy
def test_a_full_disk_is_an_error_and_the_checkpoint_before_stays(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """T4."""
    run = config(tmp_path)
    first = save(checkpoints, run, step=3)
    with pytest.raises(Exception, match=r"(?i)file too large|exhausted|limit|EFBIG|errno"), no_file_above(2_000):
        save(checkpoints, run, step=6)
    again = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert again.steps() == [3]
    assert bits(again.restore(run, 3)) == bits(first)
    second = save(again, run, step=6)  # when there is room again
    assert again.steps() == [3, 6]
    assert bits(again.restore(run, 6)) == bits(second)
    again.close()


@untidy
def test_a_save_that_fails_is_not_passed_over_by_the_next(tmp_path: Path, checkpoints: Checkpoints) -> None:
    run = config(tmp_path)
    first = save(checkpoints, run, step=3)
    with pytest.raises(Exception, match=r"(?i)file too large|exhausted|limit|EFBIG|errno"):  # noqa: PT012
        with no_file_above(2_000):
            checkpoints.save(random_state(run, step=6), record(run))
            while list((tmp_path / "checkpoints").glob("6.*")) and checkpoints._manager.is_saving_in_progress():
                pass
        checkpoints.save(random_state(run, step=9), record(run))
    again = Checkpoints(tmp_path / "checkpoints", keep=2, read_only=True)
    assert again.latest_step() == 3
    assert bits(again.restore(run, 3)) == bits(first)
    again.close()


def test_loss_scale_is_of_this_state(tmp_path: Path, checkpoints: Checkpoints) -> None:
    run = config(tmp_path, dtype="float16")
    scale = LossScale(np.float32(3.0), np.int32(11), np.int32(2))
    checkpoints.save(random_state(run, step=5)._replace(loss_scale=scale), record(run))
    checkpoints.wait()
    restored = checkpoints.restore(run, 5)
    assert restored.loss_scale == scale
