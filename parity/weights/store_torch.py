"""Weights in torch's `.pt` files, without running code from them. The only file of this layer that knows torch."""

import pickle
import re
import types
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.weights.checkpoint import Checkpoint, StoreError, native
from parity.weights.hashes import HASHES, Hashes, hashes_of

if TYPE_CHECKING:
    import torch

_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
_FOLDER = 0x10  # of a zip's attributes
_WRAPPERS = ("state_dict", "model")
# numpy arrays of these cannot be handed to torch and back; integers of the same size can.
_AS_INTEGERS = {"bfloat16": "int16", "float8_e4m3fn": "int8", "float8_e5m2": "int8"}


def read_torch(path: Path) -> Checkpoint:
    """A state dict, or the one under `state_dict` or `model` (what else stands beside it is not weights).

    Tensors that share storage, offset, shape and strides are one tensor: the first name counts, others are aliases.
    Where the file has hashes (ours have, beside metadata), other tensors than were written raise StoreError.
    """
    state, metadata = _unwrap(path, load_plain(path))
    hashes = metadata.pop(HASHES, None)
    checkpoint = checkpoint_of(path, state, metadata)
    Hashes(path, hashes, checkpoint.tensors).check_all(checkpoint.tensors, {**metadata, **checkpoint.aliases})
    return checkpoint


def checkpoint_of(path: Path, state: Mapping[Any, Any], metadata: Mapping[str, str]) -> Checkpoint:
    """A state dict as `read_torch` gives it. Raises StoreError that names what is no dense tensor."""
    torch = _import_torch(path)
    tensors: dict[str, np.ndarray] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise StoreError(f"{path}: expected only named tensors, got {name!r}, a {type(tensor).__name__}")
        dtype = _dtype(tensor)
        if dtype not in _DTYPES or tensor.layout != torch.strided or tensor.is_meta:
            kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise StoreError(f"{path}: expected {name!r} to be a dense tensor with a numpy dtype, got {kind}")
        storage = tensor.untyped_storage()
        place = (storage.data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), dtype)
        first = seen.setdefault(place, name) if storage.data_ptr() else name
        if first != name:
            aliases[name] = first
        else:
            tensors[name] = array_of(tensor)
    return Checkpoint(tensors=tensors, aliases=aliases, metadata=metadata)


def write_torch(path: Path, checkpoint: Checkpoint) -> None:
    """A plain state dict; with metadata, {"state_dict": ..., "metadata": ...}, and then with the tensors' hashes in it.

    Aliases share storage, as in torch. Raises StoreError on a dtype that torch lacks, or metadata of the hashes' name.
    """
    if HASHES in checkpoint.metadata:
        raise StoreError(f"{path}: expected metadata without {HASHES!r}, which has its own place, got it")
    state = state_dict_of(path, checkpoint)
    if not checkpoint.metadata:
        save_plain(path, state)
        return
    arrays = {name: array_of(state[name]) for name in checkpoint.tensors}
    hashes = hashes_of(arrays, {**checkpoint.metadata, **checkpoint.aliases})
    save_plain(path, {"state_dict": state, "metadata": {**checkpoint.metadata, HASHES: hashes}})


def state_dict_of(path: Path, checkpoint: Checkpoint) -> dict[str, "torch.Tensor"]:
    """The tensors as torch's. Raises StoreError that names `path` and the tensor of a dtype that torch lacks."""
    _import_torch(path)
    state = {}
    for name, array in checkpoint.tensors.items():
        if array.dtype.name not in _DTYPES:
            raise StoreError(f"{path}: expected {name!r} of a torch dtype, got {array.dtype}")
        state[name] = tensor_of(array)
    return state | {alias: state[name] for alias, name in checkpoint.aliases.items()}


def save_plain(path: Path, value: Any) -> None:
    """What `load_plain` reads: tensors and plain Python. Raises StoreError without torch."""
    _import_torch(path).save(value, path)


def _import_torch(path: Path) -> types.ModuleType:
    try:
        import torch
    except ImportError as error:
        message = f"{path}: expected torch to be installed for .pt files, got none; install it or use .safetensors"
        raise StoreError(message) from error
    return torch


def load_plain(path: Path, *, plain_classes: Sequence[type] = ()) -> Any:
    """What `torch.save` has written, of tensors and plain Python alone; no code of it is run, nor of other classes.

    Raises StoreError that names the class, or says that the file is damaged.
    """
    torch = _import_torch(path)
    _expect_whole_records(path)
    try:
        with torch.serialization.safe_globals(list(plain_classes)):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        if refused is None:
            raise StoreError(f"{path}: expected a whole file by torch.save, got {error}") from error
        message = f"{path}: expected nothing but tensors, got a pickle that refers to {refused[1]}; it was not run"
        raise StoreError(message) from error
    except Exception as error:  # a damaged file surfaces as RuntimeError, EOFError, KeyError, zip and struct errors
        raise StoreError(f"{path}: expected a whole file by torch.save, got {error or type(error).__name__}") from error


def _expect_whole_records(path: Path) -> None:
    """Of a record that is marked as a folder, or whose sizes differ, torch leaves memory as it was: random weights."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return  # from before torch 1.6, or no file of torch: torch says so
        try:
            records = zipfile.ZipFile(file).infolist()
        except (
            Exception
        ) as error:  # a damaged directory surfaces as BadZipFile, NotImplementedError, UnicodeDecodeError
            raise StoreError(f"{path}: expected a whole file by torch.save, got {error}") from error
        for record in records:
            stored = record.compress_type == zipfile.ZIP_STORED and record.compress_size == record.file_size
            if not stored or record.external_attr & _FOLDER:
                got = "a folder" if stored else f"{record.compress_size} bytes for {record.file_size}"
                raise StoreError(f"{path}: expected {record.filename!r} as torch.save stores it, got {got}")


def _unwrap(path: Path, loaded: Any) -> tuple[Mapping[Any, Any], dict[str, str]]:
    if not isinstance(loaded, Mapping):
        raise StoreError(f"{path}: expected a state dict, got a {type(loaded).__name__}")
    wrappers = [key for key in _WRAPPERS if isinstance(loaded.get(key), Mapping)]
    if len(wrappers) > 1:
        raise StoreError(f"{path}: expected one state dict, got {' and '.join(wrappers)}")
    if not wrappers:
        return loaded, {}
    metadata = loaded.get("metadata", {})
    texts = metadata.items() if isinstance(metadata, Mapping) else ()
    return loaded[wrappers[0]], {k: v for k, v in texts if isinstance(k, str) and isinstance(v, str)}


def _dtype(tensor: "torch.Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def array_of(tensor: "torch.Tensor") -> np.ndarray:
    """The values of a tensor on the CPU, not copied, of any dtype that numpy knows."""
    import torch

    dtype = _dtype(tensor)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if dtype not in _AS_INTEGERS:
        return tensor.numpy()
    return tensor.view(getattr(torch, _AS_INTEGERS[dtype])).numpy().view(np.dtype(dtype))


def tensor_of(array: np.ndarray) -> "torch.Tensor":
    """The inverse; copied only where torch must not write to the array."""
    import torch

    array, dtype = native(array), array.dtype.name
    # torch warns of memory it must not write to; a file read lazily, or a broadcast array, gives such.
    array = array if array.flags.writeable else array.copy()
    if dtype not in _AS_INTEGERS:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(_AS_INTEGERS[dtype])).view(getattr(torch, dtype))
