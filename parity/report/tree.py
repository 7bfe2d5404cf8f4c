"""The tree of modules in the terminal: those that differ, what they stand in, and how many equal ones beside them."""

from collections.abc import Sequence
from typing import Any, Protocol

from rich.text import Text
from rich.tree import Tree


class Node(Protocol):
    """One module: what a report needs of it."""

    path: str
    """Dotted; empty for the model itself."""
    depth: int
    type: str
    status: Any
    """In words; `equal` is what need not be shown one by one."""
    error: float | None


EQUAL = "equal"
STYLES = {EQUAL: "green", "first": "bold red", "differs": "red"}


def drawn(nodes: Sequence[Node]) -> Tree:
    """Nodes come in the order of a walk, each after the module it stands in. Equal ones are counted, not listed."""
    wanted = _interesting(nodes)
    root = Tree(Text("modules", style="dim"), guide_style="dim")
    stack: list[tuple[int, Tree]] = [(-1, root)]
    hidden: dict[int, int] = {}  # by id of the branch that they would hang on
    branches: dict[int, Tree] = {}
    for node in nodes:
        while stack[-1][0] >= node.depth:
            stack.pop()
        parent = stack[-1][1]
        if node.path not in wanted:
            # Below a module that is left out too, it is counted where that one is.
            hidden[id(parent)] = hidden.get(id(parent), 0) + 1
            branches[id(parent)] = parent
            continue
        stack.append((node.depth, parent.add(_label(node))))
    for key, count in hidden.items():
        branches[key].add(Text(f"{count} equal", style="dim green"))
    return root


def _interesting(nodes: Sequence[Node]) -> set[str]:
    wanted: set[str] = set()
    for node in nodes:
        if str(node.status) == EQUAL:
            continue
        path = node.path
        while path:
            wanted.add(path)
            path = path.rpartition(".")[0]
        wanted.add("")
    return wanted


def _label(node: Node) -> Text:
    status = str(node.status)
    error = "" if node.error is None else f"  {node.error:.1e}"
    name = node.path.rpartition(".")[2] or "the model"
    return Text.assemble(
        (name, STYLES.get(status, "")), (f"  {node.type}", "dim"), (f"  {status}", STYLES.get(status, "yellow")), error
    )
