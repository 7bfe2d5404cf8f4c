"""Blind mutations of `flax_transformer`: is each one noticed by the ladder, and if not, does it change any program?"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parity.mutations import source, syntax
from parity.mutations.syntax import Mutation
from parity.pair import Pair, Side
from parity.selftest import pool
from parity.selftest.equivalent import ARGUMENTS
from transformer_config import TransformerConfig

PACKAGE = "flax_transformer"
FORWARD = "forward and backward, batch"
FIRST_RUNGS: Mapping[str, tuple[str, ...]] = {
    FORWARD: ("weights", "forward", "gradients"),
    "forward and backward": ("weights", "adversarial"),
    "masks": ("weights", "dropout"),
    "dropout": ("weights", "dropout"),
    "decoding": ("weights", "decoding"),
    "initial values": ("initialisation",),
}
"""What the name of a program begins with -> the rungs that run it: a change of it is looked for there before the whole
ladder is climbed."""
CPU_SECONDS = 600
"""Limit of a mutant. Most are noticed within 10; one that passes is checked on up to nine variants, 20 to 60 each."""

_SMALL: dict[str, Any] = {"num_encoder_layers": 1, "num_decoder_layers": 2, "dropout": 0.1}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"attention_dropout": 0.1, "activation_dropout": 0.1},
    "pre-norm": {
        "norm_order": "pre",
        "positions": "learned",
        "tie_embeddings": "none",
        "activation": "relu",
        "use_bias": False,
    },
    "window": {
        "window": 2,
        "positions": "concatenated_half_minus_1",
        "position_offset": 2,
        "activation": "silu",
        "pad_id": 3,
        "bos_id": 0,
    },
    "interpolated": {
        "positions": "learned",
        "max_len": 23,
        "interpolated_len": 71,
        "position_offset": 1,
        "activation": "gelu_tanh",
        "norm_order": "pre",
    },
    "blockwise": {"attention": "blockwise", "attention_dropout": 0.1, "interpolated_len": 71, "dropout": 0.0},
    "checkpointed": {"gradient_checkpointing": True, "tie_embeddings": "all", "tgt_vocab_size": 71},
    "blockwise window": {
        "attention": "blockwise",
        "window": 3,
        "attention_dropout": 0.1,
        "positions": "concatenated",
        "attention_block_size": 2,
    },
    "weights": {},
    "blockwise weights": {"attention": "blockwise"},
}
"""Configs that between them execute what a check can execute, cheap ones first. Those called `weights` return the
attention weights too."""

QUICK_VARIANTS = ("plain", "pre-norm", "interpolated", "blockwise window")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survey:
    """What the code does as it is."""

    executed: Mapping[str, Mapping[str, Mapping[int, Sequence[source.Place]]]]
    """Variant -> file -> line -> what of it is executed."""
    programs: Mapping[str, Mapping[str, str]]
    """Variant -> its programs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """What became of a mutation."""

    mutation: Mutation
    detected: bool
    how: str
    """The rung that failed and the variant, or how it ended; or empty."""
    argument: str = ""
    """Why it computes the same, if it was not detected and does."""
    same: tuple[str, ...] = ()
    """Variants whose programs it leaves as they are."""
    passed: tuple[str, ...] = ()
    """Variants whose programs it changes and which pass nevertheless."""

    @property
    def explained(self) -> bool:
        """Detected, or argued to be equivalent."""
        return self.detected or bool(self.argument)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    mutation: Mutation
    programs: Mapping[str, Mapping[str, str]]
    """Of the unchanged code, in the variants that execute what is changed, cheap ones first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Verdict:
    how: str
    same: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()


def variant_pair(name: str, *, seed: int = 0) -> Pair:
    """Our own twins in one of VARIANTS. Imports them."""
    from parity import twins

    pair = twins.preset_pair(TransformerConfig.tiny(**{**_SMALL, **VARIANTS[name]}), seed=seed, name=name)
    if "weights" not in name.split():
        return pair
    return dataclasses.replace(pair, reference=_with_weights(pair.reference), port=_with_weights(pair.port))


def _with_weights(side: Side) -> Side:
    """The side that returns its attention weights beside the logits."""
    call, loss = side.call, side.loss

    def both(module: Any, inputs: Any) -> dict[str, Any]:
        weights = module.attention_weights(inputs["src"], inputs["tgt_in"])
        return {"logits": call(module, inputs), **weights}

    return dataclasses.replace(
        side,
        call=both,
        loss=lambda output, inputs: loss(output["logits"] if isinstance(output, dict) else output, inputs),  # type: ignore[misc]
    )


def survey(*, workers: int, names: Sequence[str] = tuple(VARIANTS)) -> Survey:
    """Runs every variant as it is. Raises RuntimeError if one of them does not run."""
    executed, programs = {}, {}
    for ended in pool.run(_survey_one, list(names), workers=workers, per_process=1, cpu_seconds=CPU_SECONDS):
        if ended.how != "done":
            raise RuntimeError(f"expected the variant {ended.item!r} to run, got: {ended.value}")
        executed[ended.item], programs[ended.item] = ended.value
    # In the order of VARIANTS: cheap ones are tried first.
    return Survey(executed={name: executed[name] for name in names}, programs={name: programs[name] for name in names})


def _survey_one(name: str) -> tuple[dict[str, dict[int, list[source.Place]]], Mapping[str, str]]:
    executed = source.Executed(source.files_of(PACKAGE))

    def run() -> Mapping[str, str]:
        from parity.selftest.programs import programs

        return programs(variant_pair(name))

    found = executed.during(run)
    return {file: source.by_line(places) for file, places in executed.places.items()}, found


def candidates(found: Survey) -> tuple[list[Mutation], list[Mutation]]:
    """(mutations of what a variant executes, mutations of the rest)."""
    reached: list[Mutation] = []
    unreached: list[Mutation] = []
    for file, path in source.files_of(PACKAGE).items():
        for mutation in syntax.mutations(path.read_text(encoding="utf-8"), file=file):
            (reached if _executing(mutation, found) else unreached).append(mutation)
    return reached, unreached


def _executing(mutation: Mutation, found: Survey) -> tuple[str, ...]:
    stretch = source.Place(mutation.line, mutation.column, mutation.last, mutation.last_column, constant=False)
    return tuple(
        name for name, files in found.executed.items() if source.reaches(files.get(mutation.file, {}), stretch)
    )


def check(
    mutations: Sequence[Mutation],
    found: Survey,
    *,
    workers: int,
    progress: Callable[[Mutant], None] = lambda mutant: None,
) -> list[Mutant]:
    """Each mutation on the variants that execute it, cheap ones first, until one notices.

    A variant whose programs are left as they are need not be run: it would pass as it passed before. Mutations with
    which the package cannot be imported are left out of the result.
    """
    jobs = [
        _Job(mutation=mutation, programs={name: found.programs[name] for name in _executing(mutation, found)})
        for mutation in mutations
    ]
    done: list[Mutant] = []
    for ended in pool.run(_check_one, jobs, workers=workers, per_process=1, cpu_seconds=CPU_SECONDS):
        mutant = _judged(ended)
        if mutant is not None:
            done.append(mutant)
            progress(mutant)
    order = {mutation: i for i, mutation in enumerate(mutations)}
    return sorted(done, key=lambda mutant: order[mutant.mutation])


def _judged(ended: pool.Ended) -> Mutant | None:
    mutation = ended.item.mutation
    if ended.how != "done":
        reason = {"raised": "failed while it ran", "died": "died", "did not finish": "did not finish"}[ended.how]
        return Mutant(mutation=mutation, detected=True, how=f"{reason}: {str(ended.value).strip().splitlines()[-1]}")
    verdict: _Verdict | None = ended.value
    if verdict is None:
        return None
    argument = "" if verdict.how else _argument(mutation, verdict, ended.item.programs)
    return Mutant(
        mutation=mutation,
        detected=bool(verdict.how),
        how=verdict.how,
        argument=argument,
        same=verdict.same,
        passed=verdict.passed,
    )


def _argument(mutation: Mutation, verdict: _Verdict, programs: Mapping[str, Mapping[str, str]]) -> str:
    if not verdict.passed:
        count = sum(len(programs[name]) for name in verdict.same)
        names = f"{len(verdict.same)} variants that execute it"
        return f"no program that a pair runs changes: {count} of {names}, constants included"
    return ARGUMENTS.get(mutation.key, "")


def _check_one(job: _Job) -> _Verdict | None:
    """None if the changed package cannot be imported."""
    text = source.files_of(PACKAGE)[job.mutation.file].read_text(encoding="utf-8")
    source.install(PACKAGE, job.mutation.file, syntax.mutated(text, job.mutation))
    try:
        from parity import twins  # noqa: F401
    except Exception:
        return None
    same: list[str] = []
    passed: list[str] = []
    for name, programs in job.programs.items():
        change = _first_change(name, programs)
        if change is None:
            same.append(name)
            continue
        failed = _failed(name, change)
        if failed:
            return _Verdict(how=f"{failed} ({name})", same=tuple(same), passed=tuple(passed))
        passed.append(name)
    return _Verdict(how="", same=tuple(same), passed=tuple(passed))


def _failed(name: str, change: str) -> str:
    """The rungs that a variant fails; empty if it passes all of them."""
    from parity import ladder

    first = next((rungs for program, rungs in FIRST_RUNGS.items() if change.startswith(program)), ())
    if first:
        report = ladder.check(variant_pair(name), rungs=first, explain=False)
        if report.failed:
            return ", ".join(rung.name for rung in report.failed)
    report = ladder.check(variant_pair(name), explain=False)
    if report.passed:
        return ""
    return ", ".join(rung.name for rung in report.failed) or "nothing was compared"


def _first_change(name: str, programs: Mapping[str, str]) -> str | None:
    """Which program is the first that is another one, if there is any.

    A variant that cannot be traced counts as changed: the ladder will say what is wrong.
    """
    from parity.selftest.programs import one_by_one

    seen = 0
    try:
        for what, digest in one_by_one(variant_pair(name)):
            if programs.get(what) != digest:
                return what
            seen += 1
    except Exception:
        return FORWARD
    return None if seen == len(programs) else "fewer programs"
