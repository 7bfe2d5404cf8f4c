"""Blind mutations: small changes to the syntax tree of a file, made without knowing what it means.

Left alone are docstrings, annotations, imports, decorators and what is raised: messages. Conditions that guard a
`raise` are changed like any other.
"""

import ast
import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
COMPARED: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
AXES = frozenset({"axis", "axes"})
OMITTED = "(omitted)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutation:
    """One change of one file."""

    file: str
    """Its name within the package."""
    function: str
    """`Class.method`, or empty at the level of the module."""
    line: int
    """The first of what is changed; `last` is the last. Columns are in bytes."""
    column: int
    last: int
    last_column: int
    operator: str
    """`operator`, `comparison`, `constant`, `axis`, `boolean`, `argument`, `order`, `omitted line`, `omitted call`,
    `branch`, `sign` or `slice`."""
    before: str
    after: str
    number: int
    """Which change of the file it is, in the order of `mutations`."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.before} -> {self.after}"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What it is, wherever its line has moved."""
        return (self.file, self.function, self.before, self.after)


@dataclasses.dataclass(frozen=True)
class _Change:
    """New values for fields of `owner`; `node` is what it is about."""

    node: ast.AST
    operator: str
    owner: ast.AST
    fields: dict[str, Any]

    def apply(self) -> dict[str, Any]:
        """Changes the tree. Returns what stood there."""
        old = {name: getattr(self.owner, name) for name in self.fields}
        self.undo(self.fields)
        return old

    def undo(self, fields: dict[str, Any]) -> None:
        """Puts these values in place."""
        for name, value in fields.items():
            setattr(self.owner, name, value)

    @property
    def after(self) -> str:
        """The changed code; call it while it is."""
        return OMITTED if self.operator == "omitted line" else _shown(self.node)


def mutations(source: str, *, file: str) -> list[Mutation]:
    """Every change of this source, in the order of the tree."""
    found = []
    for number, (function, change) in enumerate(_changes(ast.parse(source))):
        before = _shown(change.node)
        old = change.apply()
        after = change.after
        change.undo(old)
        node: Any = change.node
        if after != before:
            found.append(
                Mutation(
                    file=file,
                    function=function,
                    line=node.lineno,
                    column=node.col_offset,
                    last=node.end_lineno,
                    last_column=node.end_col_offset,
                    operator=change.operator,
                    before=before,
                    after=after,
                    number=number,
                )
            )
    return found


def mutated(source: str, mutation: Mutation) -> str:
    """The source with this change. Raises ValueError if the source is not the one that it was found in."""
    tree = ast.parse(source)
    for number, (_, change) in enumerate(_changes(tree)):
        if number == mutation.number:
            if _shown(change.node) != mutation.before:
                raise ValueError(f"expected {mutation.before!r} in {mutation.file}, got {_shown(change.node)!r}")
            change.apply()
            return ast.unparse(ast.fix_missing_locations(tree))
    raise ValueError(f"expected {mutation.number + 1} changes in {mutation.file}, got fewer")


def sample(every: Iterable[Mutation], count: int, *, seed: int) -> list[Mutation]:
    """`count` of them, or all: kinds of change in turn, so that the many constants do not crowd out the few axes."""
    by_operator: dict[str, list[Mutation]] = {}
    for mutation in every:
        by_operator.setdefault(mutation.operator, []).append(mutation)
    rng = random.Random(seed)
    piles = [by_operator[name] for name in sorted(by_operator)]
    for pile in piles:
        rng.shuffle(pile)
    chosen: list[Mutation] = []
    while len(chosen) < count and any(piles):
        for pile in piles:
            if pile and len(chosen) < count:
                chosen.append(pile.pop())
    return chosen


def _shown(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())


def _changes(tree: ast.Module) -> Iterator[tuple[str, _Change]]:
    """(function, change), none of them made."""
    for function, parent, node in _walk(tree, ""):
        for change in _of_node(parent, node):
            yield function, change


def _walk(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """(function, parent, node) of all that may be changed."""
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for child in children:
            if not isinstance(child, ast.AST) or _left_alone(name, child):
                continue
            inside = function
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inside = f"{function}.{child.name}" if function else child.name
            yield inside, node, child
            yield from _walk(child, inside)


def _left_alone(field: str, node: ast.AST) -> bool:
    if field in ("annotation", "returns", "decorator_list", "bases", "op", "ops", "ctx"):
        return True
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Raise)):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _of_node(parent: ast.AST, node: ast.AST) -> Iterator[_Change]:
    for kind, changes in _CHANGES.items():
        if isinstance(node, kind):
            yield from changes(parent, node)


def _of_operation(parent: ast.AST, node: Any) -> Iterator[_Change]:
    if type(node.op) in SWAPPED:
        operator = "boolean" if isinstance(node, ast.BoolOp) else "operator"
        yield _set(node, operator, "op", SWAPPED[type(node.op)]())


def _of_comparison(parent: ast.AST, node: Any) -> Iterator[_Change]:
    for other in COMPARED.get(type(node.ops[0]), ()):
        yield _set(node, "comparison", "ops", [other(), *node.ops[1:]])


def _of_sign(parent: ast.AST, node: Any) -> Iterator[_Change]:
    if not isinstance(node.op, ast.UAdd):
        yield _set(node, "sign", "op", ast.UAdd())


def _of_branch(parent: ast.AST, node: Any) -> Iterator[_Change]:
    if isinstance(node, ast.IfExp):
        yield _set_all(node, "branch", body=node.orelse, orelse=node.body)
    else:
        for value in (True, False):
            yield _set(node, "branch", "test", ast.Constant(value))


def _of_slice(parent: ast.AST, node: Any) -> Iterator[_Change]:
    for bound in ("lower", "upper"):
        if getattr(node, bound) is not None:
            yield _set(node, "slice", bound, None)


def _of_constant(parent: ast.AST, node: Any) -> Iterator[_Change]:
    value = node.value
    operator = "axis" if isinstance(parent, ast.keyword) and parent.arg in AXES else "constant"
    if isinstance(value, bool):
        yield _set(node, "boolean", "value", not value)
    elif isinstance(value, int):
        for other in dict.fromkeys((value + 1, value - 1)):
            yield _set(node, operator, "value", other)
    elif isinstance(value, float):
        for changed in dict.fromkeys((value * 2, value + 1.0, -value)):
            if changed != value:
                yield _set(node, operator, "value", changed)


def _of_call(parent: ast.AST, node: Any) -> Iterator[_Change]:
    for keyword in node.keywords:
        yield _set(node, "argument", "keywords", [other for other in node.keywords if other is not keyword])
    for i in range(len(node.args) - 1):
        swapped = list(node.args)
        swapped[i], swapped[i + 1] = swapped[i + 1], swapped[i]
        yield _set(node, "order", "args", swapped)
    if node.args and not isinstance(node.args[0], (ast.Starred, ast.GeneratorExp)):
        # f(x, ...) -> (lambda x, *_, **__: x)(x): another node cannot stand in this one's place.
        first = node.args[0]
        identity = ast.Lambda(
            args=ast.arguments(
                posonlyargs=[],
                args=[ast.arg("x")],
                vararg=ast.arg("_"),
                kwonlyargs=[],
                kw_defaults=[],
                kwarg=ast.arg("__"),
                defaults=[],
            ),
            body=ast.Name("x", ast.Load()),
        )
        yield _set_all(node, "omitted call", func=identity, args=[first], keywords=[])


def _omitted(parent: ast.AST, node: Any) -> Iterator[_Change]:
    if isinstance(parent, ast.Module):
        return
    for field in ("body", "orelse"):
        block = getattr(parent, field, None)
        if isinstance(block, list) and node in block:
            rest = [ast.copy_location(ast.Pass(), node) if other is node else other for other in block]
            yield _Change(node, "omitted line", parent, {field: rest})


def _set(node: ast.AST, operator: str, field: str, value: Any) -> _Change:
    return _set_all(node, operator, **{field: value})


def _set_all(node: ast.AST, operator: str, **fields: Any) -> _Change:
    return _Change(node, operator, node, fields)


_CHANGES: dict[Any, Callable[[ast.AST, Any], Iterator[_Change]]] = {
    (ast.BinOp, ast.BoolOp, ast.AugAssign): _of_operation,
    ast.Compare: _of_comparison,
    ast.UnaryOp: _of_sign,
    ast.Constant: _of_constant,
    (ast.IfExp, ast.If): _of_branch,
    ast.Call: _of_call,
    ast.Slice: _of_slice,
    (ast.Assign, ast.AugAssign, ast.Return, ast.Expr): _omitted,
}
