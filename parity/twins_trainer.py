"""Some steps of the real trainer beside the reference's, on the run's own batches, in float64, with the same dropout.

Nothing here trains: `train.loop.Trainer` makes the batches and takes the steps of the Flax twin, drawing its own
dropout by seed, step and row; `torch_reference.training` takes those of the reference, on the same rows whole, with
masks that are drawn outside the step from the same key.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from rich.console import Console

import torch_reference
from flax_transformer import DropoutKey
from parity.compare import Comparison
from parity.tolerances import TRAINER_LOSS, TRAINER_RULE
from parity.trajectory import apart
from parity.twins_reference import training_options
from parity.twins_sites import Sites, port_sites
from parity.twins_training import step_masks
from parity.weights.twins import twin_mapping
from torch_reference import training as reference
from train.batching import Batch
from train.checkpoint import Checkpoints
from train.config import TrainConfig
from train.init_from import adopted
from train.loop import Trainer
from train.parallel import Devices
from train.prepare import prepare
from train.run_dir import RunDir
from train.signals import StopRequest

ZERO_GRADIENT = "k_proj.bias"
"""Parameters whose gradient is zero in exact arithmetic, so that Adam moves them by noise."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of both."""

    number: int
    """Counted from 1."""
    trainer: float
    """The loss before the step, in nats a token."""
    reference: float
    tokens: int

    @property
    def compared(self) -> Comparison:
        """Judged."""
        error = abs(self.trainer - self.reference)
        return Comparison(tensor=f"loss of step {self.number}", error=error, bound=TRAINER_LOSS)


def check(config: TrainConfig, *, steps: int, console: Console, folder: Path | None = None) -> bool:
    """Whether every loss is within its bound; prints each step, the largest difference, and the first beyond it.

    `folder` is for the tokenizer and the text as ids; None: a temporary one. Raises ValueError for a config that the
    reference does not have, and what `prepare` raises for the corpus.
    """
    config = comparable(config)
    taken: list[Step] = []
    with contextlib.ExitStack() as stack:
        where = Path(stack.enter_context(tempfile.TemporaryDirectory())) if folder is None else folder
        stack.enter_context(jax.enable_x64(True))
        both = Both(config, where, console=console)
        stack.callback(both.close)
        console.print(f"{both.trainer.devices}; {config.parallel.accumulation_steps} micro-batch(es), float64")
        console.print(f"{'step':>6}{'tokens':>8}{'trainer':>20}{'reference':>20}{'difference':>13}", highlight=False)
        for step in both.steps(steps):
            taken.append(step)
            numbers = f"{step.trainer:>20.14f}{step.reference:>20.14f}{step.compared.error:>13.1e}"
            beyond = "" if step.compared.passed else "  beyond"
            console.print(f"{step.number:>6,}{step.tokens:>8,}{numbers}{beyond}", highlight=False)
        console.print(f"Parameters at the end: {both.furthest():.1e} apart at most.")
    return _verdict(taken, console)


def comparable(config: TrainConfig) -> TrainConfig:
    """The same training in float64, with plain attention: others draw dropout in tiles, or not at all.

    Raises ValueError for packed rows, and for an optimizer or schedule, which the reference does not have.
    """
    if config.batch.packing:
        raise ValueError("batch.packing: expected False, because the reference trains on one pair a row, got True")
    training_options(config.optimizer, smoothing=config.label_smoothing)
    model = config.model.replace(dtype="float64", param_dtype="float64", attention="plain")
    return config.replace(model=model)


class Both:
    """The trainer in a folder of its own, and the reference with the trainer's initial weights.

    To be used, and made, where jax has float64.
    """

    def __init__(self, config: TrainConfig, folder: Path, *, console: Console):
        config = config.replace(run_dir=folder, corpus=dataclasses.replace(config.corpus, cache=folder / "cache"))
        config = comparable(adopted(config))
        run_dir = RunDir(folder)
        run_dir.write_config(config)
        data = prepare(config, run_dir, console=console)
        self.config = config = config.with_vocabulary(data.tokenizer.size)
        self.checkpoints = Checkpoints(run_dir.checkpoints, keep=1)
        self.trainer = Trainer(
            config,
            data=data,
            run_dir=run_dir,
            checkpoints=self.checkpoints,
            console=console,
            devices=Devices(config.parallel),
            stop=StopRequest(),
        )
        self.mapping = twin_mapping(tied=config.model.tie_embeddings == "all")
        model = torch_reference.Transformer(config.model, generator=torch.Generator().manual_seed(0))
        weights = self.mapping.inverse().apply(self._trained())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(np.array(weights[name])))
        self.options = training_options(config.optimizer, smoothing=config.label_smoothing)
        self.reference = reference.initial_state(model.train(), self.options)
        sites = Sites(config.model, port_sites)
        self._draw = jax.jit(lambda key, inputs: sites.draw(inputs, DropoutKey(key)))

    def close(self) -> None:
        """Ends what writes files."""
        self.trainer.close()
        self.checkpoints.close()

    def steps(self, count: int) -> Iterator[Step]:
        """The run's first steps, one after the other."""
        trainer = self.trainer
        for number in range(count):
            made = trainer.made(number)
            trainer.state, metrics = trainer.train_step(trainer.state, made.arrays)
            ours = float(trainer.devices.metrics(metrics).loss)
            theirs = self._reference_step(number)
            yield Step(number + 1, ours, theirs.loss, theirs.num_tokens)

    def furthest(self) -> float:
        """The largest difference between two parameters, now, but for those whose true gradient is zero."""
        theirs = self.mapping.apply({n: p.detach().numpy() for n, p in self.reference.model.named_parameters()})
        ours = self._trained()
        return max(apart(ours[n], theirs[n])[1] for n in theirs if not n.endswith(ZERO_GRADIENT))

    def _trained(self) -> dict[str, np.ndarray]:
        params = self.trainer.devices.to_save(self.trainer.state).params
        return {name: np.asarray(array) for name, array in params.items()}

    def _reference_step(self, number: int) -> reference.StepMetrics:
        epoch, i = divmod(number, self.trainer.steps_per_epoch)
        batch = self.trainer.data.epoch(epoch).batch(i)
        masks = self._masks(batch, number)
        ids = (torch.from_numpy(array) for array in (batch.src, batch.tgt_in, batch.tgt_out))
        dropout = torch_reference.DropoutMasks(masks)
        return reference.train_step(self.reference, [reference.Batch(*ids)], self.options, dropout=[dropout])

    def _masks(self, batch: Batch, number: int) -> dict[str, Any]:
        inputs = {"src": batch.src, "tgt_in": batch.tgt_in}
        drawn = step_masks(self._draw, number, inputs, seed=self.config.seed)
        return {site: torch.from_numpy(np.array(mask)) for site, mask in drawn.items()}


def _verdict(taken: list[Step], console: Console) -> bool:
    say: Callable[..., None] = console.print
    beyond = next((step for step in taken if not step.compared.passed), None)
    largest = max(taken, key=lambda step: step.compared.error)
    say(f"Bound: {TRAINER_RULE}.", highlight=False)
    say(f"Largest difference: {largest.compared.error:.1e}, in step {largest.number}.", highlight=False)
    if beyond is None:
        say(f"The trainer and the reference are equal: {len(taken)} steps.", highlight=False)
        return True
    say(f"The two are NOT EQUAL: first beyond the bound in step {beyond.number}.", highlight=False)
    return False
