"""The selftest's parts: children that misbehave, what counts as located, named, equivalent; a few items in full."""

import dataclasses
import json
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from parity import diagnose, selftest
from parity.mutations import KINDS, source, syntax
from parity.mutations.syntax import Mutation
from parity.selftest import blind, clean, outcome, planted, pool, terminal
from parity.selftest.names import NAMES
from parity.selftest.page import page
from parity.selftest.planted import Planted

MUTATION = Mutation(
    file="masks.py",
    function="f",
    line=3,
    column=0,
    last=3,
    last_column=9,
    operator="constant",
    before="1",
    after="2",
    number=0,
)


@pytest.fixture(scope="module")
def ended() -> Iterator[dict[str, pool.Ended]]:
    """Four jobs of which three go wrong, in one child as long as it lives."""
    jobs = ["1 + 1", "1 / 0", "__import__('os')._exit(3)", "2 + 2", "exec('while True: pass')", "3 + 3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "PRELOADED", ())
        yield {e.item: e for e in pool.run(eval, jobs, workers=1, per_process=6, cpu_seconds=1)}


def test_a_job_that_goes_wrong_takes_no_other_along(ended: dict[str, pool.Ended]) -> None:
    assert {item: e.how for item, e in ended.items()} == {
        "1 + 1": "done",
        "1 / 0": "raised",
        "__import__('os')._exit(3)": "died",
        "2 + 2": "done",
        "exec('while True: pass')": "did not finish",
        "3 + 3": "done",
    }
    assert [ended[item].value for item in ("1 + 1", "2 + 2", "3 + 3")] == [2, 4, 6]
    assert "ZeroDivisionError" in ended["1 / 0"].value


@pytest.mark.parametrize(
    ("found", "place", "right"),
    [
        ("encoder.layers.0.norm1", "encoder.layers.0.norm1", True),
        ("encoder.layers.0.norm1#2", "encoder.layers.0.norm1", True),
        ("encoder.layers.0.norm1, mean 1e4", "encoder.layers.0.norm1", True),
        ("encoder.layers.0.norm1.bias (batch 2)", "encoder.layers.0.norm1", True),
        ("encoder.layers.0.q.weight", "encoder.layers.0.q.kernel", True),
        ("encoder.layers.0", "encoder.layers.0.norm1", False),
        ("encoder.layers.0.norm1", "encoder.layers.0", False),
        ("encoder.layers.0.norm2.bias", "encoder.layers.0.norm1", False),
        ("the model itself", "encoder", False),
        ("", "encoder", False),
    ],
)
def test_what_counts_as_located(found: str, place: str, right: bool) -> None:
    assert planted.locates(found, (place,)) is right


def test_every_name_is_one_that_a_diagnosis_gives() -> None:
    assert NAMES.keys() <= {kind.name for kind in KINDS}
    assert {name for names in NAMES.values() for name in names} <= diagnose.kinds().keys()


def test_every_kind_is_planted_at_three_places_and_enough_of_them_quickly_at_one() -> None:
    assert len(planted.kinds_to_plant(quick=False)) == 3 * len(KINDS)
    counted = {kind.name for kind in KINDS if not kind.beyond}
    quickly: set[str] = set()
    for seed in range(planted.QUICK_SHARE):
        items = planted.kinds_to_plant(quick=True, seed=seed)
        assert len({item.kind for item in items} & counted) >= outcome.KINDS_GOAL
        assert {item.number for item in items} == {0, planted.LAST}
        quickly |= {item.kind for item in items}
    assert quickly == {kind.name for kind in KINDS}


def test_a_known_fault_is_detected_located_and_named() -> None:
    found = planted.check_one(planted._Item(kind="RMS norm eps", number=2))
    assert found is not None
    assert (found.detected, found.located, found.named) == (True, True, True), found
    one_place = "forget gate one more"
    assert planted.check_one(planted._Item(kind=one_place, number=2)) is None, "it has one place, its first"


def test_a_clean_pair_passes_every_rung() -> None:
    seed = next(s for s in range(100) if clean.draw(s)[0] == "recurrent")
    found = clean.check_one(seed)
    assert found.passed, found.failures
    assert {"forward", "gradients", "modes"} <= set(found.rungs)


def test_clean_pairs_are_drawn_from_every_field() -> None:
    configs = [clean.draw(seed) for seed in range(100)]
    assert configs[3][0] == clean.draw(3)[0], "a seed decides"
    text = " ".join(description for description, _ in configs)
    for expected in ("norm_order=pre", "attention=blockwise", "window=3", "tie_embeddings=all", "positions=fixed"):
        assert expected in text


def test_a_mutation_of_the_port_is_noticed_and_one_that_changes_nothing_is_argued() -> None:
    """In full: survey, mutants in children, programs compared."""
    (file, path) = next((f, p) for f, p in source.files_of(blind.PACKAGE).items() if f == "primitives.py")
    every = syntax.mutations(path.read_text(encoding="utf-8"), file=file)
    wrong = next(m for m in every if m.before == "variance + self.eps" and m.after == "variance - self.eps")
    # The parameters are replaced: what the builder fills them with is not a program.
    same = next(
        m for m in every if m.before == "jnp.ones(config.d_model, param_dtype)" and m.operator == "omitted call"
    )
    pool.prepare()
    found = blind.survey(workers=2, names=("plain",))
    assert found.executed["plain"]["primitives.py"][wrong.line]
    noticed, other = blind.check([wrong, same], found, workers=2)
    assert noticed.detected
    assert "(plain)" in noticed.how
    assert other.explained


def test_survivors_are_argued_by_equal_programs_or_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {"plain": {"forward": "a", "decoding": "b"}, "window": {"forward": "c"}}
    unchanged = blind._Verdict(how="", same=("plain", "window"))
    assert "3 of 2 variants that execute it" in blind._argument(MUTATION, unchanged, programs)
    changed = blind._Verdict(how="", same=("plain",), passed=("window",))
    assert blind._argument(MUTATION, changed, programs) == ""
    monkeypatch.setitem(blind.ARGUMENTS, MUTATION.key, "for this reason")
    assert blind._argument(MUTATION, changed, programs) == "for this reason"


def test_how_a_mutant_ended() -> None:
    job = blind._Job(mutation=MUTATION, programs={"plain": {}})

    def judged(how: Any, value: Any) -> blind.Mutant | None:
        return blind._judged(pool.Ended(item=job, how=how, value=value))

    assert judged("done", None) is None
    for how, value, said in (
        ("done", blind._Verdict(how="forward (plain)"), "forward (plain)"),
        ("raised", "Traceback\nValueError: no", "failed while it ran: ValueError: no"),
        ("did not finish", "exit -24", "did not finish: exit -24"),
    ):
        mutant = judged(how, value)
        assert mutant is not None
        assert mutant.detected
        assert mutant.how == said
    survivor = judged("done", blind._Verdict(how="", passed=("plain",)))
    assert survivor is not None
    assert not survivor.detected
    assert not survivor.explained


def result(**changes: Any) -> outcome.Outcome:
    fault = Planted(
        kind="norm eps", base="twins", place="a.norm", number=0, detected=True, located=True, named=True, rung="forward"
    )
    faults = [dataclasses.replace(fault, kind=kind.name) for kind in KINDS]
    mutant = blind.Mutant(mutation=MUTATION, detected=True, how="forward (plain)")
    fields: dict[str, Any] = {
        "quick": False,
        "seed": 0,
        "workers": 2,
        "planted": faults,
        "beyond": [dataclasses.replace(fault, kind="softmax in bfloat16", detected=False)],
        "mutants": [mutant] * outcome.BLIND_GOAL,
        "unreached": [MUTATION],
        "candidates": 900,
        "clean": [clean.Clean(seed=i, description="", passed=True) for i in range(outcome.CLEAN_GOAL)],
        "seconds": 12.0,
    }
    return outcome.Outcome(**(fields | changes))


def test_the_goals_are_met_by_a_perfect_result_only() -> None:
    good = result()
    assert good.passed
    missed = [dataclasses.replace(good.planted[0], detected=False, located=False, named=False), *good.planted[1:]]
    survivor = dataclasses.replace(good.mutants[0], detected=False, how="")
    alarm = clean.Clean(seed=7, description="", passed=False, failures=("forward: x",))
    vague = [dataclasses.replace(p, named=i % 5 > 0) for i, p in enumerate(good.planted)]
    elsewhere = [dataclasses.replace(p, located=i % 10 > 0) for i, p in enumerate(good.planted)]
    for changes in (
        {"planted": missed},
        {"planted": vague},
        {"planted": elsewhere},
        {"planted": good.planted[:39]},
        {"planted": []},
        {"mutants": [survivor, *good.mutants[1:]]},
        {"mutants": good.mutants[1:]},
        {"clean": [alarm, *good.clean[1:]]},
        {"clean": good.clean[1:]},
        {"quick": True, "mutants": []},
        {"quick": True, "clean": []},
    ):
        assert not result(**changes).passed, changes
    assert result(mutants=[dataclasses.replace(survivor, argument="why"), *good.mutants[1:]]).passed


def test_json_table_and_markdown() -> None:
    survivor = blind.Mutant(mutation=MUTATION, detected=False, how="", argument="it is the same")
    found = result(mutants=[survivor] * 200)
    values = json.loads(json.dumps(found.to_json()))
    counts = {"kinds", "planted", "detected", "located", "named", "blind", "blind_survivors", "clean", "false_alarms"}
    assert counts <= values.keys()
    assert values["blind_survivors"] == 200
    assert values["blind_unexplained"] == 0
    text = page(values)
    assert all(f"| {kind.name} |" in text for kind in KINDS)
    assert "it is the same" in text
    assert "| softmax in bfloat16 | a.norm | no | over so few keys" in text
    out = StringIO()
    terminal.show(found, console=Console(file=out, width=160))
    assert "norm eps" in out.getvalue()
    assert "code that no check executes" in out.getvalue()
    assert "not counted: softmax in bfloat16" in out.getvalue()


def test_no_worker_is_an_error() -> None:
    with pytest.raises(ValueError, match="--workers: expected at least 1, got 0"):
        selftest.run(quick=True, json_file=None, markdown=None, seed=0, workers=0)
