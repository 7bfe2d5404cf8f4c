"""How fast training is: the loop against the torch reference, the step against the machine, the cost of dropout.

    python benchmarks/training_speed.py --data FOLDER [--preset multi30k-de-en] [--steps 6] [--rounds 12] [--json FILE]

FOLDER holds the files of the preset's corpus. Everything is measured in one process, in turns, so that whatever else
the machine does strikes all alike; figures are medians over the rounds of the time for the same batches.

- loop: `Trainer.take_steps`, with making batches, reading metrics, writing metrics.jsonl. No evaluation, no save.
- bare: the compiled step on the same batches, made beforehand.
- bare without dropout: the same with a rate of 0.
- torch: the torch reference's training step, library attention, the same model, fed by a plain loader: sentences in
  random order, as many a step as the loop has on average, padded to the longest of the batch.
- product: a large float32 matrix product through jax, again and again for half a second before the bare steps of a
  round. The share of its rate that the step reaches is that of the medians over all repetitions and all rounds, for
  both alike suffer from what else the machine does; that of the best of both is printed too.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from train.host_memory import keep_freed_memory

keep_freed_memory()  # as `python -m train` does; it serves torch as well

import jax  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402

from torch_reference import Transformer as TorchTransformer  # noqa: E402
from torch_reference import training as reference  # noqa: E402
from train.checkpoint import Checkpoints  # noqa: E402
from train.compilation import keep_programs  # noqa: E402
from train.config import ParallelConfig, ReportConfig, TrainConfig  # noqa: E402
from train.loop import Trainer  # noqa: E402
from train.parallel import Devices  # noqa: E402
from train.prepare import prepare  # noqa: E402
from train.presets import PRESETS  # noqa: E402
from train.run_dir import RunDir  # noqa: E402
from train.signals import StopRequest  # noqa: E402
from transformer_config import BOS_ID, PAD_ID  # noqa: E402


def trainer_of(config: TrainConfig, folder: Path) -> Trainer:
    """Ready, and compiled."""
    console = Console(quiet=True)
    run_dir = RunDir(folder)
    run_dir.write_config(config)
    data = prepare(config, run_dir, console=console)
    trainer = Trainer(
        config.with_vocabulary(data.tokenizer.size),
        data=data,
        run_dir=run_dir,
        checkpoints=Checkpoints(run_dir.checkpoints, keep=1),
        console=console,
        devices=Devices(config.parallel),
        stop=StopRequest(),
    )
    trainer.compile()
    return trainer


class TorchLoop:
    """The reference on the same text."""

    def __init__(self, trainer: Trainer, *, sentences: int):
        config = trainer.config
        generator = torch.Generator().manual_seed(0)
        self.model = TorchTransformer(config.model.replace(attention="library"), generator=generator)
        self.model.train()
        optimizer = config.optimizer
        self.options = reference.TrainingOptions(
            noam_factor=optimizer.noam_factor,
            warmup_steps=optimizer.warmup_steps,
            label_smoothing=config.label_smoothing,
            clip_norm=optimizer.clip_norm,
        )
        self.state = reference.initial_state(self.model, self.options)
        self.text, self.sentences = trainer.data.train, sentences
        self.order = np.random.default_rng(0).permutation(len(self.text))
        self.at = 0

    def batch(self) -> tuple[reference.Batch, int]:
        """The next sentences, padded to the longest; and their real tokens."""
        pairs = self.order[self.at : self.at + self.sentences]
        self.at += self.sentences
        src = [torch.from_numpy(self.text.src[i].astype(np.int64)) for i in pairs]
        out = [torch.from_numpy(self.text.tgt[i].astype(np.int64)) for i in pairs]
        given = [torch.cat([torch.tensor([BOS_ID]), row[:-1]]) for row in out]
        padded = (torch.nn.utils.rnn.pad_sequence(rows, True, PAD_ID) for rows in (src, given, out))
        return reference.Batch(*padded), sum(map(len, src)) + sum(map(len, out))

    def steps(self, number: int) -> int:
        """Takes so many; their real tokens."""
        tokens = 0
        for _ in range(number):
            batch, real = self.batch()
            reference.train_step(self.state, [batch], self.options)
            tokens += real
        return tokens


def timed(function: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def product_rates(seconds: float = 0.5, size: int = 1024) -> list[float]:
    """Operations a second of large float32 products one after the other, by repetition."""
    matrix = jax.numpy.ones((size, size), jax.numpy.float32)
    product = jax.jit(jax.numpy.matmul)
    product(matrix, matrix).block_until_ready()
    until, rates = time.perf_counter() + seconds, []
    while time.perf_counter() < until:
        rates.append(2 * size**3 / timed(lambda: product(matrix, matrix).block_until_ready()))
    return rates


def bare(trainer: Trainer, step: Callable[..., object], numbers: range) -> Callable[[], None]:
    """Runs the compiled step on batches that are made now."""
    batches = [trainer.made(number).arrays for number in numbers]
    # A step beforehand, which takes memory for what the timed ones only use again.
    state, _ = jax.block_until_ready(step(trainer.devices.place_state(trainer.state), batches[0]))  # type: ignore[misc]

    def run() -> None:
        # Two steps on the way at most, as in the loop: the memory of all that are is taken at once.
        now, before = state, None
        for arrays in batches:
            now, metrics = step(now, arrays)
            jax.block_until_ready(before)
            before = metrics
        jax.block_until_ready((now, before))

    return run


def warm_up(trainer: Trainer, step: Callable[..., object]) -> None:
    """The first call of a program is slower than all others."""
    plan = trainer.data.epoch(0)
    shapes = [plan.shape(i) for i in range(len(plan))]
    for shape in trainer.data.shapes:
        number = shapes.index(shape)
        bare(trainer, step, range(number, number + 1))()


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--preset", default="multi30k-de-en")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    cache = Path(tempfile.gettempdir()) / "twinformer-cache"
    keep_programs(cache / "xla")
    preset = PRESETS[arguments.preset]()
    config = preset.replace(
        corpus=dataclasses.replace(preset.corpus, path=arguments.data, cache=cache),
        parallel=ParallelConfig(num_devices=1),
        report=ReportConfig(log_every_steps=20),
        checkpoint=dataclasses.replace(preset.checkpoint, every_steps=10**9),
    )
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(trainer_of(config, Path(folder)), arguments)
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(trainer: Trainer, arguments: argparse.Namespace) -> dict[str, object]:
    """All figures."""
    model = trainer.config.model
    still = trainer.config.replace(model=model.replace(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0))
    without = trainer.devices.compile_train_step(still)
    for shape in trainer.data.shapes:
        without.prepare(trainer.state, trainer.devices.batch_shapes(shape, packed=trainer.data.packed))
    plan = trainer.data.epoch(0)
    sentences = round(len(trainer.data.train) / len(plan))
    other = None if arguments.no_torch else TorchLoop(trainer, sentences=sentences)
    if other is not None:
        other.steps(3)
    for step in (trainer.train_step, without):
        warm_up(trainer, step)
    progress = trainer.progress()
    rates: dict[str, list[float]] = {"product": [], "bare": []}
    seconds: dict[str, list[float]] = {name: [] for name in ("loop", "bare", "without", "torch")}
    tokens: dict[str, list[int]] = {"loop": [], "torch": []}
    for _ in range(arguments.rounds):
        numbers = range(trainer.step, trainer.step + arguments.steps)
        made = [trainer.made(number) for number in numbers]
        run_without = bare(trainer, without, numbers)
        tokens["loop"].append(sum(one.tokens for one in made))
        run_bare = bare(trainer, trainer.train_step, numbers)
        rates["product"] += product_rates()
        seconds["bare"].append(timed(run_bare))
        rates["bare"].append(sum(one.flops for one in made) / seconds["bare"][-1])
        seconds["loop"].append(timed(partial(trainer.take_steps, numbers.stop, progress)))
        seconds["without"].append(timed(run_without))
        if other is not None:
            started = time.perf_counter()
            tokens["torch"].append(other.steps(arguments.steps))
            seconds["torch"].append(time.perf_counter() - started)
    return report(trainer, rates, seconds, tokens, arguments, sentences)


def report(
    trainer: Trainer,
    rates: dict[str, list[float]],
    seconds: dict[str, list[float]],
    tokens: dict[str, list[int]],
    arguments: argparse.Namespace,
    sentences: int,
) -> dict[str, object]:
    """Medians over the rounds of figures and ratios."""

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 4)

    def ratios(first: list[float], second: list[float]) -> list[float]:
        return [a / b for a, b in zip(first, second, strict=True)]

    loop = ratios(tokens["loop"], seconds["loop"])  # type: ignore[arg-type]
    figures: dict[str, object] = {
        "command": f"--preset {arguments.preset} --steps {arguments.steps} --rounds {arguments.rounds}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "torch": torch.__version__,
        "device": str(trainer.devices),
        "padding efficiency": round(trainer.data.epoch(0).padding_efficiency, 4),
        "sentences a step": sentences,
        "seconds a bare step": median([value / arguments.steps for value in seconds["bare"]]),
        "loop, real tokens/s": median(loop),
        "product, GFLOP/s": median([rate / 1e9 for rate in rates["product"]]),
        "product at its best, GFLOP/s": round(max(rates["product"]) / 1e9, 1),
        "bare step, share of the product": round(
            statistics.median(rates["bare"]) / statistics.median(rates["product"]), 4
        ),
        "bare step at its best, share of the product at its best": round(max(rates["bare"]) / max(rates["product"]), 4),
        "dropout, share of a step": median([1 - value for value in ratios(seconds["without"], seconds["bare"])]),
        "loop, overhead over the bare step": median([value - 1 for value in ratios(seconds["loop"], seconds["bare"])]),
    }
    if seconds["torch"]:
        theirs = ratios(tokens["torch"], seconds["torch"])  # type: ignore[arg-type]
        figures["torch, real tokens/s"] = median(theirs)
        figures["loop over torch"] = median(ratios(loop, theirs))
    return figures


if __name__ == "__main__":
    main()
