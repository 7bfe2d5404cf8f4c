"""What can be read off a model without running it: the type, the tensors and the settings of every module."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """One parameter or buffer."""

    shape: tuple[int, ...]
    dtype: str
    trained: bool
    """Whether an optimizer changes it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """One module."""

    type: str
    """The class's name; `bases` are those of the classes it inherits from, nearest first."""
    bases: tuple[str, ...] = ()
    tensors: Mapping[str, TensorFacts] = dataclasses.field(default_factory=dict)
    """Its own, by attribute name; not those of its submodules."""
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Hyper-parameters in the vocabulary that both frameworks share: `eps`, `activation`, `dropout rate`, ..."""


Facts = Mapping[str, ModuleFacts]
"""By dotted path; the model itself under the empty path."""
