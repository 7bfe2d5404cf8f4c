"""What the inventory says without a run: hyper-parameters and parameters that differ."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from parity.compare import Comparison
from parity.diagnose.attention import NUM_HEADS
from parity.diagnose.between import ACTIVATION, GELU, NORM_EXTRA, NORM_ORDER
from parity.diagnose.convolution import DILATION, PADDING, STRIDE
from parity.diagnose.diagnosis import Diagnosis, kind
from parity.diagnose.group_norm import GROUPS
from parity.diagnose.linear import BIAS
from parity.diagnose.loss import SMOOTHING
from parity.diagnose.masks import LOOK_AHEAD_MISSING as LOOK_AHEAD
from parity.diagnose.masks import WINDOW
from parity.diagnose.norm import EPS, is_norm
from parity.diagnose.norm import MISSING as NORM_MISSING
from parity.diagnose.positions import DIVISOR, LAYOUT, OFFSET
from parity.diagnose.rotary import BASE as ROTARY_BASE

MOMENTUM = kind(
    "momentum convention", "running statistics: torch's momentum is the share of the new, Flax's of the old"
)
DROPOUT_RATE = kind("dropout rate", "another rate of dropout")
TRAINED = kind("trained on one side only", "a buffer on one side, a trained parameter on the other")
EXTRA = kind("parameter extra", "a parameter that only the port has")
MISSING = kind("parameter missing", "a parameter that only the reference has")
SHAPE = kind("parameter shape", "a parameter of another shape")
TIED = kind("tied on one side only", "one tensor on one side, two on the other")
AMBIGUOUS = kind("mapping ambiguous", "a tensor that two rules take, or that is given twice")
SETTING = kind("setting", "another hyper-parameter, read off the modules")

Shapes = Mapping[str, tuple[int, ...]]

KINDS: Mapping[str, str] = {
    "eps": EPS,
    "momentum": MOMENTUM,
    "dropout rate": DROPOUT_RATE,
    "activation": ACTIVATION,
    "strides": STRIDE,
    "padding": PADDING,
    "padding mode": PADDING,
    "dilation": DILATION,
    "num_heads": NUM_HEADS,
    "norm_order": NORM_ORDER,
    "norm_first": NORM_ORDER,
    "positions": LAYOUT,
    "position_offset": OFFSET,
    "window": WINDOW,
    "tie_embeddings": TIED,
    "use_bias": BIAS,
    "bias": BIAS,
    "negative_slope": ACTIVATION,
    "rope_theta": ROTARY_BASE,
    "causal": LOOK_AHEAD,
    "is_causal": LOOK_AHEAD,
    "label_smoothing": SMOOTHING,
    "groups": GROUPS,
}
"""Names of settings in the harness's vocabulary, and in wide use."""
FIXES = {
    "eps": "epsilon={}",
    "momentum": "momentum={}",
    "dropout rate": "rate={}",
    "strides": "strides={}",
    "num_heads": "num_heads={}",
}


def explain_inventory(failures: Sequence[Comparison], shapes: Shapes = MappingProxyType({})) -> Diagnosis | None:
    """What is on one side only, first; else a `module: setting` with `reference X, port Y`.

    `shapes`: of every tensor of either side, by its full name.
    """
    for failure in failures:
        found = _parameter(failure, shapes)
        if found is not None:
            return found
    for failure in failures:
        found = _setting(failure)
        if found is not None:
            return found
    return None


def _setting(failure: Comparison) -> Diagnosis | None:
    module, colon, setting = failure.tensor.rpartition(": ")
    values = re.search(r"reference (.*?), (?:the )?port (.*)$", failure.detail)
    if not colon or values is None:
        return None
    reference, port = values.groups()
    setting = setting.rpartition(".")[2]
    name = KINDS.get(setting, SETTING)
    if name == LAYOUT and "half" in reference + port:
        name = DIVISOR
    if name == ACTIVATION and "gelu" in reference and "gelu" in port:
        name = GELU
    sentence = f"The port's {setting} of {module or 'the model'} is {port}, the reference's {reference}"
    fix = FIXES.get(setting, f"{setting} = {{}}").format(reference)
    if setting == "momentum":
        fix = f"momentum={_other_share(reference)}: Flax's is the share of the old statistics, torch's of the new"
    return Diagnosis(kind=name, module=module, sentence=sentence, fix=fix)


def _other_share(value: str) -> str:
    try:
        return f"{1.0 - float(value):g}" if float(value) < 0.5 else value
    except ValueError:
        return value


def _parameter(failure: Comparison, shapes: Shapes) -> Diagnosis | None:
    """Something that is on one side only, trained on one side only, or of another shape."""
    name, detail = failure.tensor, failure.detail
    path = name.rpartition(".")[0]
    module = name if "has it:" in detail else path or name
    side = next((side for side, words in ONE_SIDED.items() if detail.startswith(words)), "")
    if side:
        return _one_sided(module, name, side, shapes)
    fix = "give each tensor one rule, one place and the reference's shape"
    if detail.startswith("shape of"):
        return Diagnosis(kind=SHAPE, module=module, sentence=detail, fix=fix)
    if "taken by more than one rule" in detail or "is given twice" in detail or detail.startswith("ambiguous"):
        return Diagnosis(kind=AMBIGUOUS, module=name, sentence=detail, fix=fix)
    return _trained(name, detail) if " trained in " in detail else None


ONE_SIDED: Mapping[str, tuple[str, ...]] = {
    "port": ("only the port", "missing"),
    "reference": ("only the reference", "unexpected", "unused"),
}
"""How a line of the inventory begins that says which side alone has something."""


def _one_sided(module: str, name: str, side: str, shapes: Shapes) -> Diagnosis:
    if _is_table(module, shapes):
        return _tied(module, name, f"the {side}")
    if name.endswith(".bias") and side == "reference" and not is_norm(module):
        fix = f"use_bias=True in {module}"
        return Diagnosis(kind=BIAS, module=module, sentence=f"The port's {module} has no bias", fix=fix)
    if side == "port":
        called = NORM_EXTRA if is_norm(module) else EXTRA
        return Diagnosis(kind=called, module=module, sentence=f"Only the port has {name}", fix=f"remove {module}")
    called = NORM_MISSING if is_norm(module) else MISSING
    return Diagnosis(kind=called, module=module, sentence=f"The port has nothing for {name}", fix=f"add {module}")


def _is_table(name: str, shapes: Shapes) -> bool:
    """Whether a tensor of one side only has the shape of an embedding, or of its transpose: then that one is tied."""
    tensors = [shape for full, shape in shapes.items() if full == name or full.startswith(name + ".")]
    tables = {shape for full, shape in shapes.items() if len(shape) == 2 and "embed" in full.lower()}
    tables -= set(tensors) if "embed" in name.lower() else set()
    return any(len(shape) == 2 and (shape in tables or shape[::-1] in tables) for shape in tensors)


def _tied(module: str, name: str, side: str) -> Diagnosis:
    sentence = f"Only {side} has {name}, of the shape of an embedding: on the other side it is that embedding"
    fix = "use the embedding's own parameter" if side == "the port" else f"give the port {module} of its own"
    return Diagnosis(kind=TIED, module=module, sentence=sentence, fix=fix)


def _trained(name: str, detail: str) -> Diagnosis:
    fix = "make it an nnx.Param where the reference trains it, and no nnx.Param where it does not"
    return Diagnosis(kind=TRAINED, module=name, sentence=detail, fix=fix)
