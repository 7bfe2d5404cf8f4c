"""Faults to plant: known kinds of porting bugs, and blind changes of source code. Shares nothing with parity.diagnose.

`KINDS` is every known kind; `plantings(kind, pair)` plants it at the first, a middle and the last place where it fits.
`syntax` changes a file without knowing what it means.
"""

from parity.mutations import (
    attention,
    dropout,
    embeddings,
    generic_kinds,
    initial,
    layers,
    norms,
    running,
    tensors,
    training,
)
from parity.mutations.planting import Kind, Planting, plantings

KINDS: tuple[Kind, ...] = (
    *norms.KINDS,
    *attention.KINDS,
    *layers.KINDS,
    *embeddings.KINDS,
    *tensors.KINDS,
    *dropout.KINDS,
    *training.KINDS,
    *initial.KINDS,
    *running.KINDS,
    *generic_kinds.KINDS,
)

__all__ = ["KINDS", "Kind", "Planting", "plantings"]
