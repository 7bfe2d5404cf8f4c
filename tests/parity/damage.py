"""Ways in which files of weights come to harm: bytes flipped, cut and put in, names and shapes changed. All seeded."""

import json
from collections import OrderedDict

import numpy as np
import torch

JUNK = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 10**6, 10**9, 10**15, 10**300, 0.5, 1e-9, -0.0, float("nan"), float("inf")),
    *("", "7", "relu", "never", "\x00", "\ud800", [], [1], [[1]], [[]], [None], {}, {"a": 1}, [[0]] * 9),
]
DTYPES = ["F64", "F32", "F16", "BF16", "I32", "U32", "I8", "BOOL", "F8_E4M3", "C64", "X", 3, None]


def of_bytes(rng, data):
    """One small accident; headers and ends of files are hit as often as all the rest."""
    data = bytearray(data)
    if not data:
        return "nothing", b"x"
    size = len(data)
    near = int(rng.integers(min(size, 2000)))
    at = [near, size - 1 - near, int(rng.integers(size))][int(rng.integers(3))]
    many = int(rng.integers(1, 40))
    kind = rng.choice(["bit", "bit", "bit", "byte", "byte", "cut", "lost", "put in", "zeros", "moved", "appended"])
    if kind == "bit":
        data[at] ^= 1 << int(rng.integers(8))
    elif kind == "byte":
        data[at] = int(rng.integers(256))
    elif kind == "cut":
        del data[at:]
    elif kind == "lost":
        del data[at : at + many]
    elif kind == "put in":
        data[at:at] = rng.bytes(many)
    elif kind == "zeros":
        data[at : at + many] = bytes(len(data[at : at + many]))
    elif kind == "moved":
        data[at : at + many], data[:0] = b"", data[at : at + many]
    else:
        data += rng.bytes(many)
    return f"{kind} at {at}", bytes(data)


def of_json(rng, data):
    """A field that says something else, or a file that is something else."""
    values = json.loads(data)
    kind = rng.choice(["value", "value", "value", "value", "renamed", "lost", "twice", "deep", "other", "inside"])
    inner = values["weight_map"] if "weight_map" in values and kind != "other" else values
    name = str(rng.choice(list(inner)))
    if kind == "value":
        inner[name] = JUNK[int(rng.integers(len(JUNK)))]
    elif kind == "renamed":
        inner[rng.choice([name + "x", name[1:], "", str(rng.choice(list(inner)))])] = inner.pop(name)
    elif kind == "lost":
        del inner[name]
    elif kind == "deep":
        return "deep", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    elif kind == "other":
        name, values = "all", JUNK[int(rng.integers(len(JUNK)))]
    elif kind == "inside":
        other = str(rng.choice(list(inner)))
        inner[name], inner[other] = inner[other], inner[name]
    text = json.dumps(values).encode()
    if kind == "twice":
        text = b'{"' + name.encode() + b'": 1, ' + text[1:]
    return f"{kind} {name}", text


def of_header(rng, data):
    """Another header of a safetensors file over the same data."""
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    one, two = (str(name) for name in rng.choice(names, 2))
    kind = rng.choice(["name", "swapped names", "shape", "swapped shapes", "dtype", "place", "lost", "text", "length"])
    if kind == "name":
        header[rng.choice([one + "x", one[1:], one.replace("0", "1"), one.replace("weight", "bias")])] = header.pop(one)
    elif kind == "swapped names":
        header[one], header[two] = header[two], header[one]
    elif kind == "shape":
        shape = header[one]["shape"]
        options = [shape[::-1], [*shape, 1], [int(np.prod(shape))], [], [10**12, *shape], [-1], [1, *shape], None]
        header[one]["shape"] = options[int(rng.integers(len(options)))]
    elif kind == "swapped shapes":
        header[one]["shape"], header[two]["shape"] = header[two]["shape"], header[one]["shape"]
    elif kind == "dtype":
        header[one]["dtype"] = DTYPES[int(rng.integers(len(DTYPES)))]
    elif kind == "place":
        header[one]["data_offsets"] = header[two]["data_offsets"]
    elif kind == "lost":
        del header[one]
    elif kind == "text":
        of_text(rng, header.setdefault("__metadata__", {"format": "pt"}))
    text = json.dumps(header).encode()
    size = 2 ** int(rng.integers(64)) if kind == "length" else len(text)
    return f"{kind} of {one}", size.to_bytes(8, "little") + text + rest


def of_text(rng, text):
    """Free text beside tensors; what is JSON in it, too."""
    name = str(rng.choice(list(text)))
    if isinstance(text[name], str) and text[name].startswith("{") and rng.integers(4):
        text[name] = of_json(rng, text[name].encode())[1].decode(errors="replace")
    elif rng.integers(2):
        text[name + "x"] = text.pop(name)
    else:
        text[name] = JUNK[int(rng.integers(len(JUNK)))]


def of_state(rng, state):
    """Another state dict of torch."""
    state = OrderedDict(state)
    names = list(state)
    one, two = (str(name) for name in rng.choice(names, 2))
    kind = rng.choice(
        ["name", "lost", "more", "swapped", "turned", "flat", "NaN", "inf", "integers", "half", "sparse", "no tensor"]
    )
    tensor = state[one]
    if kind == "name":
        new = [one + "x", one[1:], 3, None, (one,), one.replace("0", "1"), one.replace("weight", "bias")]
        state[new[int(rng.integers(len(new)))]] = state.pop(one)
    elif kind == "lost":
        del state[one]
    elif kind == "more":
        state[f"{one}.more"] = tensor
    elif kind == "swapped":
        state[one], state[two] = state[two], state[one]
    elif kind in ("NaN", "inf"):
        state[one] = tensor.clone()
        state[one].view(-1)[int(rng.integers(tensor.numel()))] = float(kind)
    else:
        changed = {
            "turned": lambda: tensor.T if tensor.ndim == 2 else tensor[None],
            "flat": lambda: tensor.reshape(-1),
            "integers": lambda: tensor.to(torch.int32),
            "half": tensor.half,
            "sparse": tensor.to_sparse,
            "no tensor": lambda: JUNK[int(rng.integers(len(JUNK)))],
        }
        state[one] = changed[kind]()
    return f"{kind} {one}", state
