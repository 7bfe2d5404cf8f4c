"""The tree of modules, with the first that differs marked."""

from parity import ladder
from tests.parity.residual_blocks import norm_eps, pair


def test_the_tree_of_a_pair_that_differs() -> None:
    report = ladder.check(pair(norm_eps(1)), rungs=("weights", "forward"))
    by_path = {node.path: node for node in report.tree}
    assert by_path["blocks.0"].status == "equal"
    assert by_path["blocks.1.norm"].status == "first difference"
    assert by_path["blocks.1.down"].status == by_path["blocks.2"].status == by_path[""].status == "differs"
    assert by_path["blocks.1.norm"].depth == 3
    assert by_path["blocks.1.norm"].type == "LayerNorm"
    assert by_path["blocks.1"].type == "TorchBlock | Block"
    assert by_path["blocks.1.norm"].error is not None
    assert by_path["blocks.1.norm"].error > 1e-12
    paths = [node.path for node in report.tree]
    assert paths.index("blocks.1") < paths.index("blocks.1.norm") < paths.index("blocks.2")


def test_an_equal_pair_has_no_diagnosis_and_a_tree_that_is_equal() -> None:
    report = ladder.check(pair(), rungs=("inventory", "weights", "forward", "gradients"))
    assert report.passed
    assert report.first_difference is None
    assert report.diagnosis is None
    assert {node.status for node in report.tree} == {"equal", "not compared"}
    lists = [node.path for node in report.tree if node.status == "not compared"]
    assert lists == ["blocks"], "a list is called by nobody"
