"""What the inventory says without a run: hyper-parameters and parameters that differ."""

import re
from collections.abc import Mapping, Sequence

from parity.compare import Comparison
from parity.diagnose.attention import NUM_HEADS
from parity.diagnose.between import ACTIVATION, GELU, NORM_EXTRA
from parity.diagnose.convolution import DILATION, PADDING, STRIDE
from parity.diagnose.diagnosis import Diagnosis, kind
from parity.diagnose.norm import EPS, is_norm
from parity.diagnose.norm import MISSING as NORM_MISSING

MOMENTUM = kind(
    "momentum convention", "running statistics: torch's momentum is the share of the new, Flax's of the old"
)
DROPOUT_RATE = kind("dropout rate", "another rate of dropout")
TRAINED = kind("trained on one side only", "a buffer on one side, a trained parameter on the other")
EXTRA = kind("parameter extra", "a parameter that only the port has")
MISSING = kind("parameter missing", "a parameter that only the reference has")
SHAPE = kind("parameter shape", "a parameter of another shape")
TIED = kind("tied on one side only", "one tensor on one side, two on the other")
SETTING = kind("setting", "another hyper-parameter, read off the modules")

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
}
FIXES = {
    "eps": "epsilon={}",
    "momentum": "momentum={}",
    "dropout rate": "rate={}",
    "strides": "strides={}",
    "num_heads": "num_heads={}",
}


def explain_inventory(failures: Sequence[Comparison]) -> Diagnosis | None:
    """By the first that says `module: setting` with `reference X, port Y`; else by what is on one side only."""
    for failure in failures:
        found = _setting(failure)
        if found is not None:
            return found
    for failure in failures:
        found = _parameter(failure)
        if found is not None:
            return found
    return None


def _setting(failure: Comparison) -> Diagnosis | None:
    module, colon, setting = failure.tensor.rpartition(": ")
    values = re.search(r"reference (.*?), (?:the )?port (.*)$", failure.detail)
    if not colon or values is None:
        return None
    reference, port = values.groups()
    if setting == "trained" or {reference, port} & {"trained", "not trained"}:
        return _trained(module, reference, port)
    name = KINDS.get(setting, SETTING)
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


def _parameter(failure: Comparison) -> Diagnosis | None:
    """Something that is on one side only, trained on one side only, or of another shape."""
    name, detail = failure.tensor, failure.detail.lower()
    path = name.rpartition(".")[0]
    if "trained" in detail or "buffer" in detail:
        return Diagnosis(
            kind=TRAINED,
            module=name,
            sentence=f"{name}: {failure.detail}",
            fix="make it an nnx.Param where the reference trains it, and no nnx.Param where it does not",
        )
    if "only the port" in detail or "only in the port" in detail:
        called = NORM_EXTRA if is_norm(path) or is_norm(name) else EXTRA
        return Diagnosis(
            kind=called, module=path or name, sentence=f"Only the port has {name}", fix=f"remove {path or name}"
        )
    if "only the reference" in detail or "only in the reference" in detail:
        called = NORM_MISSING if is_norm(path) or is_norm(name) else MISSING
        return Diagnosis(
            kind=called, module=path or name, sentence=f"The port has nothing for {name}", fix=f"add {path or name}"
        )
    if "shape" in detail:
        return Diagnosis(
            kind=SHAPE, module=path or name, sentence=f"{name}: {failure.detail}", fix="give it the reference's shape"
        )
    if "tied" in detail or "same tensor" in detail:
        return Diagnosis(
            kind=TIED, module=path or name, sentence=f"{name}: {failure.detail}", fix="tie it as the reference does"
        )
    return None


def _trained(module: str, reference: str, port: str) -> Diagnosis:
    sentence = f"{module}: {reference} in the reference, {port} in the port"
    fix = "make it an nnx.Param where the reference trains it, and no nnx.Param where it does not"
    return Diagnosis(kind=TRAINED, module=module, sentence=sentence, fix=fix)
