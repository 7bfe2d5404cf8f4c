"""Pairs in which nothing is wrong: random configs, weights and inputs. Every failure is a false alarm."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parity.mutations.generic import PORTS, generic_pair
from parity.pair import Pair
from parity.selftest import pool
from transformer_config import TransformerConfig

CPU_SECONDS = 600
PER_PROCESS = 4
GENERIC_SHARE = 2
"""One pair in so many is one of the generic ones."""

TWINS_A_CONFIG = 2
"""So many pairs of twins have the same config, other weights and other inputs."""

FIELDS: dict[str, tuple[Any, ...]] = {
    "activation": ("relu", "gelu", "gelu_tanh", "silu"),
    "norm_order": ("post", "pre"),
    "final_norm": ("if_pre", "if_pre", "always", "never"),
    "norm_formula": ("variance", "variance", "unbiased_deviation"),
    "norm_eps": (1e-5, 1e-6, 1e-3),
    "use_bias": (True, True, False),
    "output_bias": ("if_untied", "if_untied", "never", "trained", "fixed"),
    "tie_embeddings": ("none", "output", "all"),
    "embedding_scale": (True, True, False),
    "freeze_padding": (False, False, True),
    "positions": ("interleaved", "concatenated", "concatenated_half_minus_1", "learned", "fixed"),
    "positions_skip_padding": (False, False, True),
    "position_offset": (0, 0, 1, 3),
    "interpolated": (False, False, True),
    "dropout": (0.0, 0.1, 0.3),
    "attention_dropout": (0.0, 0.1),
    "activation_dropout": (0.0, 0.1),
    "attention": ("plain", "blockwise"),
    "attention_block_size": (2, 3, 4, 128),
    "window": (None, None, 0, 1, 3),
    "gradient_checkpointing": (False, False, True),
    "shape": ((30, 5), (24, 3), (16, 4), (20, 1), (12, 6)),
    "d_ff": (44, 17, 64),
    "num_encoder_layers": (1, 1, 1, 2),
    "num_decoder_layers": (1, 1, 1, 2),
    "max_len": (13, 33),
    "ids": ((0, 1, 2), (3, 0, 1), (2, 1, 0), (2, 2, 0), (1, 2, 2)),
    "lengths": ((11, 9), (5, 12), (7, 3)),
    "scale": (1.0, 1.0, 0.5, 2.0),
}
"""What a clean pair is drawn from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clean:
    """What the harness said of a pair in which nothing is wrong."""

    seed: int
    description: str
    passed: bool
    failures: tuple[str, ...] = ()
    """`rung: tensor, error, bound` of what failed; or the error that ended it."""
    rungs: tuple[str, ...] = ()
    """Those that were compared."""
    seconds: float = 0.0


def draw(seed: int) -> tuple[str, Pair]:
    """What it is, and the pair."""
    if seed % GENERIC_SHARE == GENERIC_SHARE - 1:
        name = sorted(PORTS)[seed // GENERIC_SHARE % len(PORTS)]
        return name, generic_pair(name, seed=seed)
    # Weights and inputs by the seed, the config by every other one: most of the time goes into compiling it.
    rng = np.random.default_rng([77, seed // GENERIC_SHARE // TWINS_A_CONFIG])
    drawn = {field: options[int(rng.integers(len(options)))] for field, options in FIELDS.items()}
    return _twins(drawn, seed)


def _twins(drawn: dict[str, Any], seed: int) -> tuple[str, Pair]:
    from parity import twins

    config, changed = _config(drawn)
    lengths = drawn["lengths"]
    weights = {name: array * drawn["scale"] for name, array in twins.random_weights(config, seed=seed).items()}
    pair = twins.twin_pair(
        config,
        weights={name: array.astype(np.float32) for name, array in weights.items()},
        batches=lambda seed: twins.random_batch(config, seed=seed, src_len=lengths[0], tgt_len=lengths[1]),
        name=f"clean {seed}",
    )
    return ", ".join(f"{name}={value}" for name, value in changed.items()), pair


def _config(drawn: dict[str, Any]) -> tuple[TransformerConfig, dict[str, Any]]:
    """The config, and what in it is drawn. Values that exclude each other give way to each other."""
    fields = {k: v for k, v in drawn.items() if k not in ("shape", "ids", "lengths", "scale", "interpolated")}
    fields["d_model"], fields["num_heads"] = drawn["shape"]
    fields["pad_id"], fields["bos_id"], fields["eos_id"] = drawn["ids"]
    if drawn["tie_embeddings"] == "all":
        fields["tgt_vocab_size"] = 71
    if drawn["interpolated"]:
        fields["interpolated_len"] = 71
    return TransformerConfig.tiny(**fields), fields | {"lengths": drawn["lengths"], "scale": drawn["scale"]}


def check(
    count: int, *, seed: int, workers: int, progress: Callable[[Clean], None] = lambda clean: None
) -> list[Clean]:
    """The first `count` pairs from this seed on."""
    results: list[Clean] = []
    seeds = range(1000 * seed, 1000 * seed + count)
    for ended in pool.run(check_one, list(seeds), workers=workers, per_process=PER_PROCESS, cpu_seconds=CPU_SECONDS):
        if ended.how == "done":
            found = ended.value
        else:
            error = f"{ended.how}: {str(ended.value).strip()}"
            found = Clean(seed=ended.item, description="", passed=False, failures=(error,))
        results.append(found)
        progress(found)
    return sorted(results, key=lambda clean: clean.seed)


def check_one(seed: int) -> Clean:
    """The whole ladder."""
    from parity import ladder

    description, pair = draw(seed)
    started = time.perf_counter()
    report = ladder.check(pair, seed=seed, keep_going=True, explain=False)
    failures = [
        f"{rung.name}: {failure.tensor}, error {failure.error:.3g}, bound {failure.bound:.3g} {failure.detail}"
        for rung in report.failed
        for failure in rung.failures[:3]
    ]
    return Clean(
        seed=seed,
        description=description,
        passed=report.passed,
        failures=tuple(failures) or (() if report.passed else ("nothing failed, and it did not pass",)),
        rungs=tuple(rung.name for rung in report.rungs if rung.status in ("passed", "failed")),
        seconds=time.perf_counter() - started,
    )


def false_alarms(results: Sequence[Clean]) -> list[Clean]:
    """Those that failed."""
    return [clean for clean in results if not clean.passed]
