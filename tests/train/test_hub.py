"""Corpora of the hub: folders laid out like it, and a stand-in for it on this machine. Nothing is downloaded."""

import datetime
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import datasets
import pyarrow
import pytest
from pyarrow.parquet import write_table

from train.config import CorpusConfig
from train.corpus import load_corpus
from train.hub import find_splits

SPLITS = {"train": 5, "validation": 2, "test": 3}
CONVERTED = "refs/convert/parquet"


def pairs(split: str) -> list[tuple[str, str]]:
    return [(f"{split} deutsch {i}", f"{split} english {i}") for i in range(SPLITS[split])]


def nested(rows: list[tuple[str | None, str | None]]) -> Any:
    return pyarrow.table({"id": range(len(rows)), "translation": [{"de": de, "en": en} for de, en in rows]})


def flat(rows: list[tuple[str | None, str | None]]) -> Any:
    return pyarrow.table({"en": [en for _, en in rows], "de": [de for de, _ in rows]})


def write(file: Path, table: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_table(table, file)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Laid out like wmt/wmt14; the training text in two files."""
    folder = tmp_path / "corpus"
    for split in SPLITS:
        rows = pairs(split)
        shards = [rows[:2], rows[2:]] if split == "train" else [rows]
        for i, shard in enumerate(shards):
            write(folder / "data" / f"{split}-{i:05}-of-{len(shards):05}.parquet", nested(shard))
    return folder


def config(hub: Path | str, **changes: Any) -> CorpusConfig:
    return CorpusConfig(
        **{"kind": "hub", "hub": str(hub), "validation_split": "validation", "test_split": "test"} | changes
    )


def test_translations_again_and_again(folder: Path) -> None:
    corpus = load_corpus(config(folder))
    assert list(corpus.train) == pairs("train")
    assert list(corpus.train) == pairs("train")
    assert list(corpus.validation) == pairs("validation")
    assert list(corpus.test) == pairs("test")


def test_a_column_for_each_language_is_the_same_corpus(folder: Path, tmp_path: Path) -> None:
    for split in SPLITS:
        write(tmp_path / "flat" / f"{split}.parquet", flat(pairs(split)))
    ours, theirs = load_corpus(config(tmp_path / "flat")), load_corpus(config(folder))
    assert list(ours.train) == pairs("train")
    assert ours.train.sha256 == theirs.train.sha256


def test_json_lines_as_in_multi30k(tmp_path: Path) -> None:
    for split, name in (("train", "train"), ("validation", "val"), ("test", "test")):
        lines = [json.dumps({"en": en, "de": de}) for de, en in pairs(split)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    corpus = load_corpus(config(tmp_path))
    assert [list(text) for text in (corpus.train, corpus.validation, corpus.test)] == [pairs(split) for split in SPLITS]


def test_the_languages_say_which_side_is_which(folder: Path) -> None:
    corpus = load_corpus(config(folder, source_language="en", target_language="de"))
    assert list(corpus.test) == [(en, de) for de, en in pairs("test")]


def test_nulls_are_empty_sentences_and_are_reported(folder: Path) -> None:
    """A struct that is null as a whole, too; and a held-out sentence that training has seen."""
    rows = [("a", None), (None, "b"), ("c", "d"), pairs("test")[0], ("e", "f")]
    table = nested(rows)
    column = pyarrow.array([*table["translation"].to_pylist()[:4], None], type=table["translation"].type)
    for file in (folder / "data").glob("train-*"):
        file.unlink()
    write(folder / "data" / "train-00000-of-00001.parquet", table.set_column(1, "translation", column))
    corpus = load_corpus(config(folder))
    assert list(corpus.train) == [("c", "d"), pairs("test")[0]]
    assert corpus.notes == (
        "train: 3 of 5 pairs dropped for want of words: 1 in the target, 1 in the source, 1 on both sides",
        "test: 1 of 3 sources stand in the training text too, 1 with the same translation",
    )


def test_rows_are_read_batch_by_batch_out_of_mapped_files(tmp_path: Path) -> None:
    rows = [(f"deutsch {i}", f"english {i}") for i in range(2_500)]
    write(tmp_path / "many" / "train.parquet", nested(rows))
    (split,) = find_splits(config(tmp_path / "many"), ["train"])
    assert all(file.suffix == ".arrow" and file.is_file() for file in split.files)
    allocated = pyarrow.total_allocated_bytes()
    reading = iter(split)
    assert next(reading) == rows[0]
    assert pyarrow.total_allocated_bytes() - allocated < 100_000  # of some 300,000 the text has
    assert [rows[0], *reading] == rows


def test_a_slice_is_a_split(folder: Path) -> None:
    (split,) = find_splits(config(folder), ["train[1:4]"])
    assert list(split) == pairs("train")[1:4]


@pytest.mark.parametrize("wrong", ["val", "train[", "train[:7 per mille]"])
def test_an_unknown_split_names_those_that_exist(folder: Path, wrong: str) -> None:
    with pytest.raises(ValueError, match=r"split of the corpus '.*corpus', which has train, validation, test, got '"):
        load_corpus(config(folder, validation_split=wrong))


def test_languages_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    expected = r"'fr' and 'en' in the corpus '.*corpus', got the columns id, translation with de, en in translation"
    with pytest.raises(ValueError, match=expected):
        load_corpus(config(folder, source_language="fr"))
    write(tmp_path / "flat" / "train.parquet", flat(pairs("train")))
    with pytest.raises(ValueError, match=r"'de' and 'nl' in the corpus '.*flat', got the columns en, de$"):
        find_splits(config(tmp_path / "flat", target_language="nl"), ["train"])


def test_columns_that_are_no_text(tmp_path: Path) -> None:
    write(tmp_path / "odd" / "train.parquet", pyarrow.table({"de": ["a"], "en": [3]}))
    with pytest.raises(ValueError, match=r"text in the column 'en' of the corpus '.*odd', got int64"):
        find_splits(config(tmp_path / "odd"), ["train"])


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(ValueError, match=r"the corpus '.*broken': .*[Pp]arquet"):
        find_splits(config(tmp_path / "broken"), ["train"])


def test_configs_are_folders_that_the_card_names(tmp_path: Path) -> None:
    card = ["---", "configs:"]
    for name in ("de-en", "fr-en"):
        write(tmp_path / name / "train-00000-of-00001.parquet", nested([(name, name)]))
        card += [f"- config_name: {name}", "  data_files:", "  - split: train", f"    path: {name}/train-*"]
    (tmp_path / "README.md").write_text("\n".join([*card, "---", ""]))
    (split,) = find_splits(config(tmp_path, hub_config="fr-en"), ["train"])
    assert list(split) == [("fr-en", "fr-en")]
    with pytest.raises(ValueError, match=r"\(config cs-en\): .*'cs-en' not found. Available: \['de-en', 'fr-en'\]"):
        find_splits(config(tmp_path, hub_config="cs-en"), ["train"])
    with pytest.raises(ValueError, match=r"Config name is missing.*\n.*\['de-en', 'fr-en'\]"):
        find_splits(config(tmp_path), ["train"])


def test_offline_says_what_to_do() -> None:
    expected = r"the corpus 'wmt/wmt14' \(config de-en\) .*ConnectionError.*\nOffline: .*HF_HOME.*corpus\.kind=files"
    with pytest.raises(FileNotFoundError, match=expected):
        load_corpus(config("wmt/wmt14", hub_config="de-en"))
    with pytest.raises(FileNotFoundError, match=r"'nobody/x' .*revision refs/convert/parquet.*\nOffline: "):
        load_corpus(config("nobody/x", hub_config="de-en", hub_revision=CONVERTED))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the corpus '.*nowhere' on the .* hub, in its cache or as a folder"):
        load_corpus(config(tmp_path / "nowhere"))


def test_without_the_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"library datasets, to load the corpus .*pip install 'twinformer\[data\]'"):
        load_corpus(config(folder))


def test_a_converted_branch_in_a_folder(tmp_path: Path) -> None:
    """Splits by their exact names; the part of a split that was too large to convert is none."""
    for split in ("train", "test_2016", "test_2017", "partial-train"):
        write(tmp_path / "iwslt-de-en" / split / "0000.parquet", nested([(split, split)]))
    converted = config(tmp_path, hub_config="iwslt-de-en", hub_revision=CONVERTED)
    assert [list(split) for split in find_splits(converted, ["test_2017", "train"])] == [
        [("test_2017", "test_2017")],
        [("train", "train")],
    ]
    with pytest.raises(ValueError, match=r"which has test_2016, test_2017, train, got 'test'"):
        find_splits(converted, ["test"])
    with pytest.raises(ValueError, match=r"<split>/0000\.parquet in fr-en, corpus\.hub_config, .*/tree/refs%2Fconvert"):
        find_splits(config(tmp_path, hub_config="fr-en", hub_revision=CONVERTED), ["train"])


class Hub(http.server.ThreadingHTTPServer):
    """As much of the hub's interface as its client asks for: `repositories[name][revision]` is a folder of files."""

    def __init__(self, repositories: dict[str, dict[str, Path]]):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.repositories = repositories
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        api = parts[0] == "api"
        _, owner, name, kind, *rest = [*parts[api:], "", "", "", ""]
        revisions = self.server.repositories.get(f"{owner}/{name}")
        if revisions is None:
            return self.refuse("RepoNotFound")
        if kind not in ("revision", "tree", "paths-info", "resolve"):
            kind, rest = "revision", ["main"]
        root = next((root for revision, root in revisions.items() if rest[0] in (revision, sha(root))), None)
        if root is None:
            return self.refuse("RevisionNotFound")
        path = "/".join(part for part in rest[1:] if part)
        if kind == "resolve":
            return self.send_file(root / path, sha(root)) if (root / path).is_file() else self.refuse("EntryNotFound")
        if kind == "revision":
            return self.send(json.dumps({"id": f"{owner}/{name}", "sha": sha(root), "siblings": []}).encode())
        if kind == "paths-info":
            found = [root / path for path in asked_paths(body, self.headers["Content-Type"])]
        else:
            found = list((root / path).rglob("*") if "recursive=true" in self.path.lower() else (root / path).glob("*"))
        return self.send(json.dumps([entry(root, file) for file in sorted(found) if file.exists()]).encode())

    def send_file(self, file: Path, commit: str) -> None:
        content = file.read_bytes()
        self.send(content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit})

    def send(self, content: bytes, headers: dict[str, str] | None = None, *, status: int = 200) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, code: str) -> None:
        self.send(b"", {"X-Error-Code": code}, status=404)


def asked_paths(body: bytes, kind: str) -> list[str]:
    if "json" in kind:
        return json.loads(body)["paths"]
    from urllib.parse import parse_qs

    return parse_qs(body.decode())["paths"]


def sha(root: Path) -> str:
    return hashlib.sha1(str(root).encode()).hexdigest()


def entry(root: Path, file: Path) -> dict[str, Any]:
    kind = "directory" if file.is_dir() else "file"
    commit = {"id": sha(root), "title": "x", "date": datetime.datetime(2026, 1, 1).isoformat() + ".000Z"}
    path, oid = file.relative_to(root).as_posix(), hashlib.sha1(str(file).encode()).hexdigest()
    return {
        "type": kind,
        "path": path,
        "oid": oid,
        "size": 0 if file.is_dir() else file.stat().st_size,
        "lastCommit": commit,
    }


@pytest.fixture
def hub(folder: Path, tmp_path: Path) -> Iterator[Hub]:
    for split in SPLITS:
        write(tmp_path / "converted" / "iwslt2017-de-en" / split / "0000.parquet", nested(pairs(split)))
        write(tmp_path / "converted" / "iwslt2017-en-fr" / split / "0000.parquet", flat(pairs(split)))
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "iwslt2017.py").write_text("raise SystemExit('was run')\n")
    main, other = tmp_path / "script", tmp_path / "converted"
    server = Hub({"some/corpus": {"main": folder}, "IWSLT/iwslt2017": {"main": main, CONVERTED: other}})
    yield server
    server.shutdown()
    server.server_close()


LOAD = """
import json, sys
from train.config import CorpusConfig
from train.corpus import load_corpus
try:
    corpus = load_corpus(CorpusConfig(**json.loads(sys.argv[1])))
    print(json.dumps([list(corpus.train), list(corpus.validation), list(corpus.test)]))
except (ValueError, OSError) as error:
    print(type(error).__name__, error)
heavy = sorted({"torch", "jax", "tensorflow"} & set(sys.modules))
assert not heavy, heavy
"""


def load(home: Path, endpoint: str | None, **fields: str) -> str:
    """Loads it in a process of its own, whose hub is the stand-in, or which is offline."""
    online = {"HF_ENDPOINT": endpoint or "", "HF_HUB_OFFLINE": "0" if endpoint else "1"}
    environment = {**os.environ, **online, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}
    if endpoint is None:
        del environment["HF_ENDPOINT"]
    fields = {"kind": "hub", "validation_split": "validation", "test_split": "test", **fields}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(fields)],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n")


LOADED = json.dumps([pairs(split) for split in SPLITS])


def test_downloaded_once_and_then_read_offline_without_torch(hub: Hub, tmp_path: Path) -> None:
    for endpoint in (hub.endpoint, None):
        assert load(tmp_path / "home", endpoint, hub="some/corpus") == LOADED


def test_a_converted_branch_is_downloaded_once_and_then_read_offline(hub: Hub, tmp_path: Path) -> None:
    fields = {"hub": "IWSLT/iwslt2017", "hub_config": "iwslt2017-de-en", "hub_revision": CONVERTED}
    for endpoint in (hub.endpoint, None):
        assert load(tmp_path / "home", endpoint, **fields) == LOADED


def test_what_the_hub_refuses(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    script = load(home, hub.endpoint, hub="IWSLT/iwslt2017", hub_config="iwslt2017-de-en")
    assert script.startswith(
        "ValueError expected files of data in the corpus 'IWSLT/iwslt2017' (config iwslt2017-de-en)"
    )
    assert "corpus.hub_revision=refs/convert/parquet" in script
    missing = load(home, hub.endpoint, hub="some/nothing")
    assert missing.startswith("FileNotFoundError expected the corpus 'some/nothing' on the Hugging Face hub")
    assert "DatasetNotFoundError" in missing
    revision = load(home, hub.endpoint, hub="some/corpus", hub_revision="v2")
    assert "'some/corpus' (revision v2)" in revision
    assert "Revision 'v2' doesn't exist" in revision
