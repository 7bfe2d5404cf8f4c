"""What can be read off a model without running it: the type, the tensors and the settings of every module.

Facts are plain data, so that a golden file can hold them: what is derived from them needs no torch.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

Setting = bool | int | float | str | None | tuple["Setting", ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """One parameter or buffer."""

    shape: tuple[int, ...]
    dtype: str
    trained: bool
    """Whether an optimizer changes it."""
    same_as: str = ""
    """Full name under which the same tensor was met first: a tied one has two names."""
    settable: bool = True
    """Whether a weight can be loaded into it; False for a plain array of an nnx.Module."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """One module."""

    type: str
    """The class's name; `bases` are those of the classes it inherits from, nearest first."""
    bases: tuple[str, ...] = ()
    layer: str = ""
    """The framework's own class that it is, or is a subclass of: `Linear`. Empty for users' own modules."""
    tensors: Mapping[str, TensorFacts] = dataclasses.field(default_factory=dict)
    """Its own, by attribute name; not those of its submodules."""
    settings: Mapping[str, Setting] = dataclasses.field(default_factory=dict)
    """Hyper-parameters in the vocabulary that both frameworks share: `eps`, `activation`, `dropout rate`, ..."""
    same_as: str = ""
    """Path under which the same module was met first."""


Facts = Mapping[str, ModuleFacts]
"""By dotted path; the model itself under the empty path."""

SYNONYMS = {
    "epsilon": "eps",
    "layer_norm_eps": "eps",
    "norm_eps": "eps",
    "p": "dropout rate",
    "rate": "dropout rate",
    "dropout": "dropout rate",
    "dropout_p": "dropout rate",
    "dropout_rate": "dropout rate",
    "drop_rate": "dropout rate",
    "act": "activation",
    "act_fn": "activation",
    "activation_fn": "activation",
    "hidden_act": "activation",
    "nonlinearity": "activation",
    "n_head": "num_heads",
    "n_heads": "num_heads",
    "nhead": "num_heads",
    "kernel_size": "kernel size",
    "stride": "strides",
    "num_groups": "groups",
    "in_features": "in features",
    "out_features": "features",
}
"""Attribute names of users' own modules -> the shared vocabulary."""

NOT_SETTINGS = frozenset(
    (
        *("training", "deterministic", "use_running_average", "decode", "dtype", "param_dtype", "compute_dtype"),
        *("device", "precision", "backend", "implementation", "remat", "gradient_checkpointing", "name"),
        *("call_super_init", "dump_patches"),
    )
)
"""Attributes that say how a module runs, not what it computes."""


def setting_name(attribute: str) -> str:
    """The shared name for an attribute of a user's own module."""
    return SYNONYMS.get(attribute, attribute)


def plain_settings(attributes: Mapping[str, Any], *, prefix: str = "") -> dict[str, Setting]:
    """Attributes whose value is a number, a word, a truth value or a tuple of such, and the fields of dataclasses.

    Two attributes with one shared name keep their own.
    """
    settings: dict[str, Setting] = {}
    named = [(attribute, setting_name(attribute)) for attribute in attributes]
    for attribute, name in named:
        if attribute.startswith("_") or attribute in NOT_SETTINGS:
            continue
        key = prefix + (name if [n for _, n in named].count(name) == 1 else attribute)
        value = attributes[attribute]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            settings |= plain_settings(fields, prefix=f"{prefix}{attribute}.")
        elif is_plain(value):
            settings[key] = tuple(value) if isinstance(value, list) else value
    return settings


def is_plain(value: Any) -> bool:
    """Whether a value is fit for a setting."""
    if isinstance(value, (tuple, list)):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def to_json(facts: Facts) -> dict[str, Any]:
    """As dicts, lists, numbers and words."""
    return {path: dataclasses.asdict(module) for path, module in facts.items()}


def from_json(data: Mapping[str, Any]) -> dict[str, ModuleFacts]:
    """The inverse of `to_json`. Raises TypeError on fields that it does not know."""
    return {
        path: ModuleFacts(
            **{
                **module,
                "bases": tuple(module["bases"]),
                "tensors": {
                    name: TensorFacts(**{**tensor, "shape": tuple(tensor["shape"])})
                    for name, tensor in module["tensors"].items()
                },
                "settings": {name: _tuples(value) for name, value in module["settings"].items()},
            }
        )
        for path, module in data.items()
    }


def join(path: str, name: str) -> str:
    """`path.name`, or `name` in the model itself."""
    return f"{path}.{name}" if path else name


def parent(path: str) -> str:
    """`a.b.c` -> `a.b`; the model itself for `a`."""
    return path.rpartition(".")[0]


def tensor_names(facts: Facts) -> dict[str, TensorFacts]:
    """Full names of all tensors, second names of tied ones too."""
    return {join(path, name): t for path, module in facts.items() for name, t in module.tensors.items()}


def _tuples(value: Any) -> Setting:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value
