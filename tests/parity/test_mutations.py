"""Plantings really change a pair, at places that exist; blind mutations are what they say, and reproducible."""

import ast
import dataclasses
import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from flax import nnx

from parity.mutations import KINDS, Kind, plantings, source, syntax
from parity.mutations.generic import PORTS
from parity.mutations.planting import at, override
from parity.pair import Pair
from parity.selftest.bases import CONFIGS, base_pair

BASES = (*CONFIGS, *PORTS)


@functools.cache
def base(name: str) -> Pair:
    """The pair of the selftest, whose port is built once, and then copied."""
    pair = base_pair(name)
    graphdef, state = nnx.split(pair.port.module("float32"))

    def build(precision: str) -> Any:
        return nnx.merge(graphdef, state)

    return dataclasses.replace(pair, port=dataclasses.replace(pair.port, build=build))


def appearance(pair: Pair) -> dict[str, Any]:
    """Whatever of a pair a fault may change."""
    seen: dict[str, Any] = {f.name: getattr(pair.port, f.name) for f in dataclasses.fields(pair.port)}
    del seen["build"]
    seen["mapping"] = [(rule.source, rule.target, [type(op) for op in rule.ops]) for rule in pair.mapping.rules]
    for path, module in nnx.iter_modules(pair.port.module("float32")):
        simple = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, tuple)) or v is None}
        seen[str(path)] = (
            {
                name: value
                for cls in reversed(type(module).__mro__)
                for name, value in vars(cls).items()
                if callable(value)
            },
            simple,
            {name: type(value) for name, value in vars(module).items()},
            getattr(module, "config", None),
        )
    return seen


def test_names_are_unique_and_many() -> None:
    assert max(Counter(kind.name for kind in KINDS).values()) == 1
    assert len(KINDS) >= 40
    cases = {case for kind in KINDS for case in kind.cases}
    # P18 and P23 are faults of a reference and of a harness: they are not planted in a port.
    assert cases >= {f"P{n}" for n in (*range(1, 18), 19, 20, 21, 22, 24, 25, 26)}


@pytest.mark.parametrize("name", BASES)
def test_every_planting_changes_the_port(name: str) -> None:
    before = appearance(base(name))
    for kind in (kind for kind in KINDS if kind.base == name):
        planting = plantings(kind, base(name))[-1]
        faulty = planting.pair(base(name))
        assert str(planting) in faulty.name
        assert planting.shows
        assert appearance(faulty) != before, f"{planting} changes nothing"
    assert appearance(base(name)) == before, "the base was changed"


def test_a_kind_is_planted_at_the_first_a_middle_and_the_last_place() -> None:
    kind = next(kind for kind in KINDS if kind.name == "norm unbiased variance")
    places = [planting.place for planting in plantings(kind, base("twins"))]
    assert len(places) == 3
    assert all("norm" in place for place in places)


def test_a_kind_without_a_place_is_an_error() -> None:
    kind = Kind(name="nowhere", description="", places=lambda pair: [], plant=lambda pair, place: pair)
    with pytest.raises(ValueError, match=r"nowhere: expected a place for it in recurrent"):
        plantings(kind, base("recurrent"))


def test_only_one_module_gets_another_method() -> None:
    model = base("decoder-only").port.module("float32")
    first, second = at(model, "blocks.0.norm1"), at(model, "blocks.1.norm1")
    override(first, "__call__", lambda original: lambda self, x: 2 * original(self, x))
    assert type(first).__name__ == type(second).__name__ == "RMSNorm"
    assert type(first) is not type(second)
    assert isinstance(first, type(second))


SOURCE = '''"""Docstring 1."""
from math import sqrt

def f(x: int = 3, *, axis: int = 2) -> "Array[4]":
    """Docstring 5."""
    if x < 6:
        raise ValueError(f"expected 7, got {x - 8}")
    y = g(x, axis=-1) + x[1:]
    return y if x is None else not y
'''


def test_mutations_leave_docstrings_annotations_and_messages_alone() -> None:
    found = syntax.mutations(SOURCE, file="a.py")
    changed = [syntax.mutated(SOURCE, mutation) for mutation in found]
    assert len(set(changed)) == len(found)
    for text in changed:
        assert all(kept in text for kept in ("Docstring 1.", "Array[4]", "Docstring 5.", "expected 7", "x - 8"))
        ast.parse(text)


def test_every_operator_is_found() -> None:
    seen = {(m.operator, m.before, m.after) for m in syntax.mutations(SOURCE, file="a.py")}
    call = "g(x, axis=-1)"
    for expected in (
        ("comparison", "x < 6", "x <= 6"),
        ("comparison", "x < 6", "x >= 6"),
        ("constant", "6", "7"),
        ("constant", "3", "2"),
        ("argument", call, "g(x)"),
        ("omitted call", call, "(lambda x, *_, **__: x)(x)"),
        ("sign", "-1", "+1"),
        ("operator", f"{call} + x[1:]", f"{call} - x[1:]"),
        ("slice", "1:", ":"),
        ("omitted line", f"y = {call} + x[1:]", syntax.OMITTED),
        ("branch", "y if x is None else not y", "not y if x is None else y"),
        ("comparison", "x is None", "x is not None"),
        ("sign", "not y", "+y"),
    ):
        assert expected in seen


def test_a_mutation_knows_its_line_and_function() -> None:
    (mutation,) = [m for m in syntax.mutations(SOURCE, file="a.py") if m.before == "6" and m.after == "7"]
    assert (mutation.file, mutation.function, mutation.line) == ("a.py", "f", 6)


def test_a_mutation_of_another_source_is_refused() -> None:
    (mutation,) = [m for m in syntax.mutations(SOURCE, file="a.py") if m.before == "6" and m.after == "7"]
    with pytest.raises(ValueError, match=r"expected '6' in a\.py"):
        syntax.mutated(SOURCE.replace("6", "9"), mutation)


def test_a_sample_is_decided_by_its_seed_and_mixes_operators() -> None:
    every = [
        mutation
        for file, path in source.files_of("flax_transformer").items()
        for mutation in syntax.mutations(path.read_text(encoding="utf-8"), file=file)
    ]
    assert len(every) > 1000
    chosen = syntax.sample(every, 40, seed=3)
    assert chosen == syntax.sample(every, 40, seed=3)
    assert chosen != syntax.sample(every, 40, seed=4)
    assert len(set(chosen)) == 40
    assert max(Counter(mutation.operator for mutation in chosen).values()) <= 4
    assert len(syntax.sample(every[:5], 40, seed=3)) == 5


def test_changed_source_is_what_is_imported(tmp_path: Path) -> None:
    package = tmp_path / "somewhere"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("VALUE = 1\n")
    script = (
        "from parity.mutations import source\n"
        "source.install('somewhere', 'inner.py', 'VALUE = 2')\n"
        "import somewhere.inner\n"
        "assert somewhere.inner.VALUE == 2\n"
        "try:\n    source.install('somewhere', 'inner.py', 'VALUE = 3')\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    paths = [str(tmp_path), str(Path(__file__).parents[2])]
    script = f"import sys\nsys.path[:0] = {paths}\n" + script
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "not to be imported yet" in done.stdout


def test_what_is_executed_is_seen_by_branch_and_by_folded_constant() -> None:
    text = "def f(x):\n    if x:\n        return 1\n    return g(-2) if x is None else h(x, -3, 4)\n"
    namespace: dict[str, Any] = {"h": lambda *numbers: sum(numbers)}
    exec(compile(text, "/nowhere/a.py", "exec"), namespace)
    executed = source.Executed({"a.py": Path("/nowhere/a.py")})
    assert executed.during(lambda: namespace["f"](0)) == 1
    places = source.by_line(executed.places["a.py"])
    reached = {
        (m.before, m.after)
        for m in syntax.mutations(text, file="a.py")
        if source.reaches(places, source.Place(m.line, m.column, m.last, m.last_column, constant=False))
    }
    assert {("3", "4"), ("4", "5"), ("-3", "+3"), ("x is None", "x is not None")} <= reached
    assert not {("1", "2"), ("return 1", syntax.OMITTED), ("2", "3"), ("-2", "+2")} & reached
