import importlib.util
import os
import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from parity.weights import store, store_orbax, store_torch
from parity.weights.hashes import hashes_of
from parity.weights.problems import TensorSpec
from parity.weights.rules import bits_equal
from parity.weights.store import Checkpoint, StoreError, read_tensors, write_tensors

torch = pytest.importorskip("torch") if importlib.util.find_spec("torch") else None
needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")

NAMES = ["w.safetensors", pytest.param("w.pt", marks=needs_torch), "w.msgpack", "w"]


def tensors():
    nan = np.array([0x7FC00001, 0xFF812345, 0x80000000], "u4").view(np.float32)
    return {
        "layers.0.nan32": nan,
        "layers.0.nan16": np.array([[0x7FC1, 0xFF81, 0x8000]], "u2").view(ml_dtypes.bfloat16),
        "layers.1.half": np.array([[0x7E01], [1]], "u2").view(np.float16),
        "layers.1.double": np.arange(6, dtype=np.float64).reshape(2, 3) / 3,
        "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "big_endian": np.arange(3, dtype=">f4"),
        "scalar": np.asarray(np.float32(2.5)),
        "one": np.zeros((1,), ml_dtypes.bfloat16),
        "step": np.asarray(np.int32(7)),
        "long": np.array([2**40 + 1]),
        "mask": np.array([True, False]),
    }


def assert_same_tensors(got, expected):
    assert set(got) == set(expected)
    for name, array in expected.items():
        assert bits_equal(got[name], array.astype(array.dtype.newbyteorder("="))), name


@pytest.mark.parametrize("name", NAMES)
def test_bits_survive(tmp_path, name):
    checkpoint = Checkpoint(
        tensors=tensors(), aliases={"again": "turned", "more": "turned"}, metadata={"config": '{"d_model": 6}'}
    )
    write_tensors(tmp_path / "new" / name, checkpoint)
    read = read_tensors(tmp_path / "new" / name)
    assert_same_tensors(read.tensors, checkpoint.tensors)
    assert dict(read.aliases) == checkpoint.aliases
    assert dict(read.metadata) == checkpoint.metadata
    assert read.with_aliases()["more"].tolist() == tensors()["turned"].tolist()
    assert os.listdir(tmp_path / "new") == [name]


@pytest.mark.parametrize("name", NAMES[:3])
def test_empty_tensors_survive_and_are_no_aliases(tmp_path, name):
    empty = {"a": np.zeros((0, 3), np.float32), "b": np.zeros((0, 3), np.float32)}
    write_tensors(tmp_path / name, Checkpoint(tensors=empty))
    read = read_tensors(tmp_path / name)
    assert not read.aliases
    assert_same_tensors(read.tensors, empty)


def test_orbax_refuses_empty_tensors_and_nested_names(tmp_path):
    with pytest.raises(StoreError, match="'b' empty"):
        write_tensors(tmp_path / "w", Checkpoint(tensors={"b": np.zeros((0, 3))}))
    with pytest.raises(StoreError, match=r"'a\.b' to be a tensor or a level, got 'a\.b\.c'"):
        write_tensors(tmp_path / "w", Checkpoint(tensors={"a.b": np.ones(1), "a.b.c": np.ones(1)}))
    with pytest.raises(StoreError, match=r"'a\.\.b'"):
        write_tensors(tmp_path / "w", Checkpoint(tensors={"a..b": np.ones(1)}))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_what_exists_is_replaced_only_by_something_whole(tmp_path, name, monkeypatch):
    path = tmp_path / name
    write_tensors(path, Checkpoint(tensors={"a": np.ones(2)}))
    write_tensors(path, Checkpoint(tensors={"b": np.ones(3)}))
    assert set(read_tensors(path).tensors) == {"b"}
    with pytest.raises(StoreError, match=rf"/{name}: expected 'c'"):
        write_tensors(path, Checkpoint(tensors={"c": np.array(["text"]), "d": np.zeros(0)}))

    def fail(part, path):
        raise OSError("no space left")

    monkeypatch.setattr(store, "_replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write_tensors(path, Checkpoint(tensors={"e": np.ones(3)}))
    assert set(read_tensors(path).tensors) == {"b"}
    assert os.listdir(tmp_path) == [name]


def test_safetensors_is_read_lazily(tmp_path):
    path = tmp_path / "w.safetensors"
    write_tensors(path, Checkpoint(tensors={"a": np.ones((2, 3), ml_dtypes.bfloat16), "b": np.ones(1)}))
    lazy = read_tensors(path).tensors
    assert lazy.spec("a") == TensorSpec((2, 3), np.dtype(ml_dtypes.bfloat16))
    write_tensors(path, Checkpoint(tensors={"z": np.ones(1)}))  # while the old one is open
    assert lazy["a"].tolist() == [[1, 1, 1], [1, 1, 1]]
    with pytest.raises(KeyError):
        lazy["c"]


@needs_torch
def test_the_libraries_own_files_are_understood(tmp_path):
    import orbax.checkpoint as ocp
    import safetensors.torch

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.b = torch.nn.Embedding(5, 3)
            self.a = torch.nn.Linear(3, 5)
            self.a.weight = self.b.weight

    model = Tied()
    safetensors.torch.save_model(model, str(tmp_path / "w.safetensors"))
    torch.save(model.state_dict(), tmp_path / "w.pt")
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "wrapped.pt")
    expected = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    for name, aliases in [
        ("w.safetensors", {"b.weight": "a.weight"}),  # it keeps the first in the alphabet
        ("w.pt", {"a.weight": "b.weight"}),  # the first in the state dict
        ("wrapped.pt", {"a.weight": "b.weight"}),
    ]:
        read = read_tensors(tmp_path / name)
        assert dict(read.aliases) == aliases
        assert_same_tensors(read.with_aliases(), expected)
    ours = read_tensors(tmp_path / "w.pt")
    write_tensors(tmp_path / "ours.pt", ours)
    state = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert state["a.weight"].data_ptr() == state["b.weight"].data_ptr()
    Tied().load_state_dict(state)
    write_tensors(tmp_path / "ours.safetensors", ours)
    safetensors.torch.load_model(Tied(), str(tmp_path / "ours.safetensors"))
    write_tensors(tmp_path / "ours", ours)
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "ours")
    np.testing.assert_array_equal(tree["b"]["weight"], expected["b.weight"])


def test_orbax_trees_of_jax_arrays_lists_and_numbers(tmp_path):
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    with jax.enable_x64(True):
        double = jnp.arange(3, dtype=jnp.float64) / 3
    tree = {
        "layers": [{"a": double}, {"a": jnp.ones(2, jnp.bfloat16)}],
        "nested": {0: np.ones(1)},
        "none": None,
        "e": {},
    }
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", {**tree, "step": 3}, custom_metadata={"note": "x", "number": 3})
        checkpointer.save(tmp_path / "text", {**tree, "name": "x"})
        checkpointer.save(tmp_path / "twice", {"a.b": np.ones(1), "a": {"b": np.zeros(1)}})
        checkpointer.save(tmp_path / "run" / "params", tree)
    read = read_tensors(tmp_path / "tree")
    assert {name: str(array.dtype) for name, array in read.tensors.items()} == {
        "layers.0.a": "float64",
        "layers.1.a": "bfloat16",
        "nested.0": "float64",
        "step": "int64",
    }
    assert bits_equal(read.tensors["layers.0.a"], np.asarray(double))
    assert dict(read.metadata) == {"note": "x", "number": "3"}
    with pytest.raises(StoreError, match="'name', a string"):
        read_tensors(tmp_path / "text")
    with pytest.raises(StoreError, match=r"'a\.b' twice"):
        read_tensors(tmp_path / "twice")
    with pytest.raises(StoreError, match="one is in params"):
        read_tensors(tmp_path / "run")


@pytest.mark.parametrize("name", NAMES[:3])
def test_damaged_files_are_named(tmp_path, name):
    path = tmp_path / name
    write_tensors(path, Checkpoint(tensors={"first": np.arange(5000.0), "second": np.ones(3)}))
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"nonsense" * 9):
        path.write_bytes(content)
        with pytest.raises(StoreError, match=f"{name}: expected"):
            dict(read_tensors(path).tensors)


def test_a_damaged_orbax_directory_is_named(tmp_path):
    path = tmp_path / "w"
    write_tensors(path, Checkpoint(tensors={"first": np.arange(5000.0), "second": np.ones(3)}))
    for file in path.rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    # In a process of its own: when one read fails, Orbax closes its event loop under the others, and their threads
    # may then complain of that at any later moment, in the middle of another test.
    code = f"from parity.weights.store import read_tensors; read_tensors({str(path)!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"StoreError: {path}: expected" in result.stderr
    assert "damaged" in result.stderr


@pytest.mark.parametrize(
    ("name", "module"), [pytest.param("w.pt", store_torch, marks=needs_torch), ("w", store_orbax)], ids=["pt", "orbax"]
)
def test_other_tensors_than_were_written_are_refused(tmp_path, name, module, monkeypatch):
    one = Checkpoint(tensors={"a": np.ones(2), "b": np.zeros(3)}, metadata={"config": "x"})
    for change, message in [
        (lambda tensors, text: ({**tensors, "b": np.full(3, -0.0)}, text), "'b' as it was written, got other bytes"),
        (lambda tensors, text: ({**tensors, "b": np.zeros((3, 1))}, text), "dtypes, shapes and text"),
        (lambda tensors, text: (tensors, {"config": "y"}), "dtypes, shapes and text"),
        (lambda tensors, text: ({"a": tensors["a"]}, text), "hashes of its tensors, got those of others"),
    ]:
        monkeypatch.setattr(module, "hashes_of", lambda *given, change=change: hashes_of(*change(*given)))
        write_tensors(tmp_path / name, one)
        with pytest.raises(StoreError, match=f"{name}: expected .*{message}"):
            read_tensors(tmp_path / name)


class Malicious:
    def __reduce__(self):
        return os.mkdir, (os.environ["TWINFORMER_TRAP"],)


@needs_torch
def test_a_pickle_that_runs_code_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINFORMER_TRAP", str(tmp_path / "trap"))
    torch.save({"w": torch.ones(1), "x": Malicious()}, tmp_path / "w.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Malicious(), protocol=2))
    for name in ("w.pt", "plain.pt"):
        with pytest.raises(StoreError, match=rf"{name}: expected nothing but tensors.* posix\.mkdir; it was not run"):
            read_tensors(tmp_path / name)
    assert not (tmp_path / "trap").exists()


@needs_torch
def test_entries_that_are_no_dense_tensors_are_refused_by_name(tmp_path):
    path = tmp_path / "w.pt"
    for entry, message in [
        (3, "'odd', a int"),
        ({"inner": 1}, "'odd', a dict"),
        (torch.ones(2, 2).to_sparse(), "'odd' to be a dense tensor"),
        (torch.ones(2, device="meta"), "'odd' to be a dense tensor.*meta"),
        (torch.ones(2).to(torch.float8_e8m0fnu), "'odd' to be a dense tensor.*float8_e8m0fnu"),
    ]:
        torch.save({"w": torch.ones(1), "odd": entry}, path)
        with pytest.raises(StoreError, match=message):
            read_tensors(path)
    torch.save([torch.ones(1)], path)
    with pytest.raises(StoreError, match="a state dict, got a list"):
        read_tensors(path)
    torch.save({"model": {}, "state_dict": {}}, path)
    with pytest.raises(StoreError, match="got state_dict and model"):
        read_tensors(path)


@needs_torch
def test_torch_views_and_float8(tmp_path):
    base = torch.arange(6.0).reshape(2, 3)
    state = {"base": base, "turned": base.T, "row": base[1], "float8": torch.ones(2).to(torch.float8_e4m3fn)}
    torch.save(state, tmp_path / "w.pt")
    read = read_tensors(tmp_path / "w.pt")
    assert not read.aliases  # other shapes of the same memory are other tensors
    assert read.tensors["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert read.tensors["float8"].dtype == ml_dtypes.float8_e4m3fn
    write_tensors(tmp_path / "again.pt", read)
    assert_same_tensors(read_tensors(tmp_path / "again.pt").tensors, read.tensors)


def test_without_torch_the_error_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(StoreError, match="expected torch to be installed"):
        write_tensors(tmp_path / "w.pt", Checkpoint(tensors={"a": np.ones(1)}))


def test_wrong_paths_and_checkpoints_are_refused(tmp_path):
    one = Checkpoint(tensors={"a": np.ones(1)})
    with pytest.raises(FileNotFoundError, match=r"nothing\.pt"):
        read_tensors(tmp_path / "nothing.pt")
    (tmp_path / "w.npz").write_bytes(b"")
    with pytest.raises(StoreError, match=r"got suffix '\.npz'"):
        read_tensors(tmp_path / "w.npz")
    with pytest.raises(StoreError, match=r"got suffix '\.npz'"):
        write_tensors(tmp_path / "w.npz", one)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").touch()
    with pytest.raises(StoreError, match="a directory of other files"):
        write_tensors(tmp_path / "home", one)
    assert (tmp_path / "home" / "thesis").exists()
    (tmp_path / "d.safetensors").mkdir()
    with pytest.raises(StoreError, match="a file to replace, got a directory"):
        write_tensors(tmp_path / "d.safetensors", one)
    for metadata in ({"b": "a"}, {"c": "x"}):
        with pytest.raises(StoreError, match="metadata"):
            write_tensors(
                tmp_path / "w.safetensors", Checkpoint(tensors=one.tensors, aliases={"c": "a"}, metadata=metadata)
            )
    with pytest.raises(StoreError, match="'a' of a safetensors dtype, got complex128"):
        write_tensors(tmp_path / "w.safetensors", Checkpoint(tensors={"a": np.ones(1, complex)}))
    for aliases in ({"a": "a"}, {"b": "c"}):
        with pytest.raises(ValueError, match="second name"):
            Checkpoint(tensors=one.tensors, aliases=aliases)
