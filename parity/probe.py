"""Single modules on both sides, each given the same few arrays: what well-behaved inputs hide, these show.

Probed are modules without submodules that were given one floating-point array of the same shape on both sides, and
returned one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from parity.compilation import jit
from parity.pair import Precision
from parity.runs import Runs
from parity.trace import Trace, module_of

Probes = Mapping[str, Mapping[str, np.ndarray]]
"""{module: {kind of probe: array}}; answers have the same keys."""


def candidates(runs: Runs) -> list[str]:
    """Paths of the modules that can be probed, by the reference's names."""
    reference, port = runs.reference("float64"), runs.port("float64")
    parents = {path.rpartition(".")[0] for path in runs.reference_facts}
    parents |= {runs.derived.modules.get(path, path).rpartition(".")[0] for path in runs.port_facts}
    shapes = [{n: a.shape for n, a in trace.given.items()} for trace in (reference, port)]
    return [
        name
        for name in runs.comparable(reference, port) & shapes[0].keys()
        if name == module_of(name)
        and name not in parents
        and shapes[0][name] == shapes[1].get(name)
        and not any(_given_more(trace, name) for trace in (reference, port))
    ]


def _given_more(trace: Trace, name: str) -> bool:
    return any(module_of(other) == name for other in trace.given_ids) or name not in trace.outputs


def probe_reference(runs: Runs, probes: Probes, precision: Precision) -> dict[str, dict[str, np.ndarray]]:
    """What the reference's modules return. A module that cannot take a probe is left out."""
    import torch

    from parity.capture_torch import load_reference, to_numpy

    module = runs.live_reference().module(precision)
    load_reference(module, runs.weights, precision=precision)
    answers: dict[str, dict[str, np.ndarray]] = {}
    for name, kinds in probes.items():
        submodule = module.get_submodule(name)
        try:
            with torch.no_grad():
                answers[name] = {
                    kind: to_numpy(submodule(torch.from_numpy(array).to(getattr(torch, precision))))
                    for kind, array in kinds.items()
                }
        except (RuntimeError, ValueError, TypeError, IndexError):
            continue
    return answers


def probe_port(
    runs: Runs, names: Iterable[str], probes: Probes, precision: Precision
) -> dict[str, dict[str, np.ndarray]]:
    """What the port's modules of these names (the reference's) return: in one compiled function."""
    runner = runs.port_runner(precision)
    paths = {runs.derived.modules.get(path, path): path for path in runs.port_facts}

    def run(arrays: dict[str, jax.Array], given: dict[str, dict[str, jax.Array]]) -> Any:
        model = runner.merged(arrays)
        return {
            name: {kind: submodule(model, paths[name])(array) for kind, array in kinds.items()}
            for name, kinds in given.items()
        }

    with runner.numerics():
        given = {name: runner.inputs(probes[name]) for name in names}
        returned = jit(run)(runner.cast(runs.port_weights), given)
        return jax.tree.map(np.asarray, returned)


def submodule(model: Any, path: str) -> Any:
    """`layers.0.norm` of an nnx.Module: attributes, items of lists and keys of dicts."""
    for part in path.split("."):
        model = model[int(part)] if part.isdecimal() else getattr(model, part, None) or model[part]
    return model
