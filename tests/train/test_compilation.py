"""T6, T8: programs are compiled before the first step, counted, and kept between processes."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import monitoring
from rich.console import Console

from tests.train.conftest import Ended
from tests.train.test_cli import python
from train import loop
from train.compilation import Compiled, prepare_all
from train.loop import Trainer

CACHE = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from train.compilation import keep_programs
keep_programs(Path(sys.argv[1]))
jax.jit(lambda x: jnp.sin(x) * 3 + 1)(jnp.ones(7)).block_until_ready()
"""


def test_one_program_for_each_shape_and_dtype() -> None:
    traced: list[Any] = []

    @jax.jit
    def double(tree: dict[str, jax.Array]) -> jax.Array:
        traced.append(tree["x"].shape)
        return 2 * tree["x"]

    compiled: Compiled[..., Any] = Compiled(double)
    assert compiled.compilations == 0
    shapes = [({"x": jax.ShapeDtypeStruct((n,), jnp.float32)},) for n in (3, 5)]
    told: list[int] = []
    prepare_all(compiled, shapes, done=lambda: told.append(compiled.compilations))
    assert told == [1, 2]
    for n in (5, 3, 3):
        assert compiled({"x": jnp.ones(n)}).tolist() == [2.0] * n
    assert compiled.compilations == len(traced) == 2  # prepared ahead, and not again
    compiled({"x": jnp.ones(4)})
    compiled({"x": jnp.ones(4, jnp.int32)})
    assert compiled.compilations == 4


def test_all_is_compiled_before_the_first_step(
    tiny_run: Any, tmp_path: Path, whole: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With programs of its own: several shapes, evaluations in between, and not one more from the first step on."""
    first_step: list[int] = []
    compiled: list[str] = []
    counts: dict[str, tuple[int, int]] = {}
    take, train = Trainer._take, Trainer.train

    def listener(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and "after" not in counts:
            compiled.append("stepping" if first_step else "before")

    def counted(self: Trainer) -> tuple[int, int]:
        return self.train_step.compilations, self.evaluation_step.compilations

    def take_and_see(self: Trainer, made: Any, progress: Any) -> None:
        if made.number == 0:
            counts["before"] = counted(self)
            first_step.append(made.number)
        take(self, made, progress)

    def train_and_see(self: Trainer) -> None:
        train(self)
        counts["after"] = counted(self)

    monkeypatch.setattr(Trainer, "_take", take_and_see)
    monkeypatch.setattr(Trainer, "train", train_and_see)
    config = tiny_run(tmp_path, batch=dataclasses.replace(whole.config.batch, num_buckets=2), epochs=1)
    console = Console(record=True, width=160, file=io.StringIO())
    monitoring.register_event_duration_secs_listener(listener)
    try:
        loop.run(config, console=console)
    finally:
        monitoring.unregister_event_duration_listener(listener)
    shown = " ".join(console.export_text().split())
    train_steps, evaluation_steps = counts["before"]
    assert train_steps == 2
    assert counts["after"] == counts["before"]
    assert f"To compile: {train_steps} training steps, {evaluation_steps} evaluation steps" in shown
    assert f"Compiled {train_steps + evaluation_steps} programs" in shown
    expected = f"training step {train_steps} of {train_steps}, evaluation step {evaluation_steps} of {evaluation_steps}"
    assert f"Compilations: {expected}." in shown
    assert compiled.count("before") >= train_steps + evaluation_steps, "the test wants to hear of compilations"
    assert "stepping" not in compiled


def test_the_folder_of_programs_fills_and_is_used(tmp_path: Path) -> None:
    """A compilation of milliseconds is kept, and a second process compiles nothing."""
    entries = []
    for _ in range(2):
        done = python("-c", CACHE, str(tmp_path / "new" / "xla"))
        assert done.returncode == 0, done.stderr
        entries.append({path.name for path in (tmp_path / "new" / "xla").iterdir() if "atime" not in path.name})
    assert entries[0]
    assert entries[1] == entries[0]
