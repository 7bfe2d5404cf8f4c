"""The tree of modules in the terminal: those that differ, what they stand in, and how many others beside them."""

from collections import Counter
from collections.abc import Sequence

from rich.text import Text
from rich.tree import Tree

from parity.tree import Node

STYLES = {"first difference": "bold red", "differs": "red"}
"""Of modules that are shown one by one."""


def drawn(nodes: Sequence[Node]) -> Tree:
    """Nodes come in the order of a walk, each after the module it stands in. Equal ones are counted, not listed."""
    wanted = _wanted(nodes)
    root = Tree(Text("modules", style="dim"), guide_style="dim")
    stack: list[tuple[int, Tree]] = [(-1, root)]
    counted: dict[int, tuple[Tree, Counter[str]]] = {}
    for node in nodes:
        while stack[-1][0] >= node.depth:
            stack.pop()
        branch = stack[-1][1]
        if node.path in wanted:
            stack.append((node.depth, branch.add(_label(node))))
        else:
            # One that stands in a module that is left out is counted where that one is.
            counted.setdefault(id(branch), (branch, Counter()))[1][node.status] += 1
    for branch, counts in counted.values():
        branch.add(Text(", ".join(f"{count} {status}" for status, count in counts.items()), style="dim"))
    return root


def _wanted(nodes: Sequence[Node]) -> set[str]:
    """Paths of what differs, and of all that it stands in."""
    wanted = {""}
    for node in nodes:
        path = node.path if node.status in STYLES else ""
        while path:
            wanted.add(path)
            path = path.rpartition(".")[0]
    return wanted


def _label(node: Node) -> Text:
    style = STYLES.get(node.status, "")
    error = "" if node.error is None else f"  {node.error:.1e}"
    return Text.assemble(
        (node.name or "the model", style),
        (f"  {node.type}" if node.type else "", "dim"),
        (f"  {node.status}", style or "dim"),
        (error, style or "dim"),
    )
